"""Small hooks that an orchestrator registers beside itself: events at any step, and a clock."""

from enum import Enum
from typing import Any, Protocol, runtime_checkable

from nvalchemi.hooks.context import HookContext
from nvalchemi.hooks.timing import StageTimingHook

_EVENTS = frozenset(
    {"ON_ADMISSION", "BEFORE_STEP", "ON_CONVERGE", "ON_GRADUATE", "BEFORE_TRAINING", "AFTER_VALIDATION"}
)

_TIMED_EVERY = 16
"""Steps between two that are timed, so that the clock costs nothing that could be seen."""


@runtime_checkable
class EventListener(Protocol):
    """Who wants to know of events."""

    @property
    def awaits_first_values(self) -> bool:
        """Whether structures have entered whose first values are to be read."""
        ...

    def note_event(self, ctx: HookContext, stage: Enum) -> None:
        """Called at each."""
        ...


class RunWatch:
    """Tells an orchestrator, whose frequency may be any, what happens between its reports.

    Structures enter, converge and leave at any step, and a validation ends at any. ``BEFORE_STEP`` is where the first
    values of structures that entered can be read.
    """

    frequency = 1

    def __init__(self, listener: EventListener) -> None:
        self.stage: Enum | None = None
        self._listener = listener
        self._before_step: Enum | None = None

    def _runs_on_stage(self, stage: Enum) -> bool:
        if stage.name == "BEFORE_STEP":
            self._before_step = stage
        return stage.name in _EVENTS

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Pass it on, but not that another step begins."""
        if stage is self._before_step and not self._listener.awaits_first_values:
            return
        self._listener.note_event(ctx, stage)


class StageClock:
    """Times the stages of every 16th step, of every batch in training, and adds up the time spent in hooks.

    Its measurements are no state of the run: unlike :class:`~nvalchemi.hooks.StageTimingHook` it is not saved.
    """

    def __init__(self) -> None:
        self.frequency = _TIMED_EVERY
        self.stage: Enum | None = None
        self._timing = StageTimingHook("all", enable_nvtx=False)
        self._hooks: list[dict[str, float]] = []

    def measure(self, workflow: Any) -> None:
        """Have a workflow add up the time in its hooks."""
        if workflow._hook_seconds is None:
            workflow._hook_seconds = {}
        if not any(seconds is workflow._hook_seconds for seconds in self._hooks):
            self._hooks.append(workflow._hook_seconds)

    def on_register(self, workflow: Any) -> None:
        """Time every batch of training: its step count changes within one."""
        if any(stage.name == "BEFORE_BATCH" for stage in workflow._all_stages()):
            self.frequency = 1

    def _runs_on_stage(self, stage: Enum) -> bool:
        return self._timing._runs_on_stage(stage)

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Note the time."""
        self._timing(ctx, stage)

    def stage_times(self) -> dict[str, float]:
        """Seconds from one stage to the next, of the steps that were timed: their mean per step."""
        rows = self._timing.summary()
        steps = rows.pop("step", {"n": 0})["n"]
        return {name: row["total"] / steps for name, row in rows.items() if row["n"] and steps}

    def hook_times(self) -> dict[str, float]:
        """Seconds spent in each kind of hook so far, on the host."""
        total: dict[str, float] = {}
        for seconds in self._hooks:
            for name, value in seconds.items():
                total[name] = total.get(name, 0.0) + value
        return total
