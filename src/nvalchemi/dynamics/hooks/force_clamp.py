"""Limit forces."""

from enum import Enum

import torch
from torch import Tensor

from nvalchemi.hooks import HookContext, active_graphs


class MaxForceClampHook:
    """Shorten force vectors that are longer than a limit to it, keeping their direction.

    For getting structures with overlapping atoms out of the worst; the forces are then not the gradient of
    the energy any more. NaN stays NaN.

    Parameters
    ----------
    max_force : float
        Limit, eV/Å; > 0.
    frequency : int, default 1
        Every so many steps.
    stage : Enum, optional
        Default ``AFTER_COMPUTE``.

    Raises
    ------
    ValueError
        A limit that is not a positive number.
    """

    default_stages = ("AFTER_COMPUTE",)
    part_of_evaluation = True
    order_role = "clamp"

    def __init__(self, max_force: float, frequency: int = 1, stage: Enum | None = None) -> None:
        if not max_force > 0:
            raise ValueError(f"max_force must be positive, got {max_force}")
        self.max_force = max_force
        self.frequency = frequency
        self.stage = stage
        self._clamped: Tensor | None = None

    @property
    def num_clamped(self) -> int:
        """Forces shortened so far, counted once per atom and call."""
        return 0 if self._clamped is None else int(self._clamped)

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Limit the forces of active structures."""
        batch = ctx.batch
        if batch is None:
            raise ValueError(f"MaxForceClampHook needs a batch; stage {stage.name} has none")
        norm = torch.linalg.vector_norm(batch.forces, dim=-1, keepdim=True)
        long = norm > self.max_force
        active = active_graphs(ctx)
        if active is not None:
            long &= active[batch.batch_idx].unsqueeze(-1)
        torch.where(long, batch.forces * (self.max_force / norm), batch.forces, out=batch.forces)
        count = long.sum()
        self._clamped = count if self._clamped is None else self._clamped + count
