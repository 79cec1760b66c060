"""The template for integrators of your own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvalchemi import units
from nvalchemi.data import Batch
from nvalchemi.dynamics.base import BaseDynamics, ConvergenceHook
from nvalchemi.dynamics.clock import time_since_start
from nvalchemi.dynamics.parameters import GraphParameter
from nvalchemi.dynamics.updates import add_product
from nvalchemi.hooks import Hook
from nvalchemi.models.base import BaseModelMixin


class DemoDynamics(BaseDynamics):
    """Velocity Verlet written out in the shortest way: copy it to begin an integrator.

    An integrator has three methods. ``prepare`` makes what the updates need when structures enter;
    ``pre_update`` and ``post_update`` change positions and velocities in place before and after the forces
    are computed. They pass ``self.active_atom_mask`` on, so that structures that are done, and fixed atoms,
    stay where they are.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy and forces.
    n_steps : int or None
        Steps of :meth:`run`.
    dt : float or Tensor [B]
        Time step, fs; > 0.
    hooks, convergence_hook, **options
        As in :class:`BaseDynamics`.
    """

    def __init__(
        self,
        model: BaseModelMixin,
        n_steps: int | None = None,
        dt: float | Tensor = 1.0,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        **options: Any,
    ) -> None:
        self.dt = GraphParameter("dt", dt, exclusive=True)
        super().__init__(model, hooks, convergence_hook, n_steps, **options)
        self._dt = self._half_dt_over_m = torch.empty(0, 1)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Factors of the updates, one per atom ``[N, 1]``, in internal units."""
        self._dt = (self.dt.per_atom(batch) * units.fs).to(batch.dtype)
        self._half_dt_over_m = 0.5 * self._dt / batch.atomic_masses.unsqueeze(-1)

    def pre_update(self, batch: Batch) -> None:
        """V += F Δt / 2m; x += v Δt."""
        add_product(batch.velocities, batch.forces, self._half_dt_over_m, self.active_atom_mask)
        add_product(batch.positions, batch.velocities, self._dt, self.active_atom_mask)

    def post_update(self, batch: Batch) -> None:
        """V += F Δt / 2m with the new forces."""
        add_product(batch.velocities, batch.forces, self._half_dt_over_m, self.active_atom_mask)

    def elapsed_time(self, batch: Batch) -> Tensor:
        """Time simulated so far, by this engine and those before it, fs, ``[B]``."""
        return time_since_start(batch, self.dt.per_graph(batch))
