"""A live view of a run in the terminal."""

import math
import sys
import time
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from nvalchemi.hooks.context import HookContext
from nvalchemi.hooks.reporting.rates import Throttle
from nvalchemi.hooks.reporting.snapshot import UNITS, ScalarSnapshot

if TYPE_CHECKING:
    from rich.console import RenderableType

_LIVE_SECONDS = 0.2
_FIRST = ("energy_per_atom", "fmax", "temperature", "pressure", "volume", "conserved_energy", "loss/total")

_NOT_SHOWN = ("/eta_s", "energy", "/epoch", "/unweighted", "active")


@runtime_checkable
class Stream(Protocol):
    """Where text can be written."""

    def write(self, text: str, /) -> object:
        """Write it."""
        ...

    def flush(self) -> object:
        """Let it be seen."""
        ...


class RichReporter:
    """A dashboard that stays in its place: progress, time left, the numbers; lines where there is no terminal.

    Parameters
    ----------
    file : text stream, default standard error
        Where to write.
    every_seconds : float, default 10
        Time between two lines where ``file`` is no terminal. The first and the last report are always written.

    Raises
    ------
    ImportError
        When opened, if rich is not installed: the extra ``[cli]``.
    """

    samples = True

    def __init__(self, file: Stream | None = None, every_seconds: float = 10.0) -> None:
        self._file: Any = file
        self._every = every_seconds
        self._live: Any = None
        self._throttle = Throttle(every_seconds)
        self._latest: tuple[str, ScalarSnapshot] | None = None
        self._started = 0.0

    def __enter__(self) -> Self:
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError as error:
            raise ImportError("RichReporter needs the extra [cli]: pip install 'nvalchemi[cli]'") from error
        console = Console(file=sys.stderr if self._file is None else self._file)
        self._started = time.monotonic()
        self._throttle = Throttle(_LIVE_SECONDS if console.is_terminal else self._every)
        if console.is_terminal:
            # No thread redraws it: that would take time from the run.
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        return self

    def report(self, ctx: HookContext, stage: Enum, state: ScalarSnapshot) -> None:
        """Take up the numbers."""
        title = type(ctx.workflow).__name__ if ctx.workflow is not None else stage.name
        if stage.name == "AFTER_VALIDATION" and self._latest is not None:
            state = replace(state, scalars={**self._latest[1].scalars, **state.scalars})
        self._latest = (title, state)

    def refresh(self) -> None:
        """Redraw, or write a line, unless that was done a moment ago."""
        if self._throttle.is_due:
            self._show()

    def report_event(self, ctx: HookContext, stage: Enum, state: ScalarSnapshot) -> None:
        """The same."""
        self.report(ctx, stage, state)

    def _show(self) -> None:
        if self._latest is None:
            return
        now = time.monotonic()
        title, state = self._latest
        if self._live is not None:
            self._live.update(_dashboard(title, state, now - self._started), refresh=True)
        else:
            stream = sys.stderr if self._file is None else self._file
            stream.write(_line(title, state) + "\n")
            stream.flush()
        self._throttle.drawn(now)

    def __exit__(self, *exc: object) -> None:
        self._show()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


def _line(title: str, state: ScalarSnapshot) -> str:
    parts = [f"{title} {_position(state)}"]
    parts += [f"{name} {value}{unit and ' ' + unit}" for name, value, unit in _numbers(state)]
    eta = _eta(state)
    if eta is not None:
        parts.append(f"left {format_seconds(eta)}")
    return ", ".join(parts)


def _dashboard(title: str, state: ScalarSnapshot, elapsed: float) -> "RenderableType":
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2), expand=True)
    for _ in range(4):
        head.add_column(no_wrap=True)
    head.columns[1].ratio = 1
    progress, eta = state.progress, _eta(state)
    bar: RenderableType = Text("")
    if progress is not None and progress.total:
        bar = ProgressBar(progress.total, min(progress.done, progress.total))
    left = "" if eta is None else f"left {format_seconds(eta)}"
    head.add_row(_position(state), bar, f"{format_seconds(elapsed)} run", left)
    numbers = Table.grid(padding=(0, 2))
    cells = [
        cell
        for name, value, unit in _numbers(state)
        for cell in (Text(name, "dim"), Text(value, "bold"), Text(unit, "dim"))
    ]
    for k in range(6):
        numbers.add_column(justify="right" if k % 3 == 1 else "left", no_wrap=True)
    for start in range(0, len(cells), 6):
        numbers.add_row(*cells[start : start + 6])
    return Panel(Group(head, Text(""), numbers), title=title, title_align="left")


def _position(state: ScalarSnapshot) -> str:
    progress = state.progress
    if progress is None:
        return f"step {state.step}"
    of = "" if progress.total is None else f" of {progress.total}"
    return f"{progress.unit} {progress.done}{of}"


def _numbers(state: ScalarSnapshot) -> list[tuple[str, str, str]]:
    """Name, value and unit of what is shown, the usual first; without times, which are shown elsewhere."""
    names = [name for name in _FIRST if name in state]
    names += [name for name in state if name not in names and not name.endswith(_NOT_SHOWN)]
    return [(_words(name), format_number(state[name]), UNITS.get(name, "")) for name in names]


def _words(name: str) -> str:
    """``dynamics/atom_steps_per_s`` as a person would write it."""
    short = name.removeprefix("dynamics/").removeprefix("training/")
    return short.replace("_per_s", "/s").replace("_", " ")


def _eta(state: ScalarSnapshot) -> float | None:
    return next((value for name, value in state.items() if name.endswith("/eta_s")), None)


def format_number(value: float) -> str:
    """A number in few characters.

    >>> [format_number(x) for x in (3.0, 0.00012345, -3.5012345, 1234567.8, float("nan"))]
    ['3', '0.0001234', '-3.501', '1.235e+06', 'nan']
    """
    return f"{value:.4g}"


def format_seconds(seconds: float) -> str:
    """A time as people read it.

    >>> [format_seconds(s) for s in (0.4, 75, 4000, 200000)]
    ['0 s', '1 min 15 s', '1 h 06 min', '2 d 07 h']
    """
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
