"""How long the parts of a step take."""

import csv
import math
import os
import sys
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch

from nvalchemi.hooks.context import HookContext
from nvalchemi.hooks.steps import step_bounds

_Interval = tuple[Enum, Enum]
_Key = _Interval | Literal["step"]

_MAX_PENDING = 4096
"""Intervals whose CUDA events may be unread: bounds their memory, and makes waiting for the device rare."""

_COLUMNS = ("n", "total", "mean", "min", "max", "std", "warmup")


class StageTimingHook:
    """Measure the time between consecutive stages of a step, in any workflow.

    The interval ``A -> B`` runs from this hook's turn at stage A to its turn at stage B: it holds the hooks
    of A registered after this one, what the engine does between, and the hooks of B registered before it.
    Registered first of all, it counts the hooks of a stage to the interval that the stage begins. ``step`` is
    the time from the first to the last stage of a step.

    The first step that is measured (compilation, first neighbour list, caches) is kept out of the statistics
    and reported as ``warmup``.

    Parameters
    ----------
    profiled_stages : {"all", "step", "detailed"} or set of Enum, default "all"
        ``"step"``: the whole step. ``"detailed"``: every interval. ``"all"``: both. A set: the intervals
        between those stages, two at least.
    frequency : int, default 1
        Measure every so many steps.
    enable_nvtx : bool, default True
        With CUDA, also mark each interval as an NVTX range for Nsight, named after its first stage.
    timer_backend : {"auto", "cuda_event", "perf_counter"}, default "auto"
        ``"cuda_event"``: times on the device, read later, so that the run does not wait for it.
        ``"perf_counter"``: times on the host. ``"auto"``: events for a batch on a CUDA device.
    log_path : str or Path, optional
        CSV file with the summary, written by :meth:`close`, which the end of a run calls.
    show_console : bool, default False
        Write a line to standard output after measured steps.
    console_frequency : int, default 1
        After every so many of them.
    stage : Enum, optional
        Where a step begins. Default: ``BEFORE_STEP``, ``BEFORE_BATCH``, or the first stage of an engine with
        stages of its own; with a set, the first of the set.

    Raises
    ------
    ValueError
        An unknown name, fewer than two stages, stages of two types, a ``console_frequency`` below 1, or CUDA
        events without CUDA.

    Notes
    -----
    Stages whose name begins with ``DO_`` are left out unless a set names them: in training a hook that is
    called there replaces a part of the loop. In training the step number changes within a batch, so that a
    frequency other than 1 sees a batch only up to its optimizer step.

    Examples
    --------
    >>> timing = StageTimingHook("step", frequency=10)
    >>> timing.summary()
    {}
    """

    def __init__(
        self,
        profiled_stages: Literal["all", "step", "detailed"] | Collection[Enum] = "all",
        *,
        frequency: int = 1,
        enable_nvtx: bool = True,
        timer_backend: Literal["auto", "cuda_event", "perf_counter"] = "auto",
        log_path: str | Path | None = None,
        show_console: bool = False,
        console_frequency: int = 1,
        stage: Enum | None = None,
    ) -> None:
        if timer_backend not in ("auto", "cuda_event", "perf_counter"):
            raise ValueError(
                f"timer_backend must be 'auto', 'cuda_event' or 'perf_counter', got {timer_backend!r}"
            )
        if timer_backend == "cuda_event" and not torch.cuda.is_available():
            raise ValueError("timer_backend='cuda_event' needs CUDA, which is not available")
        if console_frequency < 1:
            raise ValueError(f"console_frequency must be ≥ 1, got {console_frequency}")
        self.profiled_stages = _checked_stages(profiled_stages)
        self.frequency = frequency
        self.stage = stage
        self.timer_backend = timer_backend
        self.log_path = None if log_path is None else Path(log_path)
        self.show_console = show_console
        self.console_frequency = console_frequency
        self._use_nvtx = enable_nvtx and torch.cuda.is_available()
        self._in_range = False
        self._open: _OpenStep | None = None
        self._roles: dict[Enum, tuple[bool, bool, bool]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all measurements; the next step is a first step again."""
        self._abandon()
        self._steps = 0
        self._statistics: dict[_Key, _Statistics] = {}
        self._pending: list[tuple[_Key, bool, _Clock, Any, Any]] = []
        self._restored: dict[str, _Statistics] = {}

    # ------------------------------------------------------------------ measuring
    def _runs_on_stage(self, stage: Enum) -> bool:
        chosen = self.profiled_stages
        if isinstance(chosen, frozenset):
            return stage in chosen
        if chosen == "step":
            return stage in self._bounds(stage)
        return not stage.name.startswith("DO_")

    def _bounds(self, stage: Enum) -> tuple[Enum, Enum]:
        """First and last stage of the step that ``stage`` belongs to."""
        chosen = self.profiled_stages
        if isinstance(chosen, frozenset):
            ordered = [member for member in type(stage) if member in chosen]
            first, last = ordered[0], ordered[-1]
        else:
            first, last = step_bounds(type(stage))
        return (first if self.stage is None else self.stage), last

    def _role(self, stage: Enum) -> tuple[bool, bool, bool]:
        """Whether a stage is the first of a step, the last, and ahead of the first."""
        first, last = self._bounds(stage)
        order = list(type(stage))
        return stage is first, stage is last, order.index(stage) < order.index(first)

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Note the time."""
        role = self._roles.get(stage)
        if role is None:
            role = self._roles[stage] = self._role(stage)
        is_first, is_last, is_ahead = role
        number = 0 if ctx.workflow is None else ctx.workflow.step_count
        if is_first:
            self._abandon()
            clock = self._clock(ctx)
            self._open = _OpenStep(clock, stage, number, clock.mark())
        elif self._open is not None:
            step = self._open
            # A stage ahead of the first one belongs to no step (the admission of the next batch); and
            # frequency > 1 leaves out steps, whose time is nobody's.
            if is_ahead or number - step.number > 1:
                self._abandon()
                return
            step.number = number
            now = step.clock.mark()
            if self.profiled_stages != "step":
                self._add((step.stage, stage), step, step.now, now)
            step.stage, step.now = stage, now
            if is_last:
                if self.profiled_stages in ("all", "step"):
                    self._add("step", step, step.start, now)
                self._steps += 1
                if self.show_console and self._steps % self.console_frequency == 0:
                    sys.stdout.write(self._line() + "\n")
        else:
            return
        if self._use_nvtx:
            self._mark_range(stage, ends=is_last)

    def _clock(self, ctx: HookContext) -> "_Clock":
        on_device = ctx.batch is not None and ctx.batch.device.type == "cuda"
        if self.timer_backend == "cuda_event" or (self.timer_backend == "auto" and on_device):
            return _CudaClock()
        return _HostClock()

    def _add(self, key: _Key, step: "_OpenStep", start: Any, end: Any) -> None:
        if step.clock.deferred:
            self._pending.append((key, self._steps == 0, step.clock, start, end))
            if len(self._pending) >= _MAX_PENDING:
                self._read_pending()
        else:
            self._record(key, self._steps == 0, step.clock.seconds(start, end))

    def _record(self, key: _Key, is_first_step: bool, seconds: float) -> None:
        statistics = self._statistics.get(key)
        if statistics is None:
            statistics = self._statistics[key] = self._restored.pop(_label(key), None) or _Statistics()
        if is_first_step and math.isnan(statistics.warmup):
            statistics.warmup = seconds
        else:
            statistics.add(seconds)

    def _read_pending(self) -> None:
        pending, self._pending = self._pending, []
        for key, is_first_step, clock, start, end in pending:
            self._record(key, is_first_step, clock.seconds(start, end))

    def _mark_range(self, stage: Enum, *, ends: bool) -> None:
        """NVTX: from this stage to the next one."""
        if self._in_range:
            torch.cuda.nvtx.range_pop()
        self._in_range = not ends
        if self._in_range:
            torch.cuda.nvtx.range_push(stage.name)

    def _abandon(self) -> None:
        self._open = None
        if self._in_range:
            self._in_range = False
            torch.cuda.nvtx.range_pop()

    # ------------------------------------------------------------------ results
    def summary(self) -> dict[str, dict[str, float]]:
        """Statistics of each interval, in seconds.

        Returns
        -------
        dict of str to dict
            ``"A -> B"`` or ``"step"`` → ``n, total, mean, min, max, std`` (of the n measurements after the
            first step; NaN where there is none) and ``warmup``, the time in the first step (NaN for an
            interval that it did not have).
        """
        self._read_pending()
        return {label: statistics.row() for label, statistics in self._by_label().items()}

    def _by_label(self) -> "dict[str, _Statistics]":
        return self._restored | {_label(key): statistics for key, statistics in self._statistics.items()}

    def _line(self) -> str:
        rows = self.summary()
        parts = [f"{name} {row['mean' if row['n'] else 'warmup'] * 1e3:.3f} ms" for name, row in rows.items()]
        return f"mean times after {self._steps} steps: {', '.join(parts)}"

    def state_dict(self) -> dict[str, Any]:
        """Measurements so far."""
        self._read_pending()
        return {"statistics": {label: statistics.state() for label, statistics in self._by_label().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on measuring; the next step is the first of its process and counts as ``warmup`` again."""
        self.reset()
        self._restored = {label: _Statistics(**numbers) for label, numbers in state["statistics"].items()}

    def __enter__(self) -> Self:
        self._abandon()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop a step that is not complete and write the summary to ``log_path``; more may be measured later."""
        self._abandon()
        if self.log_path is None:
            return
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.log_path.with_name(self.log_path.name + ".tmp")
        with unfinished.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("stage", *_COLUMNS))
            writer.writerows((name, *row.values()) for name, row in self.summary().items())
        os.replace(unfinished, self.log_path)


@runtime_checkable
class _Clock(Protocol):
    deferred: bool
    """Whether reading an interval may have to wait."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class _HostClock:
    deferred = False

    def mark(self) -> float:
        return perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _CudaClock:
    deferred = True

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


class _OpenStep:
    """A step being measured: its clock and beginning, the last stage, and when that was."""

    __slots__ = ("clock", "now", "number", "stage", "start")

    def __init__(self, clock: _Clock, stage: Enum, number: int, now: Any) -> None:
        self.clock, self.stage, self.number = clock, stage, number
        self.start = self.now = now


class _Statistics:
    """Running mean and variance (Welford 1962)."""

    def __init__(
        self,
        n: int = 0,
        total: float = 0.0,
        mean: float = 0.0,
        squares: float = 0.0,
        min: float = math.inf,
        max: float = -math.inf,
    ) -> None:
        self.n, self.total, self.mean, self.squares = n, total, mean, squares
        self.min, self.max = min, max
        self.warmup = math.nan

    def state(self) -> dict[str, float]:
        """All but the warm-up, which is that of a process."""
        return {name: value for name, value in vars(self).items() if name != "warmup"}

    def add(self, seconds: float) -> None:
        self.n += 1
        self.total += seconds
        difference = seconds - self.mean
        self.mean += difference / self.n
        self.squares += difference * (seconds - self.mean)
        self.min = min(self.min, seconds)
        self.max = max(self.max, seconds)

    def row(self) -> dict[str, float]:
        if self.n == 0:
            values: tuple[float, ...] = (0, 0.0, *(math.nan,) * 4)
        else:
            values = (self.n, self.total, self.mean, self.min, self.max, math.sqrt(self.squares / self.n))
        return dict(zip(_COLUMNS, (*values, self.warmup), strict=True))


def _checked_stages(
    stages: str | Collection[Enum],
) -> Literal["all", "step", "detailed"] | frozenset[Enum]:
    match stages:
        case "all" | "step" | "detailed":
            return stages
        case str():
            raise ValueError(
                f"profiled_stages must be 'all', 'step', 'detailed' or a set of stages, got {stages!r}"
            )
        case _:
            chosen = frozenset(stages)
    if len(chosen) < 2 or len({type(stage) for stage in chosen}) > 1:
        raise ValueError(
            "profiled_stages must hold two or more stages of one type, "
            f"got {sorted(str(stage) for stage in chosen)}"
        )
    return chosen


def _label(key: _Key) -> str:
    return key if isinstance(key, str) else f"{key[0].name} -> {key[1].name}"
