"""Snapshots of a run."""

from collections.abc import Mapping, Sequence
from copy import copy
from enum import Enum
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi.data import FIELDS, Batch
from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.dynamics.sinks import SnapshotSink, without_working_state
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.state import Stateful
from nvalchemi.hooks import HookContext

ALWAYS_KEPT = ("positions", "atomic_numbers", "cell", "pbc", "system_id", "system_step")
"""What every frame has: where which atoms are, whose frame it is and when."""


class SnapshotHook:
    """Write the structures that are still being advanced to a sink, every so many steps.

    A structure that is done before the next snapshot is due is written then, and those still under way once more
    when the run ends: a trajectory ends with the state that a structure was left in, whether it converged between
    two snapshots, gave its place to another or ran out of steps. Of one that failed it ends with the last snapshot.

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
    fields : sequence of str, optional
        Fields to write, known or custom ones, beside those in :data:`ALWAYS_KEPT`; ``[]`` makes a trajectory of
        positions. Without ``atomic_masses`` readers take the standard ones. Default: all that are not working state
        of engines and neighbour lists.

    Raises
    ------
    ValueError
        A field that is working state; at the first snapshot, one that the batch does not have.

    Examples
    --------
    >>> from nvalchemi.dynamics.sinks import HostMemory
    >>> hook = SnapshotHook(HostMemory(), frequency=10, fields=["energy", "velocities"])
    """

    order_role = "record"

    def __init__(
        self,
        sink: SnapshotSink,
        frequency: int = 1,
        stage: Enum | None = None,
        *,
        fields: Sequence[str] | None = None,
    ) -> None:
        if isinstance(fields, str):
            raise TypeError(f"fields is a sequence of names, not one name: fields=[{fields!r}]")
        for name in fields or ():
            if name in FIELDS and not FIELDS[name].persistent and FIELDS[name].level != "edge":
                raise ValueError(f"field {name!r} is working state, which sinks do not keep")
        self.sink = sink
        self.frequency = frequency
        self.stage: Enum | None = DynamicsStage.AFTER_STEP if stage is None else stage
        self.fields = None if fields is None else tuple(fields)
        self._engine: Any = None
        # Step of the last frame of each structure, by system_id.
        self._written: dict[int, int] = {}

    def on_register(self, workflow: Any) -> None:
        """Have the engine tell of structures that are done between two snapshots."""
        if self.frequency > 1:
            workflow.register_hook(LastSnapshotHook(self))

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Write the active structures of ``ctx.batch``."""
        ctx, batch = dynamics_context(self, ctx)
        self._engine = ctx.workflow
        active = ctx.active_graph_mask
        self.sink.write(self._chosen(batch), active)
        before, steps = self._written, _steps(batch)
        running: list[bool] = [True] * batch.num_graphs if active is None else active.tolist()
        self._written = {
            who: step if runs else before.get(who, -1)
            for (who, step), runs in zip(steps.items(), running, strict=True)
        }

    def write_rest(self, batch: Batch, marked: Tensor) -> None:
        """Write the structures marked (bool ``[B]``) whose present state is not in the sink."""
        steps = _steps(batch)
        fresh = torch.tensor([self._written.get(who) != step for who, step in steps.items()])
        late = marked & fresh.to(marked.device)
        if bool(late.any()):
            self.sink.write(self._chosen(batch), late)
            self._written.update(
                item for item, wanted in zip(steps.items(), late.tolist(), strict=True) if wanted
            )

    def _chosen(self, batch: Batch) -> Batch:
        """What is to be written of the batch; the tensors are its own."""
        if self.fields is None:
            return without_working_state(batch)
        absent = [name for name in self.fields if name not in batch]
        if absent:
            raise ValueError(
                f"SnapshotHook is to write {', '.join(absent)}, which the batch lacks; it has {', '.join(batch.keys())}"
            )
        chosen = copy(batch)
        for name in batch.keys():
            if name not in ALWAYS_KEPT and name not in self.fields:
                chosen.remove_key(name)
        return chosen

    # ------------------------------------------------------------------ restarts
    def state_dict(self) -> dict[str, Any]:
        """Which state of each structure was written last, and the state of the sink if it has one."""
        return {
            "written": [list(item) for item in self._written.items()],
            "sink": dict(self.sink.state_dict()) if isinstance(self.sink, Stateful) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state; :meth:`on_resume` follows."""
        self._written = dict(state["written"])
        if isinstance(self.sink, Stateful) and state["sink"] is not None:
            self.sink.load_state_dict(state["sink"])

    def on_resume(self, ctx: HookContext) -> None:
        """Know the engine that goes on."""
        self._engine = ctx.workflow

    # ------------------------------------------------------------------ the end of a run
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        engine, self._engine = self._engine, None
        try:
            if kind is None and engine is not None:
                batch = (engine._whole or engine)._batch
                if batch is not None and batch.num_graphs > 0:
                    self.write_rest(batch, engine._running)
        finally:
            self._written = {}
            self.sink.close()


class LastSnapshotHook:
    """Lets a snapshot hook write structures that are done at a step that it does not see.

    Parameters
    ----------
    snapshots : SnapshotHook
        The hook, which registers this one.
    """

    frequency = 1

    def __init__(self, snapshots: SnapshotHook) -> None:
        self.snapshots = snapshots
        self.stage: Enum | None = DynamicsStage.ON_GRADUATE

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Write the structures that are done; when the snapshot hook was removed, go too."""
        ctx, batch = dynamics_context(self, ctx)
        if not any(hook is self.snapshots for hook in ctx.workflow.hooks):
            ctx.workflow.remove_hook(self)
        elif ctx.graduated_mask is not None:
            self.snapshots.write_rest(batch, ctx.graduated_mask)


def _steps(batch: Batch) -> dict[int, int]:
    """Steps made by each structure, by ``system_id``: equal as long as it does not move."""
    return dict(zip(batch.system_id[:, 0].tolist(), batch.system_step[:, 0].tolist(), strict=True))
