"""Hold atoms where they are."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi.data import FIXED, Batch
from nvalchemi.dynamics.base import BaseDynamics
from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.thermo import FROZEN_ATOMS
from nvalchemi.hooks import DynamicsContext, HookContext

_VELOCITIES = ("velocities", "fire_velocities")


class FreezeAtomsHook:
    """Hold some atoms: their positions stay the same to the bit, their velocities are zero.

    The hook marks the atoms (field ``frozen_atoms``) when structures enter, from where
    :func:`nvalchemi.dynamics.thermo.free_atom_mask` knows them: integrators and minimisers do not move them,
    and they count neither as degrees of freedom, nor in the temperature, nor in ``fmax``. The marks are
    taken away when the run ends, and put back when it goes on; ``atom_categories`` are never changed.

    Parameters
    ----------
    frequency : int, default 1
        Every so many steps velocities and forces are set to zero again, should somebody else have changed
        them. The atoms are held at all steps.
    freeze_category : int, default 1
        Hold the atoms with this value of ``atom_categories``. Those of category 1 (``FIXED``) are held by
        every engine already; for them the hook only sets the forces to zero.
    zero_forces : bool, default True
        Set the forces on these atoms to zero. ``False`` leaves what the model gave, to be looked at.
    indices : sequence of int, optional
        Hold these atoms of every structure instead, counted from 0 within it.

    Raises
    ------
    ValueError
        Negative or repeated indices; when structures enter: no ``atom_categories``, or an index that a
        structure does not have.
    TypeError
        The workflow is no dynamics engine.

    Notes
    -----
    Several such hooks hold all their atoms together. In a cell that relaxes, held atoms follow the cell: it is
    their scaled positions that stay, as with ASE's cell filters.

    Examples
    --------
    >>> FreezeAtomsHook(indices=[0, 1]).indices
    (0, 1)
    """

    part_of_evaluation = True
    order_role = "clamp"

    def __init__(
        self,
        frequency: int = 1,
        freeze_category: int = FIXED,
        zero_forces: bool = True,
        *,
        indices: Sequence[int] | Tensor | None = None,
    ) -> None:
        self.frequency = frequency
        self.stage: Enum | None = None
        self.freeze_category = freeze_category
        self.zero_forces = zero_forces
        self.indices = None if indices is None else _checked_indices(indices)
        self._seen: tuple[object, ...] = (None,) * 5
        self._version = -2
        self._held = torch.empty(0, 1, dtype=torch.bool)
        self._batch: Batch | None = None
        self._taken_away: Tensor | None = None

    def on_register(self, workflow: Any) -> None:
        """Refuse engines that would not keep the atoms in place."""
        if not isinstance(workflow, BaseDynamics):
            raise TypeError(
                f"FreezeAtomsHook works in dynamics engines only, not in {type(workflow).__name__}"
            )

    def _runs_on_stage(self, stage: Enum) -> bool:
        if stage is DynamicsStage.AFTER_COMPUTE:
            return self.zero_forces
        return stage in (DynamicsStage.ON_ADMISSION, DynamicsStage.BEFORE_STEP)

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Mark the atoms of active structures, and set their velocities and forces to zero."""
        ctx, batch = dynamics_context(self, ctx)
        self._mark(ctx, batch)
        batch.velocities.masked_fill_(self._held, 0.0)
        if self.zero_forces and "forces" in batch:
            batch.forces.masked_fill_(self._held, 0.0)

    def on_resume(self, ctx: HookContext) -> None:
        """Know the atoms again when a saved run goes on."""
        self._mark(*dynamics_context(self, ctx))

    def _mark(self, ctx: DynamicsContext, batch: Batch) -> None:
        categories: Tensor | None = batch.get("atom_categories")
        version = -1 if categories is None else categories._version
        seen = (batch, batch.batch_ptr, categories, ctx.active_graph_mask, batch.get(FROZEN_ATOMS.name))
        if self._version == version and all(a is b for a, b in zip(seen, self._seen, strict=True)):
            return
        if self._batch is not batch:
            self.close()
        held = self._chosen(batch)
        if ctx.active_graph_mask is not None:
            held &= ctx.active_graph_mask[batch.batch_idx]
        self._held = held.unsqueeze(-1)
        if FROZEN_ATOMS.name in batch:
            batch.frozen_atoms |= held
        else:
            batch.frozen_atoms = held.clone()
        for name in _VELOCITIES:
            if name in batch:
                batch[name].masked_fill_(self._held, 0.0)
        self._batch = batch
        self._seen, self._version = (*seen[:-1], batch.frozen_atoms), version
        ctx.workflow.refresh_masks(batch)

    def _chosen(self, batch: Batch) -> Tensor:
        """Atoms to hold, bool ``[N]``."""
        if self.indices is None:
            if "atom_categories" not in batch:
                raise ValueError(
                    f"FreezeAtomsHook holds atoms of category {self.freeze_category}, but the batch has no "
                    "atom_categories: add them, or give indices=[…]"
                )
            return batch.atom_categories == self.freeze_category
        chosen = torch.zeros(batch.num_nodes, dtype=torch.bool, device=batch.device)
        if not self.indices:
            return chosen
        too_small = (batch.num_nodes_per_graph <= max(self.indices)).nonzero()
        if too_small.numel() > 0:
            graph = int(too_small[0, 0])
            raise ValueError(
                f"FreezeAtomsHook holds atom {max(self.indices)} of every structure, but "
                f"{batch.describe_graph(graph)} has {int(batch.num_nodes_per_graph[graph])} atoms "
                "(indices count within a structure; use atom_categories to hold different atoms in each)"
            )
        within = torch.tensor(self.indices, device=batch.device)
        chosen[(batch.batch_ptr[:-1, None] + within).flatten()] = True
        return chosen

    def __enter__(self) -> Self:
        batch, marks = self._batch, self._taken_away
        if batch is not None and marks is not None and marks.shape[0] == batch.num_nodes:
            held = batch.get(FROZEN_ATOMS.name)
            batch.frozen_atoms = marks if held is None else held | marks
        self._taken_away = None
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the marks away: in another engine the atoms are free."""
        if self._batch is not None and FROZEN_ATOMS.name in self._batch:
            self._taken_away = self._batch.frozen_atoms
            self._batch.remove_key(FROZEN_ATOMS.name)


def _checked_indices(indices: Sequence[int] | Tensor) -> tuple[int, ...]:
    values = tuple(int(i) for i in indices)
    if any(i < 0 for i in values) or len(set(values)) < len(values):
        raise ValueError(f"indices must be different atoms counted from 0, got {list(values)}")
    return values
