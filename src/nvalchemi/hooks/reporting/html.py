"""A page about a run: one file, whole at any moment, readable without a network."""

import time
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.hooks.context import HookContext
from nvalchemi.hooks.protocols import ObservableWorkflow, ProgressingWorkflow
from nvalchemi.hooks.reporting import content
from nvalchemi.hooks.reporting.earlier import carried, read_earlier
from nvalchemi.hooks.reporting.page import render, write_atomically
from nvalchemi.hooks.reporting.rates import Throttle
from nvalchemi.hooks.reporting.recording import Recording
from nvalchemi.hooks.reporting.settings import describe_environment
from nvalchemi.hooks.reporting.snapshot import ScalarSnapshot
from nvalchemi.hooks.reporting.structures import StructureLog
from nvalchemi.hooks.reporting.watch import StageClock

_QUIET_SECONDS = 60.0
"""Time without a word after which a page asks whether the run was stopped, at least."""


class HTMLReporter:
    """Write a page with curves, a table of all structures, settings and times; for simulations and training alike.

    In a run that goes on after an interruption (``run(restart=…)``, a restored checkpoint), the page that is there
    goes on, too: it carries its curves and the state of each structure at the beginning.

    The page is one file of some hundred kilobytes that loads nothing from anywhere. It is written while the run
    goes on, and once more at the end, also when that is an error or Ctrl-C; under another name first and then
    renamed, so that whoever opens it finds it whole. Curves keep at most 1,000 points, parity plots a random sample
    of 2,000.

    Parameters
    ----------
    path : str or Path
        The file; missing folders are made. An existing one is replaced, unless it is of the run that goes on.
    title : str, optional
        Default: what is done, with which engine and model.
    every_seconds : float, default 5
        Time between two writes while the run goes on; longer where a write would take more than 1 % of the time.
    """

    samples = True

    def __init__(self, path: str | Path, title: str | None = None, every_seconds: float = 5.0) -> None:
        self.path = Path(path)
        self.title = title
        self.every_seconds = every_seconds
        self._recording = Recording()
        self._clock: StageClock | None = None
        self._workflow: Any = None
        self._model: Any = None
        self._device: torch.device | None = None
        self._state: ScalarSnapshot | None = None
        self._elapsed_before = 0.0
        self._started = time.monotonic()
        self._throttle = Throttle(every_seconds)
        self._remark = ""
        self._goes_on = False
        self._reported_at: float | None = None
        self._longest_wait = 0.0

    def take_clock(self, clock: StageClock) -> None:
        """Show its times."""
        self._clock = clock

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._throttle = Throttle(self.every_seconds)
        self._reported_at = None
        return self

    def report_resume(self, ctx: HookContext, step: int, structures: StructureLog) -> None:
        """Go on with the page that the run wrote before."""
        earlier = read_earlier(self.path, type(ctx.workflow).__name__)
        steps = {} if ctx.batch is None else _steps_made(ctx.batch)
        if earlier is None or not structures.recall(earlier.records, steps):
            self._remark = (
                f"Goes on after step {step:,}. No page of what was before was found: curves begin there."
            )
            return
        self._elapsed_before = earlier.elapsed
        self._recording.recall(earlier.curves, step, steps)
        self._remark = f"Interrupted, and went on after step {step:,}."
        self._goes_on = True

    def report(self, ctx: HookContext, stage: Enum, state: ScalarSnapshot) -> None:
        """Take up the numbers."""
        self.report_event(ctx, stage, state)
        now = time.monotonic()
        if self._reported_at is not None:
            self._longest_wait = max(self._longest_wait, now - self._reported_at)
        self._reported_at = now

    def refresh(self) -> None:
        """Write the page, if that is due."""
        if self._throttle.is_due:
            self._write("running")

    def report_event(self, ctx: HookContext, stage: Enum, state: ScalarSnapshot) -> None:
        """Take up the numbers."""
        self._recording.add(state)
        if stage.name == "AFTER_VALIDATION" and self._state is not None:
            state = replace(state, scalars={**self._state.scalars, **state.scalars})
        self._workflow, self._model, self._state = ctx.workflow, ctx.model, state
        self._device = None if ctx.batch is None else ctx.batch.device

    def report_validation_batch(self, batch: Batch, labelled: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Take up points for the parity plots."""
        self._recording.add_validation_batch(batch, labelled)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Write the page as it stays; that of an earlier run stays as it is where there was nothing left to do."""
        if self._state is None and self._goes_on:
            pass
        elif error is None:
            self._write("finished")
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self._write("interrupted")
        else:
            notes = "\n".join(getattr(error, "__notes__", []))
            self._write("failed", f"{type(error).__name__}: {error}\n{notes}".strip())
        self._elapsed_before += time.monotonic() - self._started
        self._workflow = self._model = None

    def _write(self, state: str, error: str = "") -> None:
        began = time.monotonic()
        write_atomically(self.path, render(self._content(state, error)))
        self._throttle.drawn(began)

    def _content(self, state: str, error: str) -> dict[str, Any]:
        workflow, latest = self._workflow, self._state
        elapsed = self._elapsed_before + time.monotonic() - self._started
        progress = workflow.progress() if isinstance(workflow, ProgressingWorkflow) else None
        if latest is not None and state == "running":
            progress = latest.progress  # with the step that is being made
        targets = workflow.targets() if isinstance(workflow, ObservableWorkflow) else {}
        all_well = True
        if state == "finished" and progress is not None and progress.note:
            state = f"ended: {progress.note}"
        elif state == "finished" and latest is not None:
            words = content.outcome(latest.structures, targets)
            state, all_well = state + words, not words
        eta = None
        if latest is not None and state == "running":
            eta = next((value for name, value in latest.items() if name.endswith("/eta_s")), None)
        longest = max(_QUIET_SECONDS, 3 * (self._throttle.interval + self._longest_wait))
        return {
            "title": self.title or content.title(workflow, self._model, latest),
            "status": {
                "state": state,
                "error": error,
                "written": content.timestamp(),
                "elapsed_s": elapsed,
                "eta_s": eta,
                "progress": None if progress is None else progress._asdict(),
                "warn": not all_well,
                "remark": self._remark,
                "written_unix": int(time.time()),
                "quiet_s": longest,
            },
            "tiles": [] if latest is None else content.tiles(latest, targets),
            "charts": content.charts(self._recording, targets),
            "parity_title": "Validation: prediction and reference",
            "parity": content.parity_plots(self._recording.parity),
            "structures": None if latest is None else content.structure_table(latest.structures),
            "timing": content.timing(self._clock, elapsed),
            "settings": content.settings(workflow, self._model),
            "environment": list(describe_environment(self._device).items()),
            "carried": carried(type(workflow).__name__, elapsed, self._recording, latest),
        }


def _steps_made(batch: Batch) -> dict[int, int]:
    if "system_step" not in batch or "system_id" not in batch:
        return {}
    return dict(zip(batch.system_id[:, 0].tolist(), batch.system_step[:, 0].tolist(), strict=True))
