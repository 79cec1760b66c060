"""What a minimiser moves: atoms, or atoms and cell. A minimiser sees generalised coordinates and forces only."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.segments import max_per_graph, sum_per_graph
from nvalchemi.dynamics.thermo import free_atom_mask


class Vector:
    """Generalised coordinates of each graph: atoms ``[N, 3]`` and, with a variable cell, cell ``[B, 3, 3]``."""

    __slots__ = ("atoms", "cell")

    def __init__(self, atoms: Tensor, cell: Tensor | None) -> None:
        self.atoms = atoms
        self.cell = cell

    def dot(self, other: "Vector", ptr: Tensor) -> Tensor:
        """Scalar product of each graph's part, ``[B]``."""
        # Over atoms first: torch is slow at sums of three numbers for each of many atoms.
        product = sum_per_graph(self.atoms * other.atoms, ptr).sum(-1)
        if self.cell is not None and other.cell is not None:
            product = product + (self.cell * other.cell).sum((-2, -1))
        return product

    def scaled(self, factor: Tensor, graph: Tensor) -> "Vector":
        """Each graph's part times its ``factor`` [B]."""
        cell = None if self.cell is None else factor[:, None, None] * self.cell
        return Vector(factor[graph].unsqueeze(-1) * self.atoms, cell)

    def plus(self, other: "Vector") -> "Vector":
        """Sum."""
        cell = None if self.cell is None or other.cell is None else self.cell + other.cell
        return Vector(self.atoms + other.atoms, cell)

    def max_norm(self, ptr: Tensor) -> Tensor:
        """Largest norm of a row (an atom, or a row of the cell part) of each graph, ``[B]``."""
        largest = max_per_graph(torch.linalg.vector_norm(self.atoms, dim=-1), ptr)
        if self.cell is not None:
            largest = torch.maximum(largest, torch.linalg.vector_norm(self.cell, dim=-1).amax(-1))
        return largest


@runtime_checkable
class Coordinates(Protocol):
    """The map between a batch and the generalised coordinates of a minimiser."""

    needs: frozenset[str]
    """Model outputs needed besides energy and forces."""

    has_cell: bool
    """Whether vectors have a cell part."""

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Set up the graphs that entered (bool ``[B]``)."""
        ...

    def forces(self, batch: Batch) -> Vector:
        """Generalised forces; zero on fixed atoms."""
        ...

    def displace(self, batch: Batch, step: Vector, active: Tensor | None) -> None:
        """Add ``step`` to the coordinates of the graphs that are active (``None``: all)."""
        ...


class AtomCoordinates:
    """The positions of the atoms, in a cell that stays."""

    needs: frozenset[str] = frozenset()
    has_cell = False

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Nothing to set up."""

    def forces(self, batch: Batch) -> Vector:
        """Forces on the free atoms."""
        return Vector(forces_on_free_atoms(batch), None)

    def displace(self, batch: Batch, step: Vector, active: Tensor | None) -> None:
        """Move the atoms."""
        move = on_free_atoms(batch, step.atoms)
        if active is None:
            batch.positions.add_(move)
        else:
            rows = active[batch.batch_idx].unsqueeze(-1)
            torch.where(rows, batch.positions + move, batch.positions, out=batch.positions)


def on_free_atoms(batch: Batch, rows: Tensor) -> Tensor:
    """``rows`` [N, 3] with zeros on fixed atoms, whatever a minimiser remembers of them from when they were free."""
    free = free_atom_mask(batch)
    return rows if free is None else torch.where(free.unsqueeze(-1), rows, 0.0)


def forces_on_free_atoms(batch: Batch) -> Tensor:
    """``batch.forces`` with zeros on fixed atoms."""
    return on_free_atoms(batch, batch.forces)
