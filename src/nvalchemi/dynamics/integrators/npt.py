"""Constant pressure by the equations of Martyna, Tobias and Klein, with (NPT) and without (NPH) thermostats."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvalchemi import units
from nvalchemi.data import Batch, Field, register_field
from nvalchemi.dynamics.admission import require_periodic_cells
from nvalchemi.dynamics.base import ConvergenceHook
from nvalchemi.dynamics.integrators.nose_hoover import NoseHooverChains
from nvalchemi.dynamics.integrators.nve import NVE
from nvalchemi.dynamics.parameters import GraphParameter, Schedule
from nvalchemi.dynamics.pressure import AppliedPressure, PressureCoupling
from nvalchemi.dynamics.segments import sum_per_graph
from nvalchemi.dynamics.thermo import degrees_of_freedom, free_atom_mask, kinetic_energy, volume
from nvalchemi.dynamics.updates import assign
from nvalchemi.hooks import Hook
from nvalchemi.models.base import BaseModelMixin

STRAIN_RATE = register_field(
    Field(
        "barostat_strain_rate", "system", (3, 3), "float", "1/(Å·sqrt(amu/eV))",
        "velocity of the barostat, (dh/dt) h⁻¹ for columns h", neutral=0, persistent=False,
    )
)  # fmt: skip
BAROSTAT_WORK = register_field(
    Field(
        "barostat_work", "system", (1,), "float", "eV",
        "work against the part of the applied pressure that is not hydrostatic", neutral=0, persistent=False,
    )
)  # fmt: skip

_BAROSTAT_DOF = {"isotropic": 1, "anisotropic": 3, "triclinic": 6}

PressureArgument = float | Tensor | Callable[[Tensor], float | Tensor]


class NPH(NVE):
    """Constant pressure and enthalpy: a barostat without thermostats.

    Equations of Martyna, Tobias and Klein (J. Chem. Phys. 101, 4177, 1994), integrated as in Tuckerman, Alejandre,
    López-Rendón, Jochim and Martyna (J. Phys. A 39, 5629, 2006). The strain rate u (their p_g / W_g) is a symmetric
    matrix, so that the cell does not rotate:

    ================================================ ================================ ===============
    equation                                         in the code                      unit
    ================================================ ================================ ===============
    W du/dt = C[V (P_int − P) + (2K / N_f) 1]        ``push_cell``                    eV
    V P_int = Σ m v vᵀ − V σ                         ``_internal_virial``             eV
    dv/dt = F/m − (u + tr(u)/N_f 1) v                ``kick``                         sqrt(eV/amu)/t
    dx/dt = v + u x,  dh/dt = h u (rows)             ``drift``                        Å/t
    W = (N_f + 3) kT τ² / 3                          ``_mass``                        eV·t²
    ================================================ ================================ ===============

    C keeps what the coupling lets change: ``"isotropic"`` the mean of the diagonal (then all is the scalar barostat
    with mass 3 W), ``"anisotropic"`` the diagonal, ``"triclinic"`` all. A step is push, kick, drift, force, kick,
    push, the outer ones over Δt/2, each the exact flow of its part; it is time-reversible.

    **N or N − 1.** Momentum stays zero when it was zero, and N_f = 3N − 3 as everywhere in the package. The
    N − 1 relative positions of an ideal gas then give the volume the weight V^(N−1) exp(−PV/kT), so that
    ⟨V⟩ = N kT/P, while the pressure is that of N − 1 particles: ⟨P_int V⟩ = (N − 1) kT = P ⟨V⟩ − kT.

    **Fixed atoms** follow the cell: it is their scaled positions that stay, as in variable-cell relaxation. They
    have no velocity besides and count in N_f no more than elsewhere.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy, forces and stress.
    dt : float or Tensor [B]
        Time step, fs; > 0.
    pressure : float or Tensor or Schedule
        P, eV/Å³ (``units.GPa``, ``units.bar`` convert): a number, ``[B]``, ``[B,3]`` or ``[B,3,3]``, as
        :class:`AppliedPressure` explains. A pressure that is not hydrostatic is a constant Cauchy stress; its
        work is added up along the path.
    barostat_time : float or Tensor [B]
        τ, fs; > 0: time constant of the barostat; 100 to 1000 time steps.
    pressure_coupling : {"isotropic", "anisotropic", "triclinic"}, default "isotropic"
        What of the cell may change: its volume, its lengths along x, y and z, or everything.
    n_steps, hooks, convergence_hook, **options
        As in :class:`BaseDynamics`.
    mass_temperature : float or Tensor [B], default 300.0
        T in the mass of the barostat, K; > 0. Averages do not depend on it.

    Raises
    ------
    ValueError
        A time or temperature that is not positive and finite; a pressure whose shape is wrong or could mean two
        things; at admission, a graph without a cell that is periodic in three directions.
    """

    __needs_keys__: ClassVar[frozenset[str]] = frozenset({"energy", "forces", "stress"})
    __provides_keys__: ClassVar[frozenset[str]] = frozenset({"positions", "velocities", "cell"})

    def __init__(
        self,
        model: BaseModelMixin,
        dt: float | Tensor,
        pressure: PressureArgument,
        barostat_time: float | Tensor,
        pressure_coupling: PressureCoupling = "isotropic",
        n_steps: int | None = None,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        *,
        mass_temperature: float | Tensor | Schedule = 300.0,
        **options: Any,
    ) -> None:
        self.pressure = AppliedPressure(pressure, pressure_coupling)
        self.pressure_coupling: PressureCoupling = pressure_coupling
        self.barostat_time = GraphParameter("barostat_time", barostat_time, exclusive=True)
        self.mass_temperature = GraphParameter("mass_temperature", mass_temperature, exclusive=True)
        super().__init__(model, dt, n_steps, hooks, convergence_hook, **options)
        self._step = self._barostat_time = self._dof = self._mass = torch.empty(0)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Factors as in NVE, a barostat at rest for graphs that entered."""
        require_periodic_cells(batch, "a barostat")
        super().prepare(batch, admitted)
        self._step = units.fs * self.dt.per_graph(batch)
        self._barostat_time = units.fs * self.barostat_time.per_graph(batch)
        for name, shape in ((STRAIN_RATE.name, (3, 3)), (BAROSTAT_WORK.name, (1,))):
            if name not in batch:
                batch.add_key(name, batch.positions.new_zeros(batch.num_graphs, *shape))
            else:
                batch[name].masked_fill_(admitted.view(-1, *[1] * len(shape)), 0.0)
        self._count(batch)

    def pre_update(self, batch: Batch) -> None:
        """Half a push and a kick with the old forces, drift."""
        self._count(batch)
        self.thermostat(batch)
        self.push_cell(batch)
        super().pre_update(batch)

    def post_update(self, batch: Batch) -> None:
        """Half a kick and a push with the new forces."""
        super().post_update(batch)
        self.push_cell(batch)
        self.thermostat(batch)

    def thermostat(self, batch: Batch) -> None:
        """Nothing; the outermost part of a step in :class:`NPT`."""

    def _count(self, batch: Batch) -> None:
        """Degrees of freedom and mass W (eV·t²), which a hook or a schedule may change from step to step; [B]."""
        self._dof = degrees_of_freedom(batch, self.conserves_momentum)
        kT = units.kB * self.mass_temperature.per_graph(batch)
        self._mass = (self._dof + 3) / 3 * kT * self._barostat_time.square()

    def push_cell(self, batch: Batch) -> None:
        """Strain rate over Δt/2: u += (Δt/2) C[V (P_int − P) + (2K / N_f) 1] / W."""
        box = torch.linalg.det(batch.cell.double()).abs()[:, None, None]
        eye = torch.eye(3, dtype=torch.float64, device=batch.device)
        push = self._internal_virial(batch) - box * self.pressure.per_graph(batch)
        push = self._coupled(push + (2 * kinetic_energy(batch) / self._dof.clamp(min=1))[:, None, None] * eye)
        factor = (0.5 * self._step / self._mass)[:, None, None]
        self._set_strain_rate(batch, batch.barostat_strain_rate.double() + factor * push)

    def kick(self, batch: Batch) -> None:
        """Velocities over Δt/2, with constant forces and u."""
        rate = batch.barostat_strain_rate.double()
        eye = torch.eye(3, dtype=torch.float64, device=batch.device)
        friction = rate + (_trace(rate) / self._dof.clamp(min=1))[:, None, None] * eye
        flow, mean_flow = linear_flow(-friction * (0.5 * self._step)[:, None, None])
        pull = batch.forces * self._half_dt_over_m
        new = _act(flow, batch.velocities, batch) + _act(mean_flow, pull, batch)
        assign(batch.velocities, new, self.active_atom_mask)

    def drift(self, batch: Batch) -> None:
        """Positions and cell over Δt, with constant v and u."""
        rate = batch.barostat_strain_rate.double()
        flow, mean_flow = linear_flow(rate * self._step[:, None, None])
        rows = None if self.active_graph_mask is None else self.active_graph_mask.unsqueeze(-1)
        if not self.pressure.is_hydrostatic:
            # The volume goes from V to V exp(tr u Δt); half of both ends is as accurate as the rest of the step.
            box = volume(batch)
            mean_box = 0.5 * box * (1 + torch.exp(_trace(rate) * self._step))
            power = (_deviator(self.pressure.per_graph(batch)) * rate).sum((-2, -1))
            work = batch.barostat_work.double() + (mean_box * power * self._step).unsqueeze(-1)
            assign(batch.barostat_work, work.to(batch.dtype), rows)
        new = _act(flow, batch.positions, batch) + _act(mean_flow, batch.velocities * self._dt, batch)
        # Fixed atoms, whose velocity is zero, follow the cell.
        assign(batch.positions, new, None if rows is None else rows[batch.batch_idx])
        cell = (batch.cell.double() @ flow).to(batch.dtype)
        assign(batch.cell, cell, None if rows is None else rows.unsqueeze(-1))

    def conserved_quantity(self, batch: Batch) -> Tensor:
        """K + U + P V + W tr(u²)/2, eV, ``[B]``; constant while the pressure is.

        P is the mean of the applied pressures; the work against the rest is added.
        """
        mean = _trace(self.pressure.per_graph(batch)) / 3
        return (
            super().conserved_quantity(batch)
            + mean * volume(batch)
            + self._barostat_energy(batch)
            + batch.barostat_work[:, 0].double()
        )

    def _barostat_energy(self, batch: Batch) -> Tensor:
        """Kinetic energy of the barostat, W tr(u²)/2, eV, [B]."""
        return 0.5 * self._mass * batch.barostat_strain_rate.double().square().sum((-2, -1))

    def _set_strain_rate(self, batch: Batch, value: Tensor) -> None:
        rows = None if self.active_graph_mask is None else self.active_graph_mask[:, None, None]
        assign(batch.barostat_strain_rate, value.to(batch.dtype), rows)

    def _internal_virial(self, batch: Batch) -> Tensor:
        """V P_int = Σ m v vᵀ − V σ, eV, [B, 3, 3]."""
        box = torch.linalg.det(batch.cell.double()).abs()[:, None, None]
        v = batch.velocities.double()
        per_atom = batch.atomic_masses.double()[:, None, None] * v.unsqueeze(-1) * v.unsqueeze(-2)
        free = free_atom_mask(batch)
        if free is not None:
            per_atom = torch.where(free[:, None, None], per_atom, 0.0)
        return sum_per_graph(per_atom, batch.batch_ptr) - box * batch.stress.double()

    def _coupled(self, matrix: Tensor) -> Tensor:
        """Part of a matrix [B, 3, 3] that the coupling lets act."""
        if self.pressure_coupling == "triclinic":
            return 0.5 * (matrix + matrix.transpose(-1, -2))
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        if self.pressure_coupling == "isotropic":
            diagonal = diagonal.mean(-1, keepdim=True).expand(-1, 3)
        return torch.diag_embed(diagonal)


