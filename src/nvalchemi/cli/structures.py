"""Structures from files, checked before anything is run, and results back into them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nvalchemi.cli.errors import InputError
from nvalchemi.data import AtomicData, Batch, iread
from nvalchemi.models.base import BaseModelMixin

STATE_FIELDS = frozenset(
    {"positions", "atomic_numbers", "atomic_masses", "cell", "pbc", "velocities", "atom_categories"}
)
"""What a simulation needs of a structure; the rest of its fields waits for the output."""

STALE_FIELDS = (
    "energy", "forces", "stress", "virial", "free_energy", "energies", "dipole", "magmom", "magmoms", "velocities",
)  # fmt: skip
"""What a file may say of a structure and is no longer true when its atoms have moved."""

RESULT_FIELDS = ("positions", "cell", "energy", "forces", "stress")

_CLOSE = 0.6
"""Share of the sum of the covalent radii below which a distance is hardly meant; the shortest bonds are above."""


@dataclass(frozen=True)
class Structure:
    """A structure and where it came from."""

    data: AtomicData
    name: str
    """Its ``name`` in the file, or that of the file."""
    label: str
    """Its ``name`` in the file, or formula, and where it is from, for messages."""

    @property
    def formula(self) -> str:
        """Chemical formula."""
        return self.data.chemical_formula or "no atoms"


@dataclass(frozen=True)
class Rejected:
    """A structure, or the rest of a file, that cannot be run."""

    name: str
    formula: str | None
    label: str
    reason: str

    @classmethod
    def of(cls, structure: Structure, reason: str) -> "Rejected":
        """A structure with the reason."""
        return cls(structure.name, structure.formula, structure.label, reason)


def read_structures(files: Iterable[Path], *, cell: bool = False) -> tuple[list[Structure], list[Rejected]]:
    """All structures of all files in double precision, and what cannot be read or makes no sense.

    Parameters
    ----------
    files : iterable of Path
        The files.
    cell : bool, default False
        Reject what has no cell that can be relaxed.

    Raises
    ------
    InputError
        A file is not there, or a directory; or there is no structure that can be run.
    """
    structures: list[Structure] = []
    rejected: list[Rejected] = []
    for file in files:
        if file.is_dir() and not (file / "zarr.json").is_file():
            raise InputError(f"{file} is a directory; name the files in it: {file}/*")
        frames: list[AtomicData] = []
        problem = None
        try:
            frames.extend(iread(file, dtype=torch.float64))
        except OSError as error:
            raise InputError(str(error)) from error
        except ValueError as error:
            problem = str(error)
        if not frames and problem is None:
            problem = f"{file}: no structure in it"
        for number, data in enumerate(frames):
            for key in ("converged", "failure"):
                data.info.pop(key, None)  # said by a run that has left the structure so
            name = str(data.info.get("name", file.stem if len(frames) == 1 else f"{file.stem}@{number}"))
            label = f"{data.info.get('name', data.chemical_formula)} ({file}, frame {number})"
            structure = Structure(data, name, label)
            reason = _problem(data) or (_no_cell(data) if cell else None)
            if reason is None:
                structures.append(structure)
            else:
                rejected.append(Rejected.of(structure, reason))
        if problem is not None:
            rejected.append(Rejected(file.stem, None, str(file), problem.removeprefix(f"{file}: ")))
    if not structures:
        refuse(rejected, 0, skip=False)
    return structures, rejected


def _problem(data: AtomicData) -> str | None:
    """Why a structure cannot be simulated, if so."""
    if data.num_nodes == 0:
        return "no atoms"
    wrong = (~data.positions.isfinite().all(dim=1)).nonzero()
    if len(wrong):
        return f"position of atom {int(wrong[0])} is {data.positions[wrong[0, 0]].tolist()}"
    others = [type(constraint).__name__ for constraint in data.info.get("constraints", ())]
    if others:
        return f"constraints other than fixed atoms are not honoured here: {', '.join(others)}"
    periodic = data.pbc[0]
    if periodic.any():
        if "cell" not in data:
            return "periodic, but without a cell"
        vectors = data.cell[0][periodic]
        # The area or volume that the periodic vectors span, relative to that of a right-angled cell.
        spanned = torch.linalg.det(vectors @ vectors.T).clamp(min=0).sqrt()
        if not spanned > 1e-6 * vectors.norm(dim=1).prod():
            return f"degenerate cell {data.cell[0].tolist()}: its periodic vectors span no volume"
    return None


def _no_cell(data: AtomicData) -> str | None:
    """Why the cell of a structure cannot be relaxed, if so."""
    if bool(data.pbc.all()):
        return None
    what = "no cell" if "cell" not in data else f"pbc {data.pbc[0].tolist()}"
    return f"{what}; --cell needs three periodic lattice vectors"


def leave_out(
    structures: Sequence[Structure], bad: Mapping[int, str], rejected: Sequence[Rejected]
) -> tuple[list[Structure], list[Rejected]]:
    """Move the structures with these numbers to the rejected ones."""
    kept = [structure for number, structure in enumerate(structures) if number not in bad]
    return kept, [*rejected, *(Rejected.of(structures[number], reason) for number, reason in bad.items())]


def refuse(rejected: Sequence[Rejected], num_usable: int, *, skip: bool) -> None:
    """:class:`InputError` naming all that cannot be run, unless they are to be left out and others remain."""
    if not rejected or (skip and num_usable):
        return
    total = num_usable + len(rejected)
    hint = "; --skip-bad leaves it out" if num_usable and len(rejected) == 1 else ""
    if len(rejected) == 1:
        raise InputError(f"{rejected[0].label}: {rejected[0].reason}{hint}")
    hint = "; --skip-bad leaves them out" if num_usable else ""
    lines = "".join(f"\n  {each.label}: {each.reason}" for each in rejected)
    raise InputError(f"{len(rejected)} of {total} structures cannot be run{hint}:{lines}")


def close_atoms(structures: Sequence[Structure], batch: Batch) -> list[str]:
    """Structures with atoms closer than 0.6 of the sum of their covalent radii, with the distance, in words."""
    from nvalchemi.data.overlaps import closest_pairs

    return [
        f"{structures[graph].label} {distance:.2f} Å"
        for graph, distance in closest_pairs(batch, _CLOSE).items()
    ]


def make_batch(
    structures: Sequence[Structure], model: BaseModelMixin, device: torch.device, *, keep_velocities: bool
) -> Batch:
    """One batch of what the simulation and the model need.

    Velocities are kept only if asked for and if every structure has them: half a batch of them would be cold.
    """
    wanted = STATE_FIELDS | model.model_config.required_inputs | model.model_config.optional_inputs
    if not (keep_velocities and all("velocities" in structure.data for structure in structures)):
        wanted -= {"velocities"}
    stripped: list[AtomicData] = []
    for structure in structures:
        data = structure.data.clone()
        for name in data.keys():
            if name not in wanted:
                data.remove_key(name)
        stripped.append(data)
    try:
        return Batch.from_data_list(stripped, device=device)
    except ValueError as error:
        raise InputError(f"these structures cannot share a batch: {error}") from error


def with_results(
    structures: Sequence[Structure], batch: Batch, failures: Mapping[int, str], *, velocities: bool
) -> list[AtomicData]:
    """The structures as they were read, with the state and the energies that ``batch`` ended with.

    Those that failed have the reason in ``info["failure"]`` and no energy, which would be that of no structure.
    """
    names = RESULT_FIELDS + (("velocities",) if velocities else ())
    results: list[AtomicData] = []
    for number, (structure, final) in enumerate(zip(structures, batch.cpu().to_data_list(), strict=True)):
        data = structure.data.clone()
        data.info.setdefault("name", structure.name)
        for name in STALE_FIELDS:
            if name in data:
                data.remove_key(name)
        failed = number in failures
        if failed:
            data.info["failure"] = failures[number]
        for name in names:
            # A molecule in a batch with crystals has a cell of zeros, and one has no stress.
            if name not in final or (name in ("cell", "stress") and "cell" not in structure.data):
                continue
            if not (failed and name in ("energy", "forces", "stress")):
                data.add_key(name, final[name])
        results.append(data)
    return results
