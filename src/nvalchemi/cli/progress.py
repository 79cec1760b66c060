"""What a run shows while it goes on."""

import time
from collections.abc import Callable
from enum import Enum
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from nvalchemi.dynamics import DynamicsStage
from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.hooks import DynamicsContext, HookContext

_REDRAW_SECONDS = 0.2


class ProgressHook:
    """A progress bar on standard error, if that is a terminal; nothing at all in a pipe.

    Parameters
    ----------
    total : int
        Steps to come.
    describe : callable
        Words behind the bar. Called a few times a second at most, so it may look into the batch.
    quiet : bool
        Show nothing in a terminal either.
    """

    frequency = 1
    stage: Enum | None = DynamicsStage.AFTER_STEP

    def __init__(self, total: int, describe: Callable[[DynamicsContext], str], *, quiet: bool) -> None:
        console = Console(stderr=True)
        self._describe = describe
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Redraw the bar, unless that was done a moment ago."""
        ctx, _ = dynamics_context(self, ctx)
        now = time.monotonic()
        if not self._progress.disable and now - self._drawn > _REDRAW_SECONDS:
            self._drawn = now
            self._progress.update(self._task, completed=ctx.step_count + 1, description=self._describe(ctx))

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
