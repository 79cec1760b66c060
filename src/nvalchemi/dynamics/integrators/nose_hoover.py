"""Nosé–Hoover chains: constant temperature without random numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvalchemi import _kernels, units
from nvalchemi.data import Batch, Field, register_field
from nvalchemi.dynamics.base import ConvergenceHook
from nvalchemi.dynamics.integrators.nve import NVE
from nvalchemi.dynamics.parameters import GraphParameter, Schedule
from nvalchemi.dynamics.thermo import degrees_of_freedom, kinetic_energy
from nvalchemi.dynamics.updates import assign
from nvalchemi.hooks import Hook
from nvalchemi.models.base import BaseModelMixin

THERMOSTAT_POSITIONS = register_field(
    Field(
        "thermostat_positions", "system", (None, None), "float", "",
        "η of each chain and link", neutral=0, persistent=False,
    )
)  # fmt: skip
THERMOSTAT_VELOCITIES = register_field(
    Field(
        "thermostat_velocities", "system", (None, None), "float", "1/(Å·sqrt(amu/eV))",
        "dη/dt of each chain and link", neutral=0, persistent=False,
    )
)  # fmt: skip


class NoseHooverChains:
    """C independent chains of M thermostats for each graph (Martyna, Tuckerman, Tobias and Klein 1996, eqs. 29–33).

    ===================================== ============================= ===========
    equation                              in the code                   unit
    ===================================== ============================= ===========
    η_k, v_k = dη_k/dt, k = 1 … M         fields ``thermostat_…``       1, 1/t
    Q₁ = N_f kT τ², Q_k = kT τ²           ``dof``, ``kT``, ``time``     eV·t²
    Q₁ dv₁/dt = 2K − N_f kT − Q₁ v₁ v₂    ``excess`` = 2K / N_f kT      eV
    Q_k dv_k/dt = Q_{k−1} v²_{k−1} − kT   ``_kick``                     eV
    dp/dt = −v₁ p                         returned factor of p          1
    ===================================== ============================= ===========

    (− Q_k v_k v_{k+1} in all but the last; t is the internal unit of time.) The masses are divided out, so that
    only N_f, kT and τ appear. One call makes the symmetric product of 2M + 1 exact flows over ``dt``, cut into
    ``yoshida_order`` pieces by the weights of Suzuki and Yoshida, which is of fourth order in dt for 3 and 5.

    Parameters
    ----------
    number : int
        C, of chains per graph.
    length : int
        M, of thermostats per chain; ≥ 1.
    yoshida_order : {1, 3, 5}
        Number of pieces.
    """

    def __init__(self, number: int, length: int, yoshida_order: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"chain_length must be an int ≥ 1, got {length!r}")
        self.number, self.length = number, length
        self.weights = suzuki_yoshida_weights(yoshida_order)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Chains at rest for graphs that entered."""
        shape = (batch.num_graphs, self.number, self.length)
        for name in (THERMOSTAT_POSITIONS.name, THERMOSTAT_VELOCITIES.name):
            if name not in batch or batch[name].shape != shape:
                batch.add_key(name, batch.positions.new_zeros(shape))
            else:
                batch[name].masked_fill_(admitted[:, None, None], 0.0)

    def propagate(
        self,
        batch: Batch,
        kinetic: Tensor,
        dof: Tensor,
        kT: Tensor,
        time: Tensor,
        dt: Tensor,
        active: Tensor | None,
    ) -> Tensor:
        """Advance the chains by ``dt``.

        Parameters
        ----------
        batch : Batch
            Its chains are advanced in place, those of inactive graphs not at all.
        kinetic, dof : Tensor [B, C]
            Kinetic energy (eV) and number of degrees of freedom that each chain is coupled to; a chain without
            any does nothing.
        kT : Tensor [B, 1]
            eV.
        time, dt : Tensor [B, 1]
            τ and the time to advance by, in internal units.
        active : Tensor, bool [B], or None
            Graphs to advance; ``None``: all.

        Returns
        -------
        Tensor, float64 [B, C]
            Factors for the velocities that each chain is coupled to.
        """
        eta, v = batch.thermostat_positions.double(), batch.thermostat_velocities.double()
        if _kernels.serve(eta):
            eta, v, scale = self._compiled(eta, v, kinetic, dof, kT, time, dt, active)
        else:
            eta, v, scale = self._propagated(eta, v, kinetic, dof, kT, time, dt)
        rows = None if active is None else active[:, None, None]
        assign(batch.thermostat_positions, eta.to(batch.dtype), rows)
        assign(batch.thermostat_velocities, v.to(batch.dtype), rows)
        return scale

    def _compiled(
        self,
        eta: Tensor,
        v: Tensor,
        kinetic: Tensor,
        dof: Tensor,
        kT: Tensor,
        time: Tensor,
        dt: Tensor,
        active: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """New η, v and the factors, on the CPU, where over a hundred tiny operations can cost more than forces."""
        from nvalchemi._kernels.chains import propagate

        eta, v, scale = eta.clone(), v.clone(), torch.ones_like(kinetic)
        mask = torch.ones(eta.shape[0], dtype=torch.bool) if active is None else active
        propagate(
            eta.numpy(),
            v.numpy(),
            kinetic.numpy(),
            dof.numpy(),
            kT.numpy(),
            time.numpy(),
            dt.numpy(),
            self.weights,
            mask.numpy(),
            scale.numpy(),
        )
        return eta, v, scale

    def _propagated(
        self, eta: Tensor, v: Tensor, kinetic: Tensor, dof: Tensor, kT: Tensor, time: Tensor, dt: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """New η, v and the factors, on any device."""
        positions, velocities = list(eta.unbind(-1)), list(v.unbind(-1))
        excess = torch.where(dof > 0, 2 * kinetic / (dof.clamp(min=1) * kT), 1.0)
        rate = time.pow(-2)  # 1/τ²: accelerations are in units of it
        log_scale = torch.zeros_like(excess)
        for weight in self.weights:
            step = weight * dt
            self._kick(velocities, excess, dof, rate, step, downwards=True)
            log_scale = log_scale - step * velocities[0]
            excess = excess * torch.exp(-2 * step * velocities[0])
            positions = [torch.addcmul(eta, v, step) for eta, v in zip(positions, velocities, strict=True)]
            self._kick(velocities, excess, dof, rate, step, downwards=False)
        return torch.stack(positions, -1), torch.stack(velocities, -1), torch.exp(log_scale)

    def _kick(
        self, v: list[Tensor], excess: Tensor, dof: Tensor, rate: Tensor, step: Tensor, *, downwards: bool
    ) -> None:
        """Half of ``step`` for all velocities, from the last link to the first or back."""
        last = self.length - 1
        for k in range(last, -1, -1) if downwards else range(last + 1):
            below = v[k - 1].square() if k > 1 else dof * v[0].square() if k == 1 else rate * excess
            half = 0.5 * step * (below - rate)
            if k == last:
                v[k] = v[k] + half
            else:
                friction = torch.exp(-0.25 * step * v[k + 1])
                v[k] = (v[k] * friction + half) * friction

    def energy(self, batch: Batch, dof: Tensor, kT: Tensor, time: Tensor) -> Tensor:
        """Energy of the chains, eV, ``[B]``; arguments as in :meth:`propagate`.

        Each has N_f kT η₁ + Q₁ v₁²/2 + Σ (kT η_k + Q_k v_k²/2), the sum from k = 2.
        """
        eta, v = batch.thermostat_positions.double(), batch.thermostat_velocities.double()
        links = eta + 0.5 * (time.unsqueeze(-1) * v).square()
        return (kT * (dof * links[..., 0] + links[..., 1:].sum(-1))).sum(-1)


def suzuki_yoshida_weights(order: int) -> tuple[float, ...]:
    """Weights that make a composition of 3 or 5 second-order steps one of fourth order; they add up to 1.

    >>> [round(w, 3) for w in suzuki_yoshida_weights(3)]
    [1.351, -1.702, 1.351]
    """
    if order not in (1, 3, 5):
        raise ValueError(f"yoshida_order must be 1, 3 or 5, got {order!r}")
    if order == 1:
        return (1.0,)
    outer = 1.0 / ((order - 1) - (order - 1) ** (1 / 3))
    pair = (outer,) * (order // 2)
    return (*pair, 1.0 - (order - 1) * outer, *pair)


class NVTNoseHoover(NVE):
    """Nosé–Hoover chain dynamics (Martyna, Klein and Tuckerman 1992; integrator of Martyna et al. 1996).

    ================================================ ========================
    part                                             in the code
    ================================================ ========================
    chain over Δt/2, v ← s v                         ``thermostat``
    v += F Δt / 2m                                   ``kick``
    x += v Δt                                        ``drift``
    v += F Δt / 2m with the new forces               ``kick``
    chain over Δt/2, v ← s v                         ``thermostat``
    ================================================ ========================

    The dynamics is deterministic and time-reversible, and :meth:`conserved_quantity` tells whether the time step
    is good. It scales velocities, so a total momentum of zero stays zero: N_f = 3N − 3, or 3 × the number of
    free atoms where atoms are fixed (:mod:`nvalchemi.dynamics.thermo`). Start from velocities without total
    momentum, as :func:`initialize_velocities` gives; the chain would take a drift of the whole for heat. A
    structure without degrees of freedom, a lone atom, is left as it is.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy and forces.
    dt : float or Tensor [B]
        Time step, fs; > 0.
    temperature : float or Tensor [B] or Schedule
        K; > 0. A function of the steps each graph has made (int64 ``[B]``) ramps it.
    thermostat_time : float or Tensor [B]
        τ, fs; > 0: the thermostat has mass N_f kT τ² and swings with a period near 4.4 τ. Good values are 20
        to 100 time steps.
    chain_length : int, default 3
        Thermostats per chain; 1 is the thermostat of Nosé and Hoover, which is not ergodic for small or stiff
        systems.
    yoshida_order : {1, 3, 5}, default 3
        Number of Suzuki–Yoshida pieces that a step of the chain is made in.
    n_steps, hooks, convergence_hook, **options
        As in :class:`BaseDynamics`.

    Raises
    ------
    ValueError
        A time step, temperature or time that is not positive and finite; a chain length below 1; another order.
    """

    def __init__(
        self,
        model: BaseModelMixin,
        dt: float | Tensor,
        temperature: float | Tensor | Schedule,
        thermostat_time: float | Tensor,
        chain_length: int = 3,
        yoshida_order: int = 3,
        n_steps: int | None = None,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        **options: Any,
    ) -> None:
        self.temperature = GraphParameter("temperature", temperature, exclusive=True)
        self.thermostat_time = GraphParameter("thermostat_time", thermostat_time, exclusive=True)
        self.chains = NoseHooverChains(1, chain_length, yoshida_order)
        super().__init__(model, dt, n_steps, hooks, convergence_hook, **options)
        self._half_dt = self._time = torch.empty(0, 1)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Factors as in NVE, chains at rest for graphs that entered."""
        super().prepare(batch, admitted)
        self._half_dt = 0.5 * units.fs * self.dt.per_graph(batch).unsqueeze(-1)
        self._time = units.fs * self.thermostat_time.per_graph(batch).unsqueeze(-1)
        self.chains.prepare(batch, admitted)

    def pre_update(self, batch: Batch) -> None:
        """Half a step of the chain, then as in NVE."""
        self.thermostat(batch)
        super().pre_update(batch)

    def post_update(self, batch: Batch) -> None:
        """As in NVE, then half a step of the chain."""
        super().post_update(batch)
        self.thermostat(batch)

    def thermostat(self, batch: Batch) -> None:
        """Advance the chain by Δt/2 and scale the velocities."""
        dof, kT = self._coupling(batch)
        kinetic = kinetic_energy(batch).unsqueeze(-1)
        scale = self.chains.propagate(
            batch, kinetic, dof, kT, self._time, self._half_dt, self.active_graph_mask
        )
        factor = scale.to(batch.dtype)[batch.batch_idx]
        assign(batch.velocities, batch.velocities * factor, self.active_atom_mask)

    def conserved_quantity(self, batch: Batch) -> Tensor:
        """Energy of structure and chain, eV, float64 ``[B]``; constant while the temperature is."""
        dof, kT = self._coupling(batch)
        return super().conserved_quantity(batch) + self.chains.energy(batch, dof, kT, self._time)

    def _coupling(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Degrees of freedom and kT (eV), both [B, 1]."""
        dof = degrees_of_freedom(batch, self.conserves_momentum).unsqueeze(-1)
        return dof, units.kB * self.temperature.per_graph(batch).unsqueeze(-1)
