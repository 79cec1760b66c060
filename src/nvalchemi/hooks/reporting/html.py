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
from nvalchemi.hooks.reporting.page import render, write_atomically
from nvalchemi.hooks.reporting.recording import Recording
from nvalchemi.hooks.reporting.settings import describe_environment
from nvalchemi.hooks.reporting.snapshot import ScalarSnapshot
from nvalchemi.hooks.reporting.watch import StageClock

_LARGEST_SHARE = 0.01
"""Part of the time that writing the page may take."""


class HTMLReporter:
    """Write a page with curves, a table of all structures, settings and times; for simulations and training alike.

    The page is one file of some hundred kilobytes that loads nothing from anywhere. It is written while the run
    goes on, and once more at the end, also when that is an error or Ctrl-C; under another name first and then
    renamed, so that whoever opens it finds it whole. Curves keep at most 2,000 points, parity plots a random sample
    of 2,000.

    Parameters
    ----------
    path : str or Path
        The file; missing folders are made. An existing one is replaced.
    title : str, optional
        Default: the name of the engine.
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
        self._next_write = 0.0

    def take_clock(self, clock: StageClock) -> None:
        """Show its times."""
        self._clock = clock

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._next_write = 0.0
        return self

    def report(self, ctx: HookContext, stage: Enum, state: ScalarSnapshot) -> None:
        """Take up the numbers, and write the page if that is due."""
        self.report_event(ctx, stage, state)
        if time.monotonic() >= self._next_write:
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
        """Write the page as it stays."""
        if error is None:
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
        seconds = time.monotonic() - began
        self._next_write = began + max(self.every_seconds, seconds / _LARGEST_SHARE)

    def _content(self, state: str, error: str) -> dict[str, Any]:
        workflow, latest = self._workflow, self._state
        elapsed = self._elapsed_before + time.monotonic() - self._started
        progress = workflow.progress() if isinstance(workflow, ProgressingWorkflow) else None
        if latest is not None and state == "running":
            progress = latest.progress  # with the step that is being made
        if state == "finished" and progress is not None and progress.note:
            state = f"ended: {progress.note}"
        eta = None
        if latest is not None and state == "running":
            eta = next((value for name, value in latest.items() if name.endswith("/eta_s")), None)
        targets = workflow.targets() if isinstance(workflow, ObservableWorkflow) else {}
        return {
            "title": self.title or (type(workflow).__name__ if workflow is not None else "Report"),
            "status": {
                "state": state,
                "error": error,
                "written": content.timestamp(),
                "elapsed_s": elapsed,
                "eta_s": eta,
                "progress": None if progress is None else progress._asdict(),
            },
            "tiles": [] if latest is None else content.tiles(latest, targets),
            "charts": content.charts(self._recording, targets),
            "parity": content.parity_plots(self._recording.parity),
            "structures": None if latest is None else content.structure_table(latest.structures),
            "timing": content.timing(self._clock, elapsed),
            "settings": content.settings(workflow, self._model),
            "environment": list(describe_environment(self._device).items()),
        }
