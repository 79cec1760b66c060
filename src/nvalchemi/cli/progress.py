"""What long work shows while it goes on."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_REDRAW_SECONDS = 0.2
_Item = TypeVar("_Item")


class ProgressBar:
    """A progress bar on standard error, if that is a terminal; nothing at all in a pipe.

    Parameters
    ----------
    total : int or None
        How much there is to do, where that is known.
    unit : str
        What is counted.
    quiet : bool
        Show nothing in a terminal either.
    """

    def __init__(self, total: int | None, unit: str, *, quiet: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.fields[heading]}"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
            # What is printed meanwhile appears above the bar, unless it goes elsewhere.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("", total=total, heading=unit)
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    @property
    def is_due(self) -> bool:
        """Whether the bar is shown, and was not redrawn a moment ago."""
        return not self._progress.disable and time.monotonic() - self._drawn > _REDRAW_SECONDS

    def show(self, completed: int, **words: str) -> None:
        """Redraw; ``description`` stands behind the bar, ``heading`` before it."""
        self._drawn = time.monotonic()
        self._progress.update(self._task, completed=completed, **words)  # pyright: ignore[reportArgumentType]

    def advance_to(self, completed: int, total: int | None = None) -> None:
        """Redraw if that is due."""
        if self.is_due:
            self._progress.update(self._task, total=total)
            self.show(completed)

    def count(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items, counted as they are taken."""
        for number, item in enumerate(items):
            self.advance_to(number)
            yield item


class ProgressHook:
    """Redraw a bar as a run or a training goes on.

    Parameters
    ----------
    bar : ProgressBar
        The bar; shown as long as hooks are open.
    stage : Enum
        Where a step is over.
    show : callable
        Redraws the bar for a context. Called a few times a second at most, so it may look into the batch.
    """

    frequency = 1

    def __init__(self, bar: ProgressBar, stage: Enum, show: Callable[[ProgressBar, Any], None]) -> None:
        self.stage: Enum | None = stage
        self._bar, self._show = bar, show

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __call__(self, ctx: Any, stage: Enum) -> None:
        """Redraw the bar, unless that was done a moment ago."""
        if self._bar.is_due:
            self._show(self._bar, ctx)

    def __exit__(self, *exc: object) -> None:
        self._bar.__exit__(*exc)
