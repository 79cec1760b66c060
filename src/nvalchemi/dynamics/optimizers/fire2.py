"""FIRE 2.0: the revised fast inertial relaxation engine."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvalchemi import units
from nvalchemi.data import Batch
from nvalchemi.dynamics.base import ConvergenceHook
from nvalchemi.dynamics.optimizers.cell import CellCoordinates
from nvalchemi.dynamics.optimizers.coordinates import Coordinates, Vector
from nvalchemi.dynamics.optimizers.fire import FIRE
from nvalchemi.dynamics.parameters import GraphParameter
from nvalchemi.hooks import Hook
from nvalchemi.models.base import BaseModelMixin


class FIRE2(FIRE):
    """FIRE 2.0 (Guénolé, Nöhring, Vaid, Houllé, Xie, Prakash and Bitzek, Comput. Mater. Sci. 175, 109584, 2020).

    It differs from :class:`FIRE` in that the velocities are mixed after the kick (semi-implicit Euler), that going
    uphill takes back half a step, and in its parameters. All quantities are per structure; with power P = F·v

    * P > 0: after ``n_min`` such steps in a row Δt ← min(``f_inc`` Δt, ``dt_max``), α ← ``f_alpha`` α;
    * otherwise Δt ← max(``f_dec`` Δt, ``dt_min``), α ← ``alpha_start``, x ← x − Δt v / 2, v ← 0;
    * then v ← v + Δt F, ``v ← (1 − α) v + α |v| F/|F|``, and a move by Δt v of at most ``max_step``.

    As in the paper there is one evaluation of the forces per step. ASE's ``FIRE2`` makes a second one after the
    half step back, so that the paths agree only while no structure goes uphill.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy and forces.
    dt : float or Tensor [B], default 1.018
        First time step, fs, for masses of 1 amu; the default is ASE's 0.1 Å·sqrt(amu/eV).
    dt_max : float or Tensor [B], optional
        Largest time step, fs; default 10 ``dt``.
    dt_min : float or Tensor [B], optional
        Smallest time step, fs; default ``dt``/50.
    n_steps, hooks, convergence_hook, **options
        As in :class:`BaseDynamics`.
    n_min, f_inc, f_dec, alpha_start, f_alpha : optional
        Parameters of the paper: 20, 1.1, 0.5, 0.25, 0.99.
    max_step : float, default 0.2
        Longest move of a structure in one step, Å, as the norm over all its coordinates.
    coordinates : Coordinates, optional
        What moves; default the atoms. :class:`CellCoordinates` adds the cell (:class:`FIRE2VariableCell` is
        short for that).

    Raises
    ------
    ValueError
        A time step that is not positive and finite, or larger than ``dt_max``.
    """

    def __init__(
        self,
        model: BaseModelMixin,
        dt: float | Tensor = 0.1 / units.fs,
        dt_max: float | Tensor | None = None,
        dt_min: float | Tensor | None = None,
        n_steps: int | None = None,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        *,
        n_min: int = 20,
        f_inc: float = 1.1,
        f_dec: float = 0.5,
        alpha_start: float = 0.25,
        f_alpha: float = 0.99,
        max_step: float = 0.2,
        coordinates: Coordinates | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            dt,
            dt_max,
            n_steps,
            hooks,
            convergence_hook,
            n_min=n_min,
            f_inc=f_inc,
            f_dec=f_dec,
            alpha_start=alpha_start,
            f_alpha=f_alpha,
            max_step=max_step,
            coordinates=coordinates,
            **options,
        )
        self.dt_min = GraphParameter("dt_min", dt / 50 if dt_min is None else dt_min, exclusive=True)
        self._dt_min = torch.empty(0)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """As in FIRE."""
        super().prepare(batch, admitted)
        self._dt_min = self.dt_min.per_graph(batch).to(batch.dtype) * units.fs

    def advance(
        self, batch: Batch, force: Vector, v: Vector, dt: Tensor, alpha: Tensor, steps: Tensor
    ) -> tuple[Vector, Vector, Tensor, Tensor, Tensor]:
        """New velocities, the move, and the new time step, mixing and count of steps downhill, all of each graph."""
        ptr, graph = batch.batch_ptr, batch.batch_idx
        first = steps < 0
        downhill = (force.dot(v, ptr) > 0) & ~first
        uphill = ~downhill & ~first
        steps = torch.where(downhill, steps + 1, 0)
        faster = downhill & (steps > self.n_min)
        shorter = torch.maximum(dt * self.f_dec, self._dt_min)
        dt = torch.where(
            faster, torch.minimum(dt * self.f_inc, self._dt_max), torch.where(uphill, shorter, dt)
        )
        alpha = torch.where(faster, alpha * self.f_alpha, torch.where(uphill, self.alpha_start, alpha))

        back = v.scaled(torch.where(uphill, -0.5 * dt, 0.0), graph)
        v = v.scaled(torch.where(uphill, 0.0, 1.0), graph).plus(force.scaled(dt, graph))
        strength = force.dot(force, ptr)
        mixing = torch.where(strength > 0, alpha * (v.dot(v, ptr) / strength).sqrt(), 0.0)
        v = v.scaled(1.0 - alpha, graph).plus(force.scaled(mixing, graph))
        return v, v.scaled(self._limited(dt, v, ptr), graph).plus(back), dt, alpha, steps


class FIRE2VariableCell(FIRE2):
    """FIRE 2.0 on atoms and cell: :class:`FIRE2` with :class:`CellCoordinates`, nothing else.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy, forces and stress.
    dt, dt_max, dt_min, n_steps, hooks, convergence_hook, **options
        As in :class:`FIRE2`.
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
        dt_min: float | Tensor | None = None,
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
            model, dt, dt_max, dt_min, n_steps, hooks, convergence_hook, coordinates=coordinates, **options
        )
