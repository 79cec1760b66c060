"""Bring atoms back into the cell."""

from enum import Enum

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from nvalchemi.data import Batch
from nvalchemi.hooks.context import HookContext, active_graphs
from nvalchemi.hooks.neighbor_list import REFERENCE_POSITIONS


class WrapPeriodicHook:
    """Move atoms that left the cell back into it, by whole lattice vectors and along periodic axes only.

    Energies and forces do not change. A neighbour list in the batch stays valid: for a pair (i, j) with
    cell shift S whose atoms are moved by −nᵢ and −nⱼ lattice vectors, S becomes S + nⱼ − nᵢ, and the
    positions for which a list with a skin was built move along with the atoms. Where the batch has
    ``image_flags``, n is added to them, so that ``positions + image_flags @ cell`` is the unwrapped path.

    Parameters
    ----------
    frequency : int, default 1
        Every so many steps.
    stage : Enum, optional
        Default ``AFTER_POST_UPDATE``.

    Notes
    -----
    Graphs that are not being advanced and graphs without a cell are left untouched. Along axes that are not
    periodic and have no lattice vector the cell counts as extending perpendicular to the others.
    """

    default_stages = ("AFTER_POST_UPDATE",)
    order_role = "wrap"

    def __init__(self, frequency: int = 1, stage: Enum | None = None) -> None:
        self.frequency = frequency
        self.stage = stage
        self._inverse: tuple[Tensor | None, int, Tensor] = (None, -1, torch.empty(0))

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Wrap the batch."""
        batch = ctx.batch
        if batch is None:
            raise ValueError(f"WrapPeriodicHook needs a batch; stage {stage.name} has none")
        if "cell" not in batch or "pbc" not in batch:
            return
        crossed = self._crossings(batch, active_graphs(ctx))
        if not bool(crossed.any()):
            return
        move = _per_atom(crossed, batch.cell, batch)
        batch.positions.sub_(move)
        if REFERENCE_POSITIONS.name in batch:
            batch.neighbor_reference_positions.sub_(move)
        if "image_flags" in batch:
            batch.image_flags.add_(crossed.to(batch.image_flags.dtype))
        n = crossed.long()
        if "neighbor_list_shifts" in batch:
            _shift_list(batch, n)
        if "neighbor_matrix_shifts" in batch:
            _shift_matrix(batch, n)

    def _crossings(self, batch: Batch, active: Tensor | None) -> Tensor:
        """Whole lattice vectors that each atom is outside the cell, as floats [N, 3]."""
        cell: Tensor = batch.cell
        known, version, inverse = self._inverse
        if cell is not known or cell._version != version:
            # The pseudo-inverse of zero is zero: atoms without a cell never cross anything.
            inverse = torch.linalg.pinv(cell)
            self._inverse = (cell, cell._version, inverse)
        wrapped_axes = batch.pbc if active is None else batch.pbc & active[:, None]
        fractional = _per_atom(batch.positions, inverse, batch)
        axes = wrapped_axes[0] if batch.num_graphs == 1 else wrapped_axes[batch.batch_idx]
        return torch.where(axes, fractional.floor(), 0)


def _per_atom(rows: Tensor, matrices: Tensor, batch: Batch) -> Tensor:
    """Row vectors [N, 3] times the matrix [B, 3, 3] of their graph."""
    if batch.num_graphs == 1:
        return rows @ matrices[0]
    return (rows.unsqueeze(-2) @ matrices[batch.batch_idx]).squeeze(-2)


def _shift_list(batch: Batch, n: Tensor) -> None:
    i, j = batch.neighbor_list.unbind(1)
    shifts: Tensor = batch.neighbor_list_shifts
    if "shifts" in batch:
        vectors = (n[j] - n[i]).to(batch.dtype).unsqueeze(-2) @ batch.cell[batch.batch_idx[i]]
        batch.shifts.add_(vectors.squeeze(-2))
    if n.device.type == "cpu":
        from nvalchemi._kernels.wrap import shift_list

        shift_list(n.numpy(), (n != 0).any(1).numpy(), batch.neighbor_list.numpy(), shifts.numpy())
        increment_version(shifts)
    else:
        shifts.add_((n[j] - n[i]).to(shifts.dtype))


def _shift_matrix(batch: Batch, n: Tensor) -> None:
    matrix, shifts = batch.neighbor_matrix, batch.neighbor_matrix_shifts
    if n.device.type == "cpu":
        from nvalchemi._kernels.wrap import shift_matrix

        shift_matrix(n.numpy(), (n != 0).any(1).numpy(), matrix.numpy(), shifts.numpy())
        # Compiled code wrote, which torch cannot see.
        increment_version(shifts)
    else:
        shifts.add_(_change_of_matrix(matrix, n).to(shifts.dtype))


def _change_of_matrix(matrix: Tensor, n: Tensor) -> Tensor:
    """What the kernel adds, [N, K, 3], in portable operations."""
    # One more row for the padding, whose index is the number of atoms.
    padded = torch.cat([n, n.new_zeros(1, 3)])
    change = padded[matrix.long()] - n.unsqueeze(1)
    return torch.where((matrix < n.shape[0]).unsqueeze(-1), change, 0)
