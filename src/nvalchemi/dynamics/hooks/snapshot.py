"""Snapshots of a run."""

from collections.abc import Mapping
from enum import Enum
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.dynamics.sinks import SnapshotSink
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.state import Stateful
from nvalchemi.hooks import HookContext


class SnapshotHook:
    """Write the structures that are still being advanced to a sink, every so many steps.

    When the run ends, each structure whose last state is not in the sink yet is written once more: a
    trajectory ends with the state that a structure was left in, whether it converged between two snapshots or
    ran out of steps.

    After a restart the frames that were written since the state was saved are written again: a sink with
    ``state_dict`` and ``load_state_dict``, as those of this package, removes them first.

    Parameters
    ----------
    sink : SnapshotSink
        Takes the snapshots, for example :class:`~nvalchemi.dynamics.sinks.ExtxyzTrajectory`. Closed when the
        run ends; a further run goes on writing to it.
    frequency : int, default 1
        Write every so many steps.
    stage : DynamicsStage, optional
        Where in the step to write; default ``AFTER_STEP``.
    """

    order_role = "record"

    def __init__(self, sink: SnapshotSink, frequency: int = 1, stage: Enum | None = None) -> None:
        self.sink = sink
        self.frequency = frequency
        self.stage: Enum | None = DynamicsStage.AFTER_STEP if stage is None else stage
        self._batch: Batch | None = None
        self._written: Tensor | None = None

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Write the active structures of ``ctx.batch``."""
        ctx, batch = dynamics_context(self, ctx)
        active = ctx.active_graph_mask
        self.sink.write(batch, active)
        now = _identity(batch)
        if active is not None and self._written is not None and self._batch is batch:
            now = torch.where(active[:, None], now, self._written)
        self._batch, self._written = batch, now

    def state_dict(self) -> dict[str, Any]:
        """Which state of each structure was written last, and the state of the sink if it has one."""
        return {
            "written": None if self._written is None else self._written.clone(),
            "sink": dict(self.sink.state_dict()) if isinstance(self.sink, Stateful) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state; :meth:`on_resume` follows."""
        self._batch, self._written = None, state["written"]
        if isinstance(self.sink, Stateful) and state["sink"] is not None:
            self.sink.load_state_dict(state["sink"])

    def on_resume(self, ctx: HookContext) -> None:
        """Know the batch that a restart brought back as the one that was written."""
        if self._written is not None and ctx.batch is not None:
            self._batch, self._written = ctx.batch, self._written.to(ctx.batch.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        batch, written = self._batch, self._written
        self._batch = self._written = None
        try:
            if kind is None and batch is not None and written is not None:
                moved = (_identity(batch) != written).any(dim=1)
                if bool(moved.any()):
                    self.sink.write(batch, moved)
        finally:
            self.sink.close()


def _identity(batch: Batch) -> Tensor:
    """Who each structure is and how many steps it has made, ``[B, 2]``: equal as long as it does not move."""
    return torch.cat((batch.system_id, batch.system_step), dim=1)
