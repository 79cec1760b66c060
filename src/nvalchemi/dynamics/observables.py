"""What a run shows of itself: quantities of each structure, what is driven to zero, how far it has come."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.inflight import SizeAwareSampler
from nvalchemi.dynamics.thermo import kinetic_energy, pressure, temperature, volume
from nvalchemi.hooks.protocols import Progress, conforms

if TYPE_CHECKING:
    from nvalchemi.dynamics.base import BaseDynamics


@runtime_checkable
class ConservingEngine(Protocol):
    """An integrator that knows what its equations of motion conserve."""

    def conserved_quantity(self, batch: Batch) -> Tensor:
        """EV, ``[B]``; NaN when nothing is conserved."""
        ...


def observables(engine: "BaseDynamics", batch: Batch) -> dict[str, Tensor]:
    """See :meth:`BaseDynamics.observables`."""
    found = {
        "energy": batch.energy[:, 0],
        "fmax": engine.max_force(batch),
        "time": engine.elapsed_time(batch),
    }
    kinetic = kinetic_energy(batch) if "velocities" in batch else None
    if kinetic is not None:
        found["temperature"] = temperature(batch, engine.conserves_momentum, kinetic)
        found["total_energy"] = batch.energy[:, 0].double() + kinetic
    if conforms(type(engine), ConservingEngine):
        found["conserved_energy"] = cast(ConservingEngine, engine).conserved_quantity(batch)
    if "cell" in batch:
        found["volume"], found["pressure"] = volume(batch), pressure(batch, kinetic)
    return found


def targets(engine: "BaseDynamics") -> Mapping[str, float]:
    """See :meth:`BaseDynamics.targets`."""
    hooks = [part.convergence_hook for part in engine.parts]
    return {c.key: c.threshold for hook in hooks if hook is not None for c in hook.criteria}


def progress(engine: "BaseDynamics") -> Progress:
    """See :meth:`BaseDynamics.progress`."""
    began, limit, feed = engine._this_run
    if feed is not None:
        if not isinstance(feed, SizeAwareSampler):
            return Progress(0, None, "structure")  # from another process, which knows
        total = len(feed.dataset)
        return Progress(total - len(feed) - engine._num_active, total, "structure")
    steps = engine.step_count - began
    unfinished = engine._num_active > 0 and limit is not None and steps < limit
    return Progress(steps, limit, "step", "stopped before its end" if unfinished else "")
