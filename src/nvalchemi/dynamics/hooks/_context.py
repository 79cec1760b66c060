"""What hooks of this package expect of a context."""

from nvalchemi.data import Batch
from nvalchemi.hooks import DynamicsContext, HookContext


def dynamics_context(hook: object, ctx: HookContext) -> tuple[DynamicsContext, Batch]:
    """Context and batch of a dynamics engine; ``TypeError`` naming the hook in any other workflow."""
    if not isinstance(ctx, DynamicsContext) or ctx.batch is None:
        raise TypeError(
            f"{type(hook).__name__} works in dynamics engines only, not with a {type(ctx).__name__} without a batch"
        )
    return ctx, ctx.batch
