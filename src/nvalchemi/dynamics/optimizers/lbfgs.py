"""L-BFGS: relaxation by a quasi-Newton method with a short memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvalchemi import _kernels
from nvalchemi.data import Batch, Field, register_field
from nvalchemi.dynamics.base import ConvergenceHook
from nvalchemi.dynamics.optimizers.coordinates import Coordinates, Vector
from nvalchemi.dynamics.optimizers.minimiser import Minimiser
from nvalchemi.dynamics.segments import sum_per_graph
from nvalchemi.hooks import Hook
from nvalchemi.models.base import BaseModelMixin

for _row in (
    Field("lbfgs_history", "node", (2, None, 3), "float", "", "moves (Å) and changes of the gradient (eV/Å)"),
    Field("lbfgs_cell_history", "system", (2, None, 9), "float", "", "the same for the cell"),
    Field("lbfgs_last", "node", (2, 3), "float", "", "last move (Å) and the force it came from (eV/Å)"),
    Field("lbfgs_cell_last", "system", (2, 9), "float", "", "the same for the cell"),
    Field("lbfgs_products", "system", (2, None, None), "float", "", "moves · changes, changes · changes"),
    Field("lbfgs_pairs", "system", (1,), "int", "", "pairs taken into the history; −1 before the first move"),
):
    register_field(replace(_row, neutral=0, persistent=False))


class LBFGS(Minimiser):
    """Limited-memory BFGS without line search, each structure with a history of its own.

    With the last m moves s and changes of the gradient y as columns of S and Y, in the order of time, R the
    upper triangle of SᵀY and D its diagonal, the move is H f with the inverse Hessian of Byrd, Nocedal and
    Schnabel (Math. Program. 63, 129, 1994, eq. 3.1)

        H f = γ f + S w − γ Y u,   R u = Sᵀ f,   Rᵀ w = (D + γ YᵀY) u − γ Yᵀ f,   γ = 1/``alpha``.

    This is what the two loops of Nocedal (1980) give, in a few operations for all structures and all pairs. As
    in ASE's ``LBFGS`` the first curvature is a constant, and a move in which an atom, or a row of the cell, would
    go further than ``max_step`` is scaled down as a whole. Pairs without positive curvature (s·y ≤ 0) are left
    out, so that H stays positive and every move goes downhill.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy and forces.
    memory : int, default 100
        m; ≥ 1. The history takes 48 m bytes per atom in float64. Soft systems need a long one, because γ is stiff.
    alpha : float, default 70.0
        Curvature that the method begins with, eV/Å².
    max_step : float, default 0.2
        Longest move of an atom in one step, Å.
    n_steps, hooks, convergence_hook, **options
        As in :class:`BaseDynamics`.
    coordinates : Coordinates, optional
        What moves; default the atoms. :class:`CellCoordinates` adds the cell.

    Raises
    ------
    ValueError
        A memory below 1; a curvature or a step that is not positive and finite.
    """

    def __init__(
        self,
        model: BaseModelMixin,
        memory: int = 100,
        alpha: float = 70.0,
        max_step: float = 0.2,
        n_steps: int | None = None,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        *,
        coordinates: Coordinates | None = None,
        **options: Any,
    ) -> None:
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
            raise ValueError(f"memory must be an int ≥ 1, got {memory!r}")
        for name, value in (("alpha", alpha), ("max_step", max_step)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be finite and > 0, got {value}")
        self.memory, self.alpha, self.max_step = memory, alpha, max_step
        super().__init__(model, hooks, convergence_hook, n_steps, coordinates=coordinates, **options)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Empty histories for graphs that entered."""
        self.coordinates.prepare(batch, admitted)
        x, m, graphs = batch.positions, self.memory, batch.num_graphs
        first: dict[str, Tensor] = {
            "lbfgs_history": x.new_zeros(batch.num_nodes, 2, m, 3),
            "lbfgs_last": x.new_zeros(batch.num_nodes, 2, 3),
            "lbfgs_products": x.new_zeros(graphs, 2, m, m),
            "lbfgs_pairs": torch.full_like(batch.status, -1),
        }
        if self.coordinates.has_cell:
            first["lbfgs_cell_history"] = x.new_zeros(graphs, 2, m, 9)
            first["lbfgs_cell_last"] = x.new_zeros(graphs, 2, 9)
        self.begin(batch, admitted, first)

    def pre_update(self, batch: Batch) -> None:
        """The whole move."""
        ptr, graph = batch.batch_ptr, batch.batch_idx
        force = self.coordinates.forces(batch)
        self._remember(batch, force)
        move = self._downhill(batch, force)
        longest = move.max_norm(ptr)
        move = move.scaled(torch.where(longest > self.max_step, self.max_step / longest, 1.0), graph)
        self.coordinates.displace(batch, move, self.active_graph_mask)
        state = {
            "lbfgs_last": torch.stack([move.atoms, force.atoms], 1),
            "lbfgs_pairs": batch.lbfgs_pairs.clamp(min=0),
        }
        if move.cell is not None and force.cell is not None:
            state["lbfgs_cell_last"] = torch.stack([move.cell, force.cell], 1).flatten(2)
        self.store(batch, state)

    def _remember(self, batch: Batch, force: Vector) -> None:
        """Take the last move and the change of the gradient that it made into the histories."""
        ptr, graph = batch.batch_ptr, batch.batch_idx
        s, y = batch.lbfgs_last[:, 0], batch.lbfgs_last[:, 1] - force.atoms
        cell_pair = None
        curvature = sum_per_graph(s * y, ptr).sum(-1)
        if force.cell is not None:
            cell_s, cell_y = batch.lbfgs_cell_last[:, 0], batch.lbfgs_cell_last[:, 1] - force.cell.flatten(1)
            cell_pair = torch.stack([cell_s, cell_y], 1)
            curvature = curvature + (cell_s * cell_y).sum(-1)
        count = batch.lbfgs_pairs[:, 0]
        accepted = (count >= 0) & (curvature > 0)
        if self.active_graph_mask is not None:
            accepted = accepted & self.active_graph_mask
        slot = count.clamp(min=0) % self.memory
        _put(batch.lbfgs_history, torch.stack([s, y], 1), slot[graph], accepted[graph])
        if cell_pair is not None:
            _put(batch.lbfgs_cell_history, cell_pair, slot, accepted)
        gradient_change = Vector(y, None if cell_pair is None else cell_pair[:, 1].view(-1, 3, 3))
        batch.lbfgs_pairs.add_(accepted.unsqueeze(-1))
        column = self._products_with(batch, gradient_change).to(batch.dtype)
        column = torch.nn.functional.pad(column, (0, self.memory - column.shape[-1]))
        products = batch.lbfgs_products
        # The new pair is the last in time: its column of SᵀY is complete, its row is below the triangle.
        _put(products.transpose(-1, -2), column, slot, accepted)
        _put(products[:, 1:], column[:, 1:], slot, accepted)

    def _slots_used(self, batch: Batch) -> int:
        """Slots that any history fills, so that the work grows with it; all of them where finding out takes a wait."""
        if not _kernels.serve(batch.lbfgs_pairs):
            return self.memory
        return min(self.memory, max(1, int(batch.lbfgs_pairs.max())))

    def _downhill(self, batch: Batch, force: Vector) -> Vector:
        """H f."""
        m, gamma, count = self._slots_used(batch), 1.0 / self.alpha, batch.lbfgs_pairs
        slots = torch.arange(m, device=batch.device)
        order = (count.clamp(min=0) + slots) % m  # oldest first; empty slots count as older than all
        used = (slots < count).gather(1, order)
        both = used.unsqueeze(-1) & used.unsqueeze(-2)
        gather_rows = order.unsqueeze(-1).expand(-1, m, m)
        moves_changes, changes_changes = (
            torch.where(both, p.gather(1, gather_rows).gather(2, gather_rows.transpose(-1, -2)), 0.0)
            for p in batch.lbfgs_products[:, :, :m, :m].double().unbind(1)
        )
        right = self._products_with(batch, force).gather(2, order.unsqueeze(1).expand(-1, 2, -1))
        along, change = (torch.where(used, r, 0.0).unsqueeze(-1) for r in right.unbind(1))
        diagonal = moves_changes.diagonal(dim1=-2, dim2=-1)
        triangle = moves_changes.triu() + torch.diag_embed((~used).double())
        u = torch.linalg.solve_triangular(triangle, along, upper=True)
        inner = diagonal.unsqueeze(-1) * u + gamma * (changes_changes @ u - change)
        w = torch.linalg.solve_triangular(triangle.transpose(-1, -2), inner, upper=False)
        factors = torch.stack([w.squeeze(-1), -gamma * u.squeeze(-1)], 1)
        back = torch.empty_like(factors).scatter_(2, order.unsqueeze(1).expand(-1, 2, -1), factors)
        coefficients = back.to(batch.dtype)
        atoms = gamma * force.atoms + _combined(batch.lbfgs_history, coefficients[batch.batch_idx])
        if force.cell is None:
            return Vector(atoms, None)
        cell = gamma * force.cell + _combined(batch.lbfgs_cell_history, coefficients).view(-1, 3, 3)
        return Vector(atoms, cell)

    def _products_with(self, batch: Batch, vector: Vector) -> Tensor:
        """Scalar products of the moves and the changes of the gradient with ``vector``: float64 [B, 2, slots used]."""
        used = self._slots_used(batch)
        per_atom = _projected(batch.lbfgs_history, vector.atoms, used)
        products = sum_per_graph(per_atom.double(), batch.batch_ptr)
        if vector.cell is not None:
            products = products + _projected(batch.lbfgs_cell_history, vector.cell.flatten(1), used).double()
        return products


