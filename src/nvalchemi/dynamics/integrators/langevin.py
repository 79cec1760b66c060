"""Langevin dynamics: constant temperature by friction and noise."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvalchemi import units
from nvalchemi.data import Batch
from nvalchemi.dynamics.base import ConvergenceHook
from nvalchemi.dynamics.integrators.nve import NVE
from nvalchemi.dynamics.parameters import GraphParameter, Schedule
from nvalchemi.dynamics.random import Stream, check_seed, standard_normals
from nvalchemi.dynamics.updates import add_product, assign
from nvalchemi.hooks import Hook
from nvalchemi.models.base import BaseModelMixin


class NVTLangevin(NVE):
    """Langevin dynamics by the BAOAB splitting (Leimkuhler and Matthews, Appl. Math. Res. Express 2013, 34).

    ===== ================================================= ===================
    part  equation                                          in the code
    ===== ================================================= ===================
    B     v += F Δt / 2m                                    ``kick``
    A     x += v Δt / 2                                     ``drift``
    O     v = c v + sqrt((1 − c²) kT / m) R, c = exp(−γ Δt) ``ornstein_uhlenbeck``
    A     x += v Δt / 2                                     ``drift``
    B     v += F Δt / 2m with the new forces                ``kick``
    ===== ================================================= ===================

    Positions are sampled with the least error of the splittings (none for a harmonic well). R are standard
    normal numbers that depend on the seed, ``system_id``, ``system_step`` and the atom only, so that a
    structure's path does not depend on its batch. The bath exchanges momentum with the structure: all 3N
    degrees of freedom have temperature T.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy and forces.
    dt : float or Tensor [B]
        Time step, fs; > 0.
    temperature : float or Tensor [B] or Schedule
        K; ≥ 0. A function of the steps each graph has made (int64 ``[B]``) ramps it.
    friction : float or Tensor [B]
        γ, 1/fs; ≥ 0 (0 gives constant energy).
    random_seed : int, default 42
        0 … 2⁶³ − 1. Different seeds give independent noise.
    n_steps, hooks, convergence_hook, **options
        As in :class:`BaseDynamics`.

    Raises
    ------
    ValueError
        A time step, temperature or friction that is negative or not finite.
    """

    conserves_momentum = False

    def __init__(
        self,
        model: BaseModelMixin,
        dt: float | Tensor,
        temperature: float | Tensor | Schedule,
        friction: float | Tensor,
        random_seed: int = 42,
        n_steps: int | None = None,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        **options: Any,
    ) -> None:
        self.temperature = GraphParameter("temperature", temperature)
        self.friction = GraphParameter("friction", friction)
        self.random_seed = check_seed(random_seed)
        super().__init__(model, dt, n_steps, hooks, convergence_hook, **options)
        self._keep = self._noise_scale = self._noise = torch.empty(0, 3)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Factors of B and A as in NVE (A with half the step), of O: c and sqrt((1 − c²) kT / m)."""
        super().prepare(batch, admitted)
        self._dt.mul_(0.5)
        exponent = self.friction.per_atom(batch) * self.dt.per_atom(batch)
        like = batch.positions
        self._keep = torch.exp(-exponent).to(like.dtype).expand_as(like).contiguous()
        self._noise = torch.empty_like(like, dtype=torch.float64)
        self._set_noise_scale(batch)

    def _set_noise_scale(self, batch: Batch) -> None:
        exponent = self.friction.per_atom(batch) * self.dt.per_atom(batch)
        thermal = units.kB * self.temperature.per_atom(batch) / batch.atomic_masses.double().unsqueeze(-1)
        # 1 − c² without cancellation at small friction.
        scale = (-torch.expm1(-2 * exponent) * thermal).sqrt()
        self._noise_scale = scale.to(batch.dtype).expand_as(batch.positions).contiguous()

    def pre_update(self, batch: Batch) -> None:
        """B, A, O, A."""
        if self.temperature.is_schedule:
            self._set_noise_scale(batch)
        self.kick(batch)
        self.drift(batch)
        self.ornstein_uhlenbeck(batch)
        self.drift(batch)

    def conserved_quantity(self, batch: Batch) -> Tensor:
        """NaN: the bath exchanges heat, and nothing is conserved."""
        return torch.full((batch.num_graphs,), torch.nan, dtype=torch.float64, device=batch.device)

    def ornstein_uhlenbeck(self, batch: Batch) -> None:
        """Friction and noise over a whole step."""
        ids, steps = batch.system_id[:, 0], batch.system_step[:, 0]
        noise = standard_normals(ids, steps, batch.batch_ptr, self.random_seed, Stream.LANGEVIN, self._noise)
        noise = noise.to(batch.dtype)
        if self.active_atom_mask is None:
            batch.velocities.mul_(self._keep)
            add_product(batch.velocities, noise, self._noise_scale, None)
        else:
            # The same operations as above, so that a structure's path does not depend on who else has stopped.
            kept = self._keep * batch.velocities
            kicked = torch.addcmul(kept, noise, self._noise_scale)
            assign(batch.velocities, kicked, self.active_atom_mask)
