"""Structures from files, checked before anything is run, and results back into them."""

from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True)
class Structure:
    """A structure and where it came from."""

    data: AtomicData
    source: str

    @property
    def name(self) -> str:
        """Its ``name`` in the file, or its formula."""
        return str(self.data.info.get("name", self.data.chemical_formula))

    @property
    def label(self) -> str:
        """Name and origin, for messages."""
        return f"{self.name} ({self.source})"


def read_structures(files: Iterable[Path]) -> list[Structure]:
    """All structures of all files in double precision; :class:`InputError` for what cannot be simulated."""
    structures: list[Structure] = []
    for file in files:
        before = len(structures)
        try:
            for number, data in enumerate(iread(file, dtype=torch.float64)):
                structure = Structure(data, f"{file}, frame {number}")
                _check(structure)
                structures.append(structure)
        except (OSError, ValueError) as error:
            raise InputError(str(error)) from error
        if len(structures) == before:
            raise InputError(f"{file}: no structure in it")
    return structures


def _check(structure: Structure) -> None:
    data, source = structure.data, structure.source
    if data.num_nodes == 0:
        raise InputError(f"{source}: no atoms")
    wrong = (~data.positions.isfinite().all(dim=1)).nonzero()
    if len(wrong):
        raise InputError(
            f"{source}: position of atom {int(wrong[0])} is {data.positions[wrong[0, 0]].tolist()}"
        )
    others = [type(constraint).__name__ for constraint in data.info.get("constraints", ())]
    if others:
        raise InputError(
            f"{source}: constraints other than fixed atoms are not honoured here: {', '.join(others)}"
        )
    periodic = data.pbc[0]
    if periodic.any():
        if "cell" not in data:
            raise InputError(f"{source}: periodic, but without a cell")
        vectors = data.cell[0][periodic]
        # The area or volume that the periodic vectors span, relative to that of a right-angled cell.
        spanned = torch.linalg.det(vectors @ vectors.T).clamp(min=0).sqrt()
        if not spanned > 1e-6 * vectors.norm(dim=1).prod():
            raise InputError(
                f"{source}: degenerate cell {data.cell[0].tolist()}: its periodic vectors span no volume"
            )


def require_cells(structures: Sequence[Structure]) -> None:
    """Refuse structures without three periodic lattice vectors, which relaxing a cell needs."""
    for structure in structures:
        if not bool(structure.data.pbc.all()):
            what = (
                "has no cell" if "cell" not in structure.data else f"has pbc {structure.data.pbc[0].tolist()}"
            )
            raise InputError(
                f"{structure.source}: {structure.name} {what}; --cell needs three periodic lattice vectors"
            )


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


def with_results(structures: Sequence[Structure], batch: Batch, *, velocities: bool) -> list[AtomicData]:
    """The structures as they were read, with the state and the energies that ``batch`` ended with."""
    names = RESULT_FIELDS + (("velocities",) if velocities else ())
    results: list[AtomicData] = []
    for structure, final in zip(structures, batch.cpu().to_data_list(), strict=True):
        data = structure.data.clone()
        for name in STALE_FIELDS:
            if name in data:
                data.remove_key(name)
        for name in names:
            # A molecule in a batch with crystals has a cell of zeros, and one has no stress.
            if name in final and not (name in ("cell", "stress") and "cell" not in structure.data):
                data.add_key(name, final[name])
        results.append(data)
    return results
