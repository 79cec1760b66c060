"""The ensembles of ``nvalchemi md`` and the engines that sample them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvalchemi import units
from nvalchemi.cli.errors import InputError

if TYPE_CHECKING:
    from nvalchemi.cli import options
    from nvalchemi.data import Batch
    from nvalchemi.dynamics import BaseDynamics
    from nvalchemi.hooks import Hook
    from nvalchemi.models.base import BaseModelMixin


@dataclass(frozen=True)
class Ensemble:
    """An ensemble with its parameters, as the options of the command give them (K, fs, 1/fs, GPa)."""

    name: "options.Ensemble"
    temperature: float | None
    dt: float
    friction: float
    pressure: float
    thermostat_time: float
    barostat_time: float
    seed: int

    def __post_init__(self) -> None:
        if self.name != "nve" and self.temperature is None:
            raise InputError(f"--ensemble {self.name} needs --temperature")

    def told(self) -> dict[str, str | float]:
        """What decides how the run goes on, by option; temperature and pressure may be changed on the way."""
        own = {"nve": (), "nvt": ("friction",), "npt": ("thermostat_time", "barostat_time")}[self.name]
        return {"ensemble": self.name, **{name: getattr(self, name) for name in ("dt", "seed", *own)}}

    def set_velocities(self, batch: "Batch") -> None:
        """Draw velocities unless the files had them."""
        from nvalchemi.dynamics import initialize_velocities

        if "velocities" in batch:
            return
        if self.temperature is None:
            raise InputError("not every structure has velocities: --temperature says at which to draw them")
        try:
            initialize_velocities(batch, self.temperature, random_seed=self.seed)
        except ValueError as error:
            raise InputError(str(error)) from error

    def engine(self, potential: "BaseModelMixin", hooks: "Sequence[Hook]") -> "BaseDynamics":
        """The engine that samples it."""
        from nvalchemi.dynamics import NPT, NVE, NVTLangevin

        common: dict[str, Any] = {"hooks": hooks, "max_edges_per_eval": "auto"}
        try:
            if self.name == "nve" or self.temperature is None:
                return NVE(potential, self.dt, **common)
            if self.name == "nvt":
                return NVTLangevin(
                    potential, self.dt, self.temperature, self.friction, random_seed=self.seed, **common
                )
            return NPT(
                potential,
                self.dt,
                self.temperature,
                self.pressure * units.GPa,
                self.barostat_time,
                self.thermostat_time,
                **common,
            )
        except ValueError as error:
            raise InputError(str(error)) from error
