"""Bring atoms back into the cell."""

from enum import Enum

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from nvalchemi import _kernels
from nvalchemi.data import Batch
from nvalchemi.hooks.context import HookContext, active_graphs
from nvalchemi.hooks.neighbor_list import REFERENCE_POSITIONS, NeighborListHook
from nvalchemi.hooks.registry import HookRegistryMixin
from nvalchemi.neighbors import NeighborListFormat


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
        axes: Tensor = batch.pbc
        active = active_graphs(ctx)
        if active is not None:
            axes = axes & active[:, None]
        move = _move_compiled if _kernels.serve(batch.positions) else _move_portable
        n, crossed, count = move(batch, self._inverse_cell(batch.cell), axes)
        if count == 0:
            return
        if "image_flags" in batch:
            batch.image_flags.add_(n.to(batch.image_flags.dtype))
        if "neighbor_list_shifts" in batch:
            _shift_list(batch, n, crossed)
        if "neighbor_matrix_shifts" in batch:
            _shift_matrix(batch, n, crossed, full=_has_full_matrix(ctx, batch))

    def _inverse_cell(self, cell: Tensor) -> Tensor:
        known, version, inverse = self._inverse
        if cell is not known or cell._version != version:
            # The pseudo-inverse of zero is zero: atoms without a cell never cross anything.
            inverse = torch.linalg.pinv(cell)
            self._inverse = (cell, cell._version, inverse)
        return inverse


def _move_compiled(batch: Batch, inverse: Tensor, axes: Tensor) -> tuple[Tensor, Tensor, int]:
    """Move the atoms; whole lattice vectors moved [N, 3], whether any [N], and how many atoms that is.

    One kernel rather than ten small operations: few atoms cross, and the hook may run at every step.
    """
    from nvalchemi._kernels.wrap import wrap_atoms

    positions = batch.positions
    references = [batch.get(field.name) for field in REFERENCE_POSITIONS.values()]
    n = torch.zeros_like(positions, dtype=torch.int32)
    crossed = torch.zeros_like(batch.batch_idx, dtype=torch.bool)
    count: int = wrap_atoms(
        positions.numpy(),
        *((positions[:0] if reference is None else reference).numpy() for reference in references),
        batch.cell.numpy(),
        inverse.numpy(),
        axes.numpy(),
        batch.batch_idx.numpy(),
        n.numpy(),
        crossed.numpy(),
    )
    if count > 0:
        # Compiled code wrote, which torch cannot see.
        increment_version(positions)
        for reference in references:
            if reference is not None:
                increment_version(reference)
    return n, crossed, count


def _move_portable(batch: Batch, inverse: Tensor, axes: Tensor) -> tuple[Tensor, Tensor, int]:
    """What the compiled one does, in portable operations."""
    graph = batch.batch_idx
    scaled = (batch.positions.double().unsqueeze(-2) @ inverse.double()[graph]).squeeze(-2)
    # Atoms of a structure that failed may be anywhere: they stay.
    images = torch.where(axes[graph] & (scaled.abs() < 2.0**31), scaled.floor(), 0)
    move = (images.unsqueeze(-2) @ batch.cell.double()[graph]).squeeze(-2).to(batch.dtype)
    n = images.int()
    crossed = (n != 0).any(1)
    batch.positions.sub_(move)
    for field in REFERENCE_POSITIONS.values():
        if field.name in batch:
            batch[field.name].sub_(move)
    return n, crossed, int(crossed.sum())


def _shift_list(batch: Batch, n: Tensor, crossed: Tensor) -> None:
    i, j = batch.neighbor_list.unbind(1)
    shifts: Tensor = batch.neighbor_list_shifts
    if "shifts" in batch:
        vectors = (n[j] - n[i]).to(batch.dtype).unsqueeze(-2) @ batch.cell[batch.batch_idx[i]]
        batch.shifts.add_(vectors.squeeze(-2))
    if _kernels.serve(n):
        from nvalchemi._kernels.wrap import shift_list

        shift_list(n.numpy(), crossed.numpy(), batch.neighbor_list.numpy(), shifts.numpy())
        increment_version(shifts)
    else:
        shifts.add_((n[j] - n[i]).to(shifts.dtype))


def _has_full_matrix(ctx: HookContext, batch: Batch) -> bool:
    """Whether the matrix is known to have each pair in both directions; where others made it, it may be a half list."""
    workflow = ctx.workflow
    hooks = workflow.hooks if isinstance(workflow, HookRegistryMixin) else ()
    return any(
        isinstance(hook, NeighborListHook)
        and hook.config.format is NeighborListFormat.MATRIX
        and not hook.config.half_list
        and hook.owns_list(batch)
        for hook in hooks
    )


def _shift_matrix(batch: Batch, n: Tensor, crossed: Tensor, full: bool = False) -> None:
    matrix, shifts = batch.neighbor_matrix, batch.neighbor_matrix_shifts
    if _kernels.serve(n):
        from nvalchemi._kernels.wrap import shift_full_matrix, shift_matrix

        shift = shift_full_matrix if full else shift_matrix
        shift(n.numpy(), crossed.numpy(), matrix.numpy(), shifts.numpy())
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
