"""What a training needs to know of its data, in one pass: counts, scales, reference energies of the elements."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan, sqrt

import numpy as np
import torch

from nvalchemi.data.batch import Batch
from nvalchemi.data.datasets import StructureDataset

# Atomic numbers 0 (dummy) to 118.
_NUM_ELEMENTS = 119


@dataclass(frozen=True, slots=True)
class DatasetStatistics:
    """Numbers that describe a dataset; energies in eV, forces in eV/Å, stress in eV/Å³.

    Labels that are absent or not finite are left out of the means; what no structure has is NaN.
    """

    num_structures: int
    num_atoms: int
    min_atoms: int
    max_atoms: int
    element_counts: Mapping[int, int]
    """Atoms by atomic number."""
    num_energies: int
    """Structures that have an energy."""
    energy_per_atom_mean: float
    energy_per_atom_std: float
    reference_energies: Mapping[int, float]
    """Energy per atom of each element by least squares; empty without energies."""
    reference_rank: int
    """Rank of the fit; smaller than the number of elements where the compositions do not tell elements apart."""
    residual_per_atom_std: float
    """Root mean square of (energy − sum of reference energies) / atoms: what is left for a model to learn."""
    forces_rms: float
    """Root mean square of the force components."""
    forces_max: float
    """Largest force on an atom."""
    stress_rms: float
    """Root mean square of the stress components."""


def compute_statistics(dataset: StructureDataset | Iterable[Batch]) -> DatasetStatistics:
    """Go through a dataset once.

    Parameters
    ----------
    dataset : StructureDataset or iterable of Batch
        The data.

    Returns
    -------
    DatasetStatistics
        The result.

    Notes
    -----
    The reference energies minimise the sum over structures of (energy − Σ reference energies)² / atoms². The triangular
    factor of that least-squares problem is updated batch by batch, so memory does not grow and nothing is squared.
    Where the compositions leave the solution open (in pure water only 2 H + O is defined) the shortest one is taken.

    Examples
    --------
    >>> from nvalchemi.data import AtomicData
    >>> from nvalchemi.data.datasets import InMemoryDataset
    >>> def structure(numbers, energy):
    ...     positions = [[0.0, 0.0, i] for i in range(len(numbers))]
    ...     return AtomicData(positions, numbers, energy=energy)
    >>> data = InMemoryDataset([structure([1, 1], -2.0), structure([1, 8], -11.0)])
    >>> {z: round(e, 4) for z, e in compute_statistics(data).reference_energies.items()}
    {1: -1.0, 8: -10.0}
    """
    batches = dataset.iter_batches() if isinstance(dataset, StructureDataset) else dataset
    atoms: list[np.ndarray] = []
    elements = np.zeros(_NUM_ELEMENTS, dtype=np.int64)
    energy, forces, stress = _Moments(), _Moments(), _Moments()
    forces_max = nan
    fit = _CompositionFit()
    for batch in batches:
        num_nodes = batch.num_nodes_per_graph.cpu().numpy()
        counts = _composition(batch)
        atoms.append(num_nodes)
        elements += counts.sum(axis=0)
        if "energy" in batch:
            values = batch.energy.detach().cpu().double().numpy().reshape(-1)
            known = np.isfinite(values) & (num_nodes > 0)
            per_atom = values[known] / num_nodes[known]
            energy.add(per_atom)
            fit.add(counts[known] / num_nodes[known, None], per_atom)
        if "forces" in batch:
            values = batch.forces.detach().cpu().double().numpy()
            forces.add(values[np.isfinite(values)])
            norms = np.linalg.norm(values, axis=1)
            finite = norms[np.isfinite(norms)]
            forces_max = float(np.fmax(forces_max, finite.max())) if len(finite) else forces_max
        if "stress" in batch:
            values = batch.stress.detach().cpu().double().numpy()
            stress.add(values[np.isfinite(values)])
    sizes = np.concatenate([np.zeros(0, dtype=np.int64), *atoms])
    present = np.flatnonzero(elements)
    references, rank, residual = fit.solve()
    return DatasetStatistics(
        num_structures=len(sizes),
        num_atoms=int(sizes.sum()),
        min_atoms=int(sizes.min()) if len(sizes) else 0,
        max_atoms=int(sizes.max(initial=0)),
        element_counts={int(z): int(elements[z]) for z in present},
        num_energies=energy.count,
        energy_per_atom_mean=energy.mean,
        energy_per_atom_std=energy.std,
        reference_energies=references,
        reference_rank=rank,
        residual_per_atom_std=residual,
        forces_rms=forces.rms,
        forces_max=forces_max,
        stress_rms=stress.rms,
    )


def reference_energies(dataset: StructureDataset | Iterable[Batch]) -> dict[int, float]:
    """Energy per atom of each element (eV) by least squares, see :func:`compute_statistics`.

    Raises
    ------
    ValueError
        No structure has an energy.
    """
    found = compute_statistics(dataset).reference_energies
    if not found:
        raise ValueError("reference energies need structures with an energy, and none has one")
    return dict(found)


def _composition(batch: Batch) -> np.ndarray:
    """Number of atoms of each element in each graph, int64 [B, 119]."""
    flat = batch.batch_idx * _NUM_ELEMENTS + batch.atomic_numbers.to(torch.int64)
    return (
        torch.bincount(flat, minlength=batch.num_graphs * _NUM_ELEMENTS)
        .reshape(-1, _NUM_ELEMENTS)
        .cpu()
        .numpy()
    )


class _Moments:
    """Count, mean and spread of a stream of numbers (merging of partial sums: Chan, Golub, LeVeque 1983, eq. 2.1)."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._squares = 0.0

    def add(self, values: np.ndarray) -> None:
        n = values.size
        if n == 0:
            return
        mean = float(values.mean())
        delta, total = mean - self._mean, self.count + n
        self._squares += float(((values - mean) ** 2).sum()) + delta**2 * self.count * n / total
        self._mean += delta * n / total
        self.count = total

    @property
    def mean(self) -> float:
        return self._mean if self.count else nan

    @property
    def std(self) -> float:
        return sqrt(self._squares / self.count) if self.count else nan

    @property
    def rms(self) -> float:
        return sqrt(self._squares / self.count + self._mean**2) if self.count else nan


class _CompositionFit:
    """Least squares of energies per atom on fractions of elements, by updates of the triangular factor of [A | b]."""

    def __init__(self) -> None:
        self._factor: np.ndarray = np.zeros((0, _NUM_ELEMENTS + 1))
        self._count = 0

    def add(self, fractions: np.ndarray, per_atom: np.ndarray) -> None:
        self._count += len(per_atom)
        rows = np.concatenate([fractions, per_atom[:, None]], axis=1)
        self._factor = np.asarray(np.linalg.qr(np.concatenate([self._factor, rows]), mode="r"))

    def solve(self) -> tuple[dict[int, float], int, float]:
        """Energies by atomic number, rank, and root mean square of the residuals."""
        if self._count == 0:
            return {}, 0, nan
        matrix, target = self._factor[:, :-1], self._factor[:, -1]
        present = np.flatnonzero(np.abs(matrix).max(axis=0) > 0)
        solution, _, rank, _ = np.linalg.lstsq(matrix[:, present], target, rcond=1e-10)
        residual = np.linalg.norm(matrix[:, present] @ solution - target) / sqrt(self._count)
        return {int(z): float(e) for z, e in zip(present, solution, strict=True)}, int(rank), float(residual)
