"""Rules of the doctor (:mod:`nvalchemi.data.check`): each looks at every batch once, then says what it found."""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from nvalchemi.data.batch import Batch
from nvalchemi.data.overlaps import closest_pairs

# Kind, severity, message, structures.
Finding = tuple[str, Literal["error", "warning"], str, tuple[int, ...]]

_LABELS = ("energy", "forces")
# Atoms closer than this share of the sum of their covalent radii overlap. The shortest bonds (H2, N2 at 1.2, and
# those of matter compressed to half its volume at 0.8) stay well above.
_OVERLAP = 0.5
# A force is an outlier above 10 eV/Å, if it is also 10 robust standard deviations of log |F| above the median, or 100
# times it.
_FORCE_FLOOR, _FORCE_SPREAD, _FORCE_RATIO = 10.0, 10.0, 100.0
# Net force per atom (eV/Å) above which forces do not come from a translation-invariant energy.
_NET_FORCE = 0.01
# Positions and cells that agree to this (Å) count as equal.
_SAME = 1e-4
# Stress × volume per atom (eV) in the median structure above which stress is hardly in eV/Å³: the strongest solids
# (cohesive energies up to 9 eV) at 150 GPa reach 5; 1 GPa taken for 1 eV/Å³ gives 11 in iron.
_LARGE_VIRIAL = 10.0


class Rule(ABC):
    """One thing to look for."""

    @abstractmethod
    def see(self, numbers: np.ndarray, batch: Batch) -> None:
        """Look at some structures, which have the numbers given in the dataset."""

    @abstractmethod
    def problems(self) -> list[Finding]:
        """What was found."""


def make_rules() -> list[Rule]:
    """All rules, in the order they are reported."""
    return [NonFinite(), MissingLabels(), Overlaps(), OutlierForces(), NetForces(), Duplicates(), Stress()]


class NonFinite(Rule):
    """NaN or infinity in any field."""

    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}

    def see(self, numbers: np.ndarray, batch: Batch) -> None:
        """Look at every floating-point field."""
        for name, tensor in batch.items():
            if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
                continue
            bad = ~torch.isfinite(tensor).reshape(tensor.shape[0], -1).all(dim=1)
            rows = bad.nonzero().squeeze(-1)
            level = batch.level(name)
            if level == "node":
                rows = batch.batch_idx[rows]
            elif level == "edge":
                rows = torch.searchsorted(batch.edge_ptr, rows, right=True) - 1
            found = numbers[rows.unique().cpu().numpy()].tolist()
            if found:
                self._found.setdefault(name, []).extend(found)

    def problems(self) -> list[Finding]:
        """One finding per field."""
        return [
            ("non-finite", "error", f"{name} is NaN or infinite in {len(found)} structure(s)", tuple(found))
            for name, found in self._found.items()
        ]


class MissingLabels(Rule):
    """Energies or forces that some or all structures lack; stress that only some periodic structures have."""

    def __init__(self) -> None:
        self._missing: dict[str, list[int]] = {}
        self._seen: Counter[str] = Counter()
        self._similar: Counter[str] = Counter()

    def see(self, numbers: np.ndarray, batch: Batch) -> None:
        """Note who lacks what, and names that look like the label under another key."""
        self._seen["energy"] += len(numbers)
        self._seen["forces"] += len(numbers)
        for label in _LABELS:
            if label not in batch:
                self._missing.setdefault(label, []).extend(numbers.tolist())
                stem = label.removesuffix("s")
                names = [*batch.keys(), *(key for info in batch.info for key in info)]
                self._similar.update(name for name in set(names) if stem in name.lower())
        periodic = numbers[batch.pbc.all(dim=1).cpu().numpy()] if "pbc" in batch else numbers[:0]
        self._seen["stress"] += len(periodic)
        if "stress" not in batch:
            self._missing.setdefault("stress", []).extend(periodic.tolist())

    def problems(self) -> list[Finding]:
        """One finding per label; a set in which no structure has stress is complete without it."""
        out: list[Finding] = []
        hint = f"; there are values named {', '.join(sorted(self._similar))}" if self._similar else ""
        for label, found in self._missing.items():
            total = self._seen[label]
            if not found or (label == "stress" and len(found) == total):
                continue
            # Energies alone can be trained on, a mixture without saying so cannot.
            severity: Literal["error", "warning"] = (
                "warning" if label == "forces" and len(found) == total else "error"
            )
            who = "all structures" if len(found) == total else f"{len(found)} of {total} structures"
            text = f"{who} have no {label}{hint if label in _LABELS else ''}"
            out.append(("missing label", severity, text, () if len(found) == total else tuple(found)))
        return out


