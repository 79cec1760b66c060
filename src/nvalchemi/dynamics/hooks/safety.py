"""Give up structures that blow up."""

import math
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.base import BaseDynamics
from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.dynamics.segments import max_per_graph
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.thermo import max_force, temperature
from nvalchemi.hooks import HookContext


class SafetyHook:
    """Give up structures with values that are not finite or above limits; the others go on undisturbed, to the bit.

    A structure given up gets the status ``FAILED`` and stops at once; the reason is kept in the engine's
    ``failures``, in the ``info`` of the structure and in its sink, and logged as a warning.

    Checked are, each before anything is done with it: positions and the move since the last step before the
    forces are computed, energy and forces (with biases) before the velocities are updated, the temperature at
    the end of a step.

    Parameters
    ----------
    max_force : float, optional
        Largest force on an atom, eV/Å.
    max_displacement : float, optional
        Largest move of an atom in one step, Å.
    max_temperature : float, optional
        K.

    Raises
    ------
    ValueError
        A limit that is not a positive number.

    Notes
    -----
    Register it behind hooks that change forces, such as biases and clamps. A run fed by a sampler registers one
    without limits when there is neither one of these nor a ``NaNDetectorHook``.

    Examples
    --------
    >>> SafetyHook(max_displacement=0.5)
    SafetyHook(max_displacement=0.5)
    """

    part_of_evaluation = True
    order_role = "check"
    frequency = 1

    def __init__(
        self,
        *,
        max_force: float | None = None,
        max_displacement: float | None = None,
        max_temperature: float | None = None,
    ) -> None:
        self._limits = {
            "max_force": max_force,
            "max_displacement": max_displacement,
            "max_temperature": max_temperature,
        }
        for name, limit in self._limits.items():
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise ValueError(f"{name} must be a positive number, got {limit}")
        self.stage: Enum | None = None
        self._before: Tensor | None = None
        self._checks: dict[Enum, Callable[[BaseDynamics, Batch], None]] = {
            DynamicsStage.BEFORE_COMPUTE: self._check_positions,
            DynamicsStage.AFTER_COMPUTE: self._check_forces,
        }
        if max_displacement is not None:
            self._checks[DynamicsStage.BEFORE_STEP] = self._remember
        if max_temperature is not None:
            self._checks[DynamicsStage.AFTER_POST_UPDATE] = self._check_temperature

    def _runs_on_stage(self, stage: Enum) -> bool:
        return stage in self._checks

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Check what this stage is for."""
        dynamics, batch = dynamics_context(self, ctx)
        engine = dynamics.workflow
        if not isinstance(engine, BaseDynamics):
            raise TypeError(
                f"SafetyHook works in engines of nvalchemi.dynamics, not in a {type(engine).__name__}"
            )
        self._checks[stage](engine, batch)

    def _remember(self, engine: BaseDynamics, batch: Batch) -> None:
        del engine
        self._before = batch.positions.clone()

    def _check_positions(self, engine: BaseDynamics, batch: Batch) -> None:
        before, self._before = self._before, None
        limit = self._limits["max_displacement"]
        if before is None or limit is None:
            self._retire(engine, batch, _not_finite(batch, "positions"), "positions are not finite")
            return
        moved = max_per_graph(torch.linalg.vector_norm(batch.positions - before, dim=-1), batch.batch_ptr)
        reason = "an atom moved {:g} Å in a step, max_displacement is {:g} Å"
        self._retire(engine, batch, ~(moved <= limit), reason, moved, limit)

    def _check_forces(self, engine: BaseDynamics, batch: Batch) -> None:
        for key in ("energy", "forces"):
            self._retire(engine, batch, _not_finite(batch, key), f"{key} is not finite")
        limit = self._limits["max_force"]
        if limit is not None:
            force = max_force(batch)
            reason = "a force is {:g} eV/Å, max_force is {:g} eV/Å"
            self._retire(engine, batch, force > limit, reason, force, limit)

    def _check_temperature(self, engine: BaseDynamics, batch: Batch) -> None:
        limit = self._limits["max_temperature"]
        if limit is not None:
            kelvin = temperature(batch, engine.conserves_momentum)
            reason = "the temperature is {:g} K, max_temperature is {:g} K"
            self._retire(engine, batch, ~(kelvin <= limit), reason, kelvin, limit)

    @staticmethod
    def _retire(
        engine: BaseDynamics,
        batch: Batch,
        bad: Tensor | None,
        reason: str,
        values: Tensor | None = None,
        limit: float | None = None,
    ) -> None:
        if bad is None:
            return
        if engine.active_graph_mask is not None:
            bad = bad & engine.active_graph_mask
        graphs: list[int] = bad.nonzero()[:, 0].tolist()
        if graphs:
            words = f"step {engine.step_count}: {reason}"
            engine.retire(
                batch,
                {g: words if values is None else words.format(float(values[g]), limit) for g in graphs},
            )

    def __repr__(self) -> str:
        return f"SafetyHook({', '.join(f'{k}={v:g}' for k, v in self._limits.items() if v is not None)})"


def _not_finite(batch: Batch, key: str) -> Tensor | None:
    """Graphs in which a field is not finite, bool ``[B]``; ``None`` when there are none."""
    values: Tensor = batch[key]
    # One sum finds NaN and infinity; where it overflows without them the close look finds nothing.
    if math.isfinite(float(values.sum())):
        return None
    rows = ~values.reshape(values.shape[0], -1).isfinite().all(1)
    return rows if batch.level(key) == "system" else max_per_graph(rows.double(), batch.batch_ptr) > 0
