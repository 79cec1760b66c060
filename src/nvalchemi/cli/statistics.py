"""Averages over a run."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics import BaseDynamics, DynamicsStage
from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.dynamics.thermo import kinetic_energy, temperature
from nvalchemi.hooks import HookContext


def engine_temperature(engine: BaseDynamics, batch: Batch) -> Tensor:
    """Temperature of each structure with the degrees of freedom that the engine leaves it, K, ``[B]``."""
    return temperature(batch, engine.conserves_momentum)


class RunStatistics:
    """Mean temperature and change of the total energy of every structure.

    Parameters
    ----------
    frequency : int
        Steps between samples.
    """

    stage: Enum | None = DynamicsStage.AFTER_STEP

    def __init__(self, frequency: int) -> None:
        self.frequency = frequency
        self._samples = 0
        self._sum: Tensor | None = None
        self._first_energy: Tensor | None = None
        self._last_energy: Tensor | None = None

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Take a sample, leaving it on the device of the batch."""
        ctx, batch = dynamics_context(self, ctx)
        now = engine_temperature(ctx.workflow, batch)
        self._sum = now if self._sum is None else self._sum.to(now.device) + now
        self._samples += 1
        self._last_energy = batch.energy[:, 0] + kinetic_energy(batch)
        if self._first_energy is None:
            self._first_energy = self._last_energy

    def state_dict(self) -> dict[str, Any]:
        """Sums so far."""
        return {
            "samples": self._samples,
            "sum": self._sum,
            "first_energy": self._first_energy,
            "last_energy": self._last_energy,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a state."""
        self._samples, self._sum = state["samples"], state["sum"]
        self._first_energy, self._last_energy = state["first_energy"], state["last_energy"]

    @property
    def mean_temperature(self) -> Tensor:
        """Mean temperature over the samples, K, ``[B]``."""
        if self._sum is None:
            raise ValueError("no sample was taken")
        return self._sum / self._samples

    @property
    def energy_change(self) -> Tensor:
        """Total energy at the last sample minus that at the first, eV, ``[B]``."""
        if self._first_energy is None or self._last_energy is None:
            raise ValueError("no sample was taken")
        return self._last_energy - self._first_energy.to(self._last_energy.device)