def _projected(history: Tensor, vectors: Tensor, used: int) -> Tensor:
    """Scalar products of the first slots of ``history`` [n, 2, m, d] with ``vectors`` [n, d]: [n, 2, used]."""
    column = vectors.unsqueeze(-1)
    return torch.stack([torch.bmm(part[:, :used], column).squeeze(-1) for part in history.unbind(1)], 1)


def _combined(history: Tensor, coefficients: Tensor) -> Tensor:
    """Sum of the vectors in the first slots of ``history`` [n, 2, m, d] times ``coefficients`` [n, 2, used]: [n, d]."""
    moves, changes = history[:, :, : coefficients.shape[-1]].unbind(1)
    first, second = coefficients.unsqueeze(2).unbind(1)
    return (torch.bmm(first, moves) + torch.bmm(second, changes)).squeeze(1)


def _put(target: Tensor, value: Tensor, slot: Tensor, rows: Tensor) -> None:
    """``target[i, :, slot[i]] = value[i]`` in the rows marked, in place; shapes [n, k, m, …] and [n, k, …]."""
    index = slot.view(-1, *[1] * (target.ndim - 1)).expand(-1, target.shape[1], 1, *target.shape[3:])
    old = target.gather(2, index)
    new = torch.where(rows.view(-1, *[1] * (target.ndim - 1)), value.unsqueeze(2), old)
    target.scatter_(2, index, new)