class Overlaps(Rule):
    """Atoms at the same place or nearly so, periodic images included."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._closest = (np.inf, -1)

    def see(self, numbers: np.ndarray, batch: Batch) -> None:
        """Find the closest atoms of every structure."""
        for graph, distance in closest_pairs(batch, _OVERLAP).items():
            self._found.append(int(numbers[graph]))
            if distance < self._closest[0]:
                self._closest = distance, int(numbers[graph])

    def problems(self) -> list[Finding]:
        """Structures with overlapping atoms, and the smallest distance."""
        if not self._found:
            return []
        distance, number = self._closest
        count = len(self._found)
        text = f"overlapping atoms in {count} structure(s), the closest {distance:.3f} Å apart in structure {number}"
        return [("overlap", "error", text, tuple(self._found))]


class OutlierForces(Rule):
    """Forces far outside the rest of the dataset."""

    def __init__(self) -> None:
        self._numbers: list[np.ndarray] = []
        self._largest: list[np.ndarray] = []

    def see(self, numbers: np.ndarray, batch: Batch) -> None:
        """Note the largest force of each structure."""
        if "forces" not in batch:
            return
        norm = torch.linalg.vector_norm(batch.forces.detach().double(), dim=1).nan_to_num(0.0, posinf=0.0)
        largest = np.zeros(batch.num_graphs)
        np.maximum.at(largest, batch.batch_idx.cpu().numpy(), norm.cpu().numpy())
        self._numbers.append(numbers)
        self._largest.append(largest)

    def problems(self) -> list[Finding]:
        """Structures above the threshold."""
        if not self._largest:
            return []
        largest, numbers = np.concatenate(self._largest), np.concatenate(self._numbers)
        logarithm = np.log(np.maximum(largest, 1e-6))
        median = float(np.median(logarithm))
        # 1.4826 × median absolute deviation estimates a standard deviation; 0.1 where nearly all are equal.
        spread = max(1.4826 * float(np.median(np.abs(logarithm - median))), 0.1)
        ratio = min(np.exp(_FORCE_SPREAD * spread), _FORCE_RATIO)
        threshold = max(_FORCE_FLOOR, ratio * np.exp(median))
        found = numbers[largest > threshold]
        if len(found) == 0:
            return []
        text = (
            f"forces above {threshold:.3g} eV/Å in {len(found)} structure(s), the largest {largest.max():.3g} eV/Å; "
            f"the median structure has {np.exp(median):.3g} eV/Å"
        )
        return [("outlier force", "error", text, tuple(found.tolist()))]


class NetForces(Rule):
    """Forces that do not add up to zero."""

    def __init__(self) -> None:
        self._found: list[int] = []

    def see(self, numbers: np.ndarray, batch: Batch) -> None:
        """Sum the forces of each structure."""
        if "forces" not in batch:
            return
        total = torch.zeros(batch.num_graphs, 3, dtype=torch.float64, device=batch.device)
        total.index_add_(0, batch.batch_idx, batch.forces.detach().double())
        net = torch.linalg.vector_norm(total, dim=1) / batch.num_nodes_per_graph.clamp(min=1)
        self._found += numbers[(net > _NET_FORCE).cpu().numpy()].tolist()

    def problems(self) -> list[Finding]:
        """Structures with a net force."""
        if not self._found:
            return []
        count = len(self._found)
        text = (
            f"forces do not add up to zero (by more than {_NET_FORCE} eV/Å per atom) in {count} structure(s)"
        )
        return [("net force", "warning", text, tuple(self._found))]


class Duplicates(Rule):
    """Structures with the same atoms, positions and cell."""

    def __init__(self) -> None:
        self._numbers: list[np.ndarray] = []
        self._keys: list[int] = []
        self._energies: list[np.ndarray] = []

    def see(self, numbers: np.ndarray, batch: Batch) -> None:
        """Hash each structure, rounded."""
        ptr = batch.batch_ptr.tolist()
        rounded = _rounded(batch.positions.detach().cpu().double().numpy())
        elements = batch.atomic_numbers.cpu().numpy().astype(np.int64)
        cells = _rounded(batch.cell.detach().cpu().double().numpy()) if "cell" in batch else None
        for k, (start, stop) in enumerate(pairwise(ptr)):
            digest = hashlib.blake2b(elements[start:stop].tobytes(), digest_size=8)
            digest.update(rounded[start:stop].tobytes())
            if cells is not None:
                digest.update(cells[k].tobytes())
            self._keys.append(int.from_bytes(digest.digest(), "little"))
        self._numbers.append(numbers)
        nothing = np.full(len(numbers), np.nan)
        self._energies.append(
            batch.energy.detach().cpu().double().numpy().reshape(-1) if "energy" in batch else nothing
        )

    def problems(self) -> list[Finding]:
        """Structures that repeat an earlier one; an error where their energies differ."""
        if not self._keys:
            return []
        numbers, energies = np.concatenate(self._numbers), np.concatenate(self._energies)
        _, first, group = np.unique(
            np.array(self._keys, dtype=np.uint64), return_index=True, return_inverse=True
        )
        original = first[group]
        copies = np.flatnonzero(original != np.arange(len(original)))
        if len(copies) == 0:
            return []
        found = tuple(numbers[copies].tolist())
        out: list[Finding] = [
            ("duplicate", "warning", f"{len(copies)} structure(s) repeat an earlier one", found),
        ]
        differ = copies[np.abs(energies[copies] - energies[original[copies]]) > 1e-3]
        if len(differ):
            text = f"{len(differ)} structure(s) repeat an earlier one with an energy that differs by more than 1 meV"
            out.append(("contradicting duplicate", "error", text, tuple(numbers[differ].tolist())))
        return out


def _rounded(values: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(_finite(values), -1e12, 1e12) / _SAME).astype(np.int64)


def _finite(values: np.ndarray) -> np.ndarray:
    """The values with 0 where they are not finite (that is another rule's finding)."""
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


class Stress(Rule):
    """Stress with the wrong sign or unit.

    Where the same compound comes at several volumes, dE = σ dV for the mean stress σ (tensile positive): the slope of
    energy differences against σ dV is about 1. A sign error gives about −1, GPa 1/160, kbar 1/1602.
    """

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._keys: list[bytes] = []
        self._virial: list[float] = []
        self._asymmetric: list[int] = []

    def see(self, numbers: np.ndarray, batch: Batch) -> None:
        """Note composition, volume, mean stress and energy per atom."""
        if "stress" not in batch or "cell" not in batch:
            return
        stress = batch.stress.detach().cpu().double().numpy()
        known = np.isfinite(stress).all(axis=(1, 2))
        stress = _finite(stress)
        largest = np.abs(stress).max(axis=(1, 2))
        unequal = np.abs(stress - stress.transpose(0, 2, 1)).max(axis=(1, 2)) > 1e-3 * np.maximum(
            largest, 1e-3
        )
        self._asymmetric += numbers[unequal].tolist()
        atoms = np.maximum(batch.num_nodes_per_graph.cpu().numpy(), 1)
        volume = np.abs(np.linalg.det(batch.cell.detach().cpu().double().numpy()))
        self._virial += (largest * volume / atoms)[known].tolist()
        if "energy" not in batch:
            return
        mean = np.trace(stress, axis1=1, axis2=2) / 3
        energy = batch.energy.detach().cpu().double().numpy().reshape(-1)
        rows = np.stack([volume / atoms, mean, energy / atoms], axis=1)
        good = known & np.isfinite(rows).all(axis=1) & (volume > 0)
        elements, ptr = batch.atomic_numbers.cpu().numpy(), batch.batch_ptr.tolist()
        for k in np.flatnonzero(good).tolist():
            kinds, counts = np.unique(elements[ptr[k] : ptr[k + 1]], return_counts=True)
            self._keys.append(np.stack([kinds, counts // np.gcd.reduce(counts)]).tobytes())
        self._rows.append(rows[good])

    def problems(self) -> list[Finding]:
        """Sign, unit, symmetry."""
        out: list[Finding] = []
        if self._asymmetric:
            text = f"stress is not symmetric in {len(self._asymmetric)} structure(s)"
            out.append(("stress", "warning", text, tuple(self._asymmetric)))
        slope, correlation, pairs = self._slope()
        if pairs >= 8 and abs(correlation) > 0.5:
            if slope < 0:
                text = (
                    f"energy falls where stress says it rises (slope {slope:.2g}, expected 1): the sign looks"
                )
                out.append(("stress sign", "error", f"{text} reversed; tensile stress is positive here", ()))
            if not 0.1 < abs(slope) < 10:
                text = f"energy changes by {abs(slope):.2g} of what stress says: the unit does not look like eV/Å³"
                out.append(("stress unit", "error", f"{text}{_likely_unit(abs(slope))}", ()))
        elif self._virial and np.median(self._virial) > _LARGE_VIRIAL:
            text = (
                f"stress × volume is {np.median(self._virial):.3g} eV per atom in the median structure, more "
                "than bonds hold: the unit does not look like eV/Å³"
            )
            out.append(("stress unit", "error", text, ()))
        return out

    def _slope(self) -> tuple[float, float, int]:
        """Slope and correlation of dE against σ dV, and the number of pairs of structures."""
        rows = np.concatenate([np.zeros((0, 3)), *self._rows])
        groups: dict[bytes, list[int]] = {}
        for number, key in enumerate(self._keys):
            groups.setdefault(key, []).append(number)
        work: list[np.ndarray] = []
        change: list[np.ndarray] = []
        for members in groups.values():
            volume, stress, energy = rows[members][np.argsort(rows[members, 0])].T
            middle = len(volume) // 2
            differs = np.abs(volume - volume[middle]) > 1e-3 * volume[middle]
            # Trapezoid from the middle structure.
            work.append(((stress + stress[middle]) / 2 * (volume - volume[middle]))[differs])
            change.append((energy - energy[middle])[differs])
        x, y = np.concatenate([np.zeros(0), *work]), np.concatenate([np.zeros(0), *change])
        xx, yy, xy = float(x @ x), float(y @ y), float(x @ y)
        if xx == 0 or yy == 0:
            return 0.0, 0.0, 0
        return xy / xx, xy / np.sqrt(xx * yy), len(x)


def _likely_unit(slope: float) -> str:
    from nvalchemi import units

    known: dict[str, Any] = {"GPa": units.GPa, "kbar": 1000 * units.bar, "bar": units.bar}
    for name, factor in known.items():
        if 0.3 < slope / factor < 3:
            return f", rather like {name}"
    return ""