class NPT(NPH):
    """Constant pressure and temperature: :class:`NPH` with one Nosé–Hoover chain on the atoms and one on the barostat.

    A step is that of :class:`NPH` between two half steps of the chains. The chain of the barostat holds
    W tr(u²) at 1, 3 or 6 kT, by the coupling. What is said there about N, N − 1 and fixed atoms holds here.

    Parameters
    ----------
    model, dt, pressure, barostat_time, pressure_coupling
        As in :class:`NPH`.
    temperature : float or Tensor [B] or Schedule
        K; > 0. A function of the steps each graph has made (int64 ``[B]``) ramps it.
    thermostat_time : float or Tensor [B]
        τ of both chains, fs; > 0; 20 to 100 time steps.
    chain_length, yoshida_order
        As in :class:`NVTNoseHoover`.
    n_steps, hooks, convergence_hook, **options
        As in :class:`BaseDynamics`.

    Raises
    ------
    ValueError
        As in :class:`NPH` and :class:`NVTNoseHoover`.
    """

    def __init__(
        self,
        model: BaseModelMixin,
        dt: float | Tensor,
        temperature: float | Tensor | Schedule,
        pressure: PressureArgument,
        barostat_time: float | Tensor,
        thermostat_time: float | Tensor,
        pressure_coupling: PressureCoupling = "isotropic",
        chain_length: int = 3,
        yoshida_order: int = 3,
        n_steps: int | None = None,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        **options: Any,
    ) -> None:
        self.temperature = GraphParameter("temperature", temperature, exclusive=True)
        self.thermostat_time = GraphParameter("thermostat_time", thermostat_time, exclusive=True)
        self.chains = NoseHooverChains(2, chain_length, yoshida_order)
        super().__init__(
            model,
            dt,
            pressure,
            barostat_time,
            pressure_coupling,
            n_steps,
            hooks,
            convergence_hook,
            mass_temperature=temperature,
            **options,
        )
        self._time = torch.empty(0, 1)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """As in NPH, chains at rest for graphs that entered."""
        super().prepare(batch, admitted)
        self._time = units.fs * self.thermostat_time.per_graph(batch).unsqueeze(-1)
        self.chains.prepare(batch, admitted)

    def thermostat(self, batch: Batch) -> None:
        """Advance both chains by Δt/2; scale the velocities and the strain rate."""
        dof, kT = self._coupling(batch)
        kinetic = torch.stack([kinetic_energy(batch), self._barostat_energy(batch)], -1)
        half_dt = 0.5 * self._step.unsqueeze(-1)
        scale = self.chains.propagate(batch, kinetic, dof, kT, self._time, half_dt, self.active_graph_mask)
        factor = scale[:, :1].to(batch.dtype)[batch.batch_idx]
        assign(batch.velocities, batch.velocities * factor, self.active_atom_mask)
        self._set_strain_rate(batch, scale[:, 1, None, None] * batch.barostat_strain_rate.double())

    def conserved_quantity(self, batch: Batch) -> Tensor:
        """That of NPH plus the energy of the chains, eV, ``[B]``; constant while temperature and pressure are."""
        dof, kT = self._coupling(batch)
        return super().conserved_quantity(batch) + self.chains.energy(batch, dof, kT, self._time)

    def _coupling(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Degrees of freedom of atoms and barostat, [B, 2], and kT (eV), [B, 1]."""
        barostat = torch.full_like(self._dof, _BAROSTAT_DOF[self.pressure_coupling])
        kT = units.kB * self.temperature.per_graph(batch).unsqueeze(-1)
        return torch.stack([self._dof, barostat], -1), kT


def linear_flow(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """exp(A) and φ(A) = ∫₀¹ exp(sA) ds of small symmetric matrices [B, 3, 3].

    With them dx/dt = A x + b is solved by x(1) = exp(A) x(0) + φ(A) b. By Taylor's series to A¹², right to
    round-off for |A| ≤ 1/2. The strain of one time step is far below that; beyond it the series stays finite
    and no step is meaningful.

    >>> flow, mean_flow = linear_flow(0.5 * torch.eye(3, dtype=torch.float64).unsqueeze(0))
    >>> round(float(flow[0, 0, 0]), 12), round(float(mean_flow[0, 0, 0]), 12)
    (1.6487212707, 1.2974425414)
    """
    eye = torch.eye(3, dtype=matrix.dtype, device=matrix.device)
    one = eye.expand_as(matrix)
    mean_flow = one
    for k in range(12, 1, -1):
        mean_flow = torch.baddbmm(one, matrix, mean_flow, alpha=1.0 / k)
    return torch.baddbmm(one, matrix, mean_flow), mean_flow


def _act(matrices: Tensor, vectors: Tensor, batch: Batch) -> Tensor:
    """Each graph's symmetric matrix [B, 3, 3] times each of its atoms' vectors [N, 3]."""
    per_atom = matrices.to(vectors.dtype)[batch.batch_idx]
    return torch.bmm(per_atom, vectors.unsqueeze(-1)).squeeze(-1)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _deviator(matrices: Tensor) -> Tensor:
    """The matrices less the mean of their diagonals."""
    eye = torch.eye(3, dtype=matrices.dtype, device=matrices.device)
    return matrices - (_trace(matrices) / 3)[:, None, None] * eye
