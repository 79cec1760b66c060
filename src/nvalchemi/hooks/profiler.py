"""Traces of the PyTorch profiler."""

import os
import pkgutil
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from nvalchemi.hooks.context import HookContext
from nvalchemi.hooks.steps import step_bounds


class TorchProfilerHook:
    """Profile a run with :class:`torch.profiler.profile` and write Chrome traces.

    Profiling begins with the run (or, in an engine that opens no hooks, with the first step it sees), moves
    on at the end of each step or batch, and ends with the run, also when that fails: the trace up to the
    error is written. The traces are ``output_dir/rank_<r>/<name>_<k>.pt.trace.json``, k counting up over
    those already there; open them in Perfetto or ``chrome://tracing``.

    Parameters
    ----------
    output_dir : str or Path
        Folder of the traces; made when the first is written.
    activities : sequence of ProfilerActivity or str, optional
        ``"cpu"``, ``"cuda"``, …; default all that this PyTorch supports.
    schedule : callable, optional
        From :func:`torch.profiler.schedule`; one trace for each of its cycles. Default: the whole run in
        one trace, which for more than some hundred steps becomes large.
    record_shapes, profile_memory, with_flops : bool, default True
        As for the profiler: shapes of inputs, memory, floating point operations.
    with_stack : bool, default False
        Source lines; slow.
    on_trace_ready_path : str, optional
        Import path (``"package.module:function"``) of a function that is called with the profiler after each
        trace is written.
    frequency : int, default 1
        One step of the schedule is so many steps of the engine.
    name : str, default "torch"
        First part of the file names.
    rank_subdirs : bool, default True
        A folder for each rank; otherwise the rank is part of the file names.

    Raises
    ------
    ValueError
        An activity or a function that does not exist.

    Examples
    --------
    >>> from torch.profiler import schedule
    >>> hook = TorchProfilerHook("traces", schedule=schedule(wait=5, warmup=1, active=3, repeat=1))
    >>> hook.frequency
    1
    """

    def __init__(
        self,
        output_dir: str | Path,
        activities: Sequence[ProfilerActivity | str] | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = True,
        with_flops: bool = True,
        with_stack: bool = False,
        on_trace_ready_path: str | None = None,
        frequency: int = 1,
        name: str = "torch",
        rank_subdirs: bool = True,
    ) -> None:
        self.output_dir = Path(output_dir)
        self.frequency = frequency
        self.stage: Enum | None = None
        self.name = name
        self.rank_subdirs = rank_subdirs
        self._options: dict[str, Any] = {
            "activities": None if activities is None else [_activity(a) for a in activities],
            "schedule": schedule,
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_flops": with_flops,
            "with_stack": with_stack,
        }
        self._on_trace_ready = None if on_trace_ready_path is None else _function(on_trace_ready_path)
        self._profiler: profile | None = None
        self._rank = 0

    def _runs_on_stage(self, stage: Enum) -> bool:
        return stage in step_bounds(type(stage))

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Begin at the first stage of a step if that is still to be done; move on at the last."""
        self._rank = ctx.global_rank
        if self._profiler is None:
            self._start()
        elif stage is step_bounds(type(stage))[1]:
            with warnings.catch_warnings():
                # Each cycle is written when it ends: nothing is lost when the next one clears the events.
                warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
                self._profiler.step()

    def __enter__(self) -> Self:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank = torch.distributed.get_rank()
        if self._profiler is None:
            self._start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End profiling and write what was recorded; a further run begins anew."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def _start(self) -> None:
        self._profiler = profile(on_trace_ready=self._write, **self._options)
        self._profiler.start()

    def _write(self, profiler: profile) -> None:
        folder = self.output_dir / f"rank_{self._rank}" if self.rank_subdirs else self.output_dir
        folder.mkdir(parents=True, exist_ok=True)
        stem = self.name if self.rank_subdirs else f"{self.name}_rank{self._rank}"
        count = 0
        while (path := folder / f"{stem}_{count}.pt.trace.json").exists():
            count += 1
        unfinished = path.with_suffix(".tmp")
        profiler.export_chrome_trace(str(unfinished))
        os.replace(unfinished, path)
        if self._on_trace_ready is not None:
            self._on_trace_ready(profiler)


def _activity(activity: ProfilerActivity | str) -> ProfilerActivity:
    if isinstance(activity, ProfilerActivity):
        return activity
    known = ProfilerActivity.__members__
    if activity.upper() not in known:
        raise ValueError(f"unknown profiler activity {activity!r}; there are {', '.join(known)}")
    return known[activity.upper()]


def _function(path: str) -> Callable[[profile], object]:
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"on_trace_ready_path {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"on_trace_ready_path {path!r} is a {type(function).__name__}, no function")
    return function
