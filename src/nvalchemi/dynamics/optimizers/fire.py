"""FIRE: relaxation by steered dynamics."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvalchemi import units
from nvalchemi.data import Batch, Field, register_field
from nvalchemi.dynamics.base import ConvergenceHook
from nvalchemi.dynamics.optimizers.cell import CellCoordinates
from nvalchemi.dynamics.optimizers.coordinates import Coordinates, Vector
from nvalchemi.dynamics.optimizers.minimiser import Minimiser
from nvalchemi.dynamics.parameters import GraphParameter
from nvalchemi.hooks import Hook
from nvalchemi.models.base import BaseModelMixin

for _row in (
    Field(
        "fire_velocities", "node", (3,), "float", "sqrt(eV/amu)", "velocities of the minimiser, unit masses"
    ),
    Field("fire_cell_velocities", "system", (3, 3), "float", "sqrt(eV/amu)", "the same for the cell"),
    Field("fire_dt", "system", (1,), "float", "Å·sqrt(amu/eV)", "time step"),
    Field("fire_alpha", "system", (1,), "float", "", "mixing of velocity and force"),
    Field(
        "fire_downhill_steps", "system", (1,), "int", "", "steps since one went uphill; −1 before the first"
    ),
):
    # The neutral value is a placeholder: prepare() initialises the graphs that enter.
    register_field(replace(_row, neutral=0, persistent=False))


class FIRE(Minimiser):
    """Fast inertial relaxation engine (Bitzek, Koskinen, Gähler, Moseler and Gumbsch, PRL 97, 170201, 2006).

    The algorithm is that of ASE's ``FIRE``, step for step, with all quantities per structure: with power P
    = F·v

    * P > 0: ``v ← (1 − α) v + α |v| F/|F|``; after ``n_min`` such steps in a row Δt ← min(``f_inc`` Δt,
      ``dt_max``), α ← ``f_alpha`` α;
    * otherwise v ← 0, Δt ← ``f_dec`` Δt, α ← ``alpha_start``;
    * then v ← v + Δt F, and a move by Δt v whose norm over the structure is at most ``max_step``.

    The whole move is made in ``pre_update``; convergence is judged after the forces of the new positions
    are known. The minimiser's velocities are fields of their own, so that ``batch.velocities`` keep their
    physical meaning.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy and forces.
    dt : float or Tensor [B], default 1.018
        First time step, fs, for masses of 1 amu; the default is ASE's 0.1 Å·sqrt(amu/eV).
    dt_max : float or Tensor [B], optional
        Largest time step, fs; default 10 ``dt``.
    n_steps, hooks, convergence_hook, **options
        As in :class:`BaseDynamics`.
    n_min, f_inc, f_dec, alpha_start, f_alpha : optional
        Parameters of the paper: 5, 1.1, 0.5, 0.1, 0.99.
    max_step : float, default 0.2
        Longest move of a structure in one step, Å, as the norm over all its coordinates.
    coordinates : Coordinates, optional
        What moves; default the atoms. :class:`CellCoordinates` adds the cell (:class:`FIREVariableCell` is
        short for that).

    Raises
    ------
    ValueError
        A time step that is not positive and finite, or larger than ``dt_max``; a ``max_step`` or a parameter of
        the paper that is not, or a negative ``n_min``.
    """

    def __init__(
        self,
        model: BaseModelMixin,
        dt: float | Tensor = 0.1 / units.fs,
        dt_max: float | Tensor | None = None,
        n_steps: int | None = None,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        *,
        n_min: int = 5,
        f_inc: float = 1.1,
        f_dec: float = 0.5,
        alpha_start: float = 0.1,
        f_alpha: float = 0.99,
        max_step: float = 0.2,
        coordinates: Coordinates | None = None,
        **options: Any,
    ) -> None:
        self.dt = GraphParameter("dt", dt, exclusive=True)
        self.dt_max = GraphParameter("dt_max", 10 * dt if dt_max is None else dt_max, exclusive=True)
        positive = {
            "f_inc": f_inc, "f_dec": f_dec, "alpha_start": alpha_start, "f_alpha": f_alpha, "max_step": max_step,
        }  # fmt: skip
        for name, value in positive.items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be finite and > 0, got {value}")
        if not n_min >= 0:
            raise ValueError(f"n_min must be ≥ 0, got {n_min}")
        self.n_min, self.f_inc, self.f_dec = n_min, f_inc, f_dec
        self.alpha_start, self.f_alpha = alpha_start, f_alpha
        self.max_step = max_step
        super().__init__(model, hooks, convergence_hook, n_steps, coordinates=coordinates, **options)
        self._dt_max = torch.empty(0)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Begin at rest, with the first time step, for graphs that entered."""
        self.coordinates.prepare(batch, admitted)
        dt, self._dt_max = (p.per_graph(batch).to(batch.dtype) * units.fs for p in (self.dt, self.dt_max))
        if bool((dt > self._dt_max).any()):
            raise ValueError(f"dt must not exceed dt_max: {self.dt} and {self.dt_max} fs")
        first: dict[str, Tensor] = {
            "fire_velocities": torch.zeros_like(batch.positions),
            "fire_dt": dt.unsqueeze(-1),
            "fire_alpha": torch.full_like(dt, self.alpha_start).unsqueeze(-1),
            "fire_downhill_steps": torch.full_like(batch.status, -1),
        }
        if self.coordinates.has_cell:
            first["fire_cell_velocities"] = batch.positions.new_zeros(batch.num_graphs, 3, 3)
        self.begin(batch, admitted, first)

    def pre_update(self, batch: Batch) -> None:
        """The whole move."""
        force = self.coordinates.forces(batch)
        v = Vector(batch.fire_velocities, batch.fire_cell_velocities if self.coordinates.has_cell else None)
        dt, alpha, steps = (batch[f"fire_{name}"][:, 0] for name in ("dt", "alpha", "downhill_steps"))
        v, move, dt, alpha, steps = self.advance(batch, force, v, dt, alpha, steps)
        self.coordinates.displace(batch, move, self.active_graph_mask)
        state = {
            "fire_velocities": v.atoms,
            "fire_dt": dt.unsqueeze(-1),
            "fire_alpha": alpha.unsqueeze(-1),
            "fire_downhill_steps": steps.unsqueeze(-1),
        }
        if v.cell is not None:
            state["fire_cell_velocities"] = v.cell
        self.store(batch, state)

    def advance(
        self, batch: Batch, force: Vector, v: Vector, dt: Tensor, alpha: Tensor, steps: Tensor
    ) -> tuple[Vector, Vector, Tensor, Tensor, Tensor]:
        """New velocities, the move, and the new time step, mixing and count of steps downhill, all of each graph."""
        ptr, graph = batch.batch_ptr, batch.batch_idx
        first = steps < 0
        downhill = (force.dot(v, ptr) > 0) & ~first
        uphill = ~downhill & ~first
        mixing = alpha * (v.dot(v, ptr) / force.dot(force, ptr)).sqrt()
        keep = torch.where(downhill, 1.0 - alpha, torch.where(first, 1.0, 0.0))
        steer = torch.where(downhill, mixing, 0.0)

        faster = downhill & (steps > self.n_min)
        dt = torch.where(
            faster, torch.minimum(dt * self.f_inc, self._dt_max), torch.where(uphill, dt * self.f_dec, dt)
        )
        alpha = torch.where(faster, alpha * self.f_alpha, torch.where(uphill, self.alpha_start, alpha))
        steps = torch.where(downhill, steps + 1, 0)

        v = v.scaled(keep, graph).plus(force.scaled(steer + dt, graph))
        return v, v.scaled(self._limited(dt, v, ptr), graph), dt, alpha, steps

    def _limited(self, dt: Tensor, v: Vector, ptr: Tensor) -> Tensor:
        """Time to move by, [B]: ``dt``, or less where the move would be longer than ``max_step``."""
        length = dt * v.dot(v, ptr).sqrt()
        return torch.where(length > self.max_step, self.max_step * dt / length, dt)


