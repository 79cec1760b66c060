"""What hooks of this package expect of a context."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.hooks import DynamicsContext, HookContext


def dynamics_context(hook: object, ctx: HookContext) -> tuple[DynamicsContext, Batch]:
    """Context and batch of a dynamics engine; ``TypeError`` naming the hook in any other workflow."""
    if not isinstance(ctx, DynamicsContext) or ctx.batch is None:
        raise TypeError(
            f"{type(hook).__name__} works in dynamics engines only, not with a {type(ctx).__name__} without a batch"
        )
    return ctx, ctx.batch


@runtime_checkable
class SimulationWorkflow(Protocol):
    """An engine that says what its quantities mean, as every :class:`~nvalchemi.dynamics.BaseDynamics` does."""

    conserves_momentum: bool
    """How degrees of freedom are counted (:mod:`nvalchemi.dynamics.thermo`)."""

    def elapsed_time(self, batch: Batch) -> Tensor:
        """Physical time of each graph, fs, ``[B]``; NaN where there is none."""
        ...

    def max_force(self, batch: Batch) -> Tensor:
        """Largest norm of what is driven to zero in each graph, eV/Å, ``[B]``."""
        ...


@runtime_checkable
class FedWorkflow(Protocol):
    """An engine that can take structures from a sampler, as every :class:`~nvalchemi.dynamics.BaseDynamics` can."""

    sampler: object | None
    """Where further structures come from, of which any may have a cell; ``None`` when the batch is all there is."""
