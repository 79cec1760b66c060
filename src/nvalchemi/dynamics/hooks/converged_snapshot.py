"""The structures that are done."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Self

from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.dynamics.sinks import SnapshotSink, without_working_state
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.state import Stateful
from nvalchemi.hooks import HookContext


class ConvergedSnapshotHook:
    """Write each structure to a sink when it converges, once and in the state in which it did.

    Parameters
    ----------
    sink : SnapshotSink
        Takes the structures, for example :class:`~nvalchemi.dynamics.sinks.ExtxyzTrajectory`. Closed when the
        run ends; a further run goes on writing to it.

    Raises
    ------
    ValueError
        When called at a stage other than ``ON_CONVERGE``, where nobody says which structures converged.
    """

    order_role = "record"
    frequency = 1

    def __init__(self, sink: SnapshotSink) -> None:
        self.sink = sink
        self.stage: Enum | None = DynamicsStage.ON_CONVERGE

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Write the structures marked in ``ctx.converged_mask``."""
        ctx, batch = dynamics_context(self, ctx)
        if ctx.converged_mask is None:
            raise ValueError(f"ConvergedSnapshotHook works at ON_CONVERGE only, not at {stage.name}")
        self.sink.write(without_working_state(batch), ctx.converged_mask)

    def state_dict(self) -> dict[str, Any]:
        """State of the sink if it has one."""
        return {"sink": dict(self.sink.state_dict())} if isinstance(self.sink, Stateful) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        if isinstance(self.sink, Stateful) and "sink" in state:
            self.sink.load_state_dict(state["sink"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sink.close()