class FIREVariableCell(FIRE):
    """FIRE on atoms and cell: :class:`FIRE` with :class:`CellCoordinates`, nothing else.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy, forces and stress.
    dt, dt_max, n_steps, hooks, convergence_hook, **options
        As in :class:`FIRE`.
    pressure, hydrostatic, constant_volume, mask
        As in :class:`CellCoordinates`.
    """

    __needs_keys__: ClassVar[frozenset[str]] = frozenset({"energy", "forces", "stress"})
    __provides_keys__: ClassVar[frozenset[str]] = frozenset({"positions", "cell"})

    def __init__(
        self,
        model: BaseModelMixin,
        dt: float | Tensor = 0.1 / units.fs,
        dt_max: float | Tensor | None = None,
        n_steps: int | None = None,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        *,
        pressure: float = 0.0,
        hydrostatic: bool = False,
        constant_volume: bool = False,
        mask: Sequence[float] | Sequence[Sequence[float]] | Tensor | None = None,
        **options: Any,
    ) -> None:
        coordinates = CellCoordinates(
            pressure, hydrostatic=hydrostatic, constant_volume=constant_volume, mask=mask
        )
        super().__init__(
            model, dt, dt_max, n_steps, hooks, convergence_hook, coordinates=coordinates, **options
        )
