"""Limit forces."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from nvalchemi.hooks import HookContext, active_graphs


class MaxForceClampHook:
    """Shorten force vectors that are longer than a limit to it, keeping their direction.

    For getting structures with overlapping atoms out of the worst; the forces are then not the gradient of
    the energy any more. NaN and infinity stay what they are.

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

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"num_clamped": self.num_clamped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._clamped = torch.tensor(state["num_clamped"])

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Limit the forces of active structures."""
        batch = ctx.batch
        if batch is None:
            raise ValueError(f"MaxForceClampHook needs a batch; stage {stage.name} has none")
        # In units of the largest component: the squares of forces between overlapping atoms overflow.
        largest = batch.forces.abs().amax(-1, keepdim=True)
        direction = batch.forces / largest
        norm = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        long = largest * norm > self.max_force
        active = active_graphs(ctx)
        if active is not None:
            long &= active[batch.batch_idx].unsqueeze(-1)
        torch.where(long, direction * (self.max_force / norm), batch.forces, out=batch.forces)
        count = long.sum()
        self._clamped = count if self._clamped is None else self._clamped + count
