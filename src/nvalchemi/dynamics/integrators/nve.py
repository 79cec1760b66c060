"""Velocity Verlet: constant energy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvalchemi import units
from nvalchemi.data import Batch
from nvalchemi.dynamics.base import BaseDynamics, ConvergenceHook
from nvalchemi.dynamics.clock import time_since_start
from nvalchemi.dynamics.parameters import GraphParameter
from nvalchemi.dynamics.thermo import kinetic_energy
from nvalchemi.dynamics.updates import add_product
from nvalchemi.hooks import Hook
from nvalchemi.models.base import BaseModelMixin


class NVE(BaseDynamics):
    """Newton's equations by velocity Verlet (Swope, Andersen, Berens and Wilson 1982).

    ============================== ============================== ==============
    equation                       in the code                    unit
    ============================== ============================== ==============
    v(t + Δt/2) = v + F Δt / 2m    ``kick``, ``_half_dt_over_m``  sqrt(eV/amu)
    x(t + Δt) = x + v Δt           ``drift``, ``_dt``             Å
    v(t + Δt) = v + F Δt / 2m      ``kick``                       sqrt(eV/amu)
    ============================== ============================== ==============

    The error of the energy is of order Δt² and does not drift; the scheme is reversible and conserves
    momentum.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy and forces.
    dt : float or Tensor [B]
        Time step, fs; > 0.
    n_steps, hooks, convergence_hook, **options
        As in :class:`BaseDynamics`.
    """

    def __init__(
        self,
        model: BaseModelMixin,
        dt: float | Tensor,
        n_steps: int | None = None,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        **options: Any,
    ) -> None:
        self.dt = GraphParameter("dt", dt, exclusive=True)
        super().__init__(model, hooks, convergence_hook, n_steps, **options)
        self._dt = self._half_dt_over_m = torch.empty(0, 3)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Per-atom factors, once expanded to the shape of the velocities: each update is one plain operation."""
        dt = self.dt.per_atom(batch) * units.fs
        like = batch.positions
        self._dt = dt.to(like.dtype).expand_as(like).contiguous()
        half = 0.5 * dt / batch.atomic_masses.double().unsqueeze(-1)
        self._half_dt_over_m = half.to(like.dtype).expand_as(like).contiguous()

    def pre_update(self, batch: Batch) -> None:
        """Half kick with the old forces, drift."""
        self.kick(batch)
        self.drift(batch)

    def post_update(self, batch: Batch) -> None:
        """Half kick with the new forces."""
        self.kick(batch)

    def kick(self, batch: Batch) -> None:
        """V += F Δt / 2m."""
        add_product(batch.velocities, batch.forces, self._half_dt_over_m, self.active_atom_mask)

    def drift(self, batch: Batch) -> None:
        """X += v Δt."""
        add_product(batch.positions, batch.velocities, self._dt, self.active_atom_mask)

    def elapsed_time(self, batch: Batch) -> Tensor:
        """Time simulated so far, by this engine and those before it, fs, ``[B]``."""
        return time_since_start(batch, self.dt.per_graph(batch))

    def conserved_quantity(self, batch: Batch) -> Tensor:
        """What the equations of motion conserve, eV, float64 ``[B]``: here kinetic plus potential energy."""
        return kinetic_energy(batch) + batch.energy[:, 0].double()
