"""How fast a run goes, how long it will still take, and how much of that reports may take."""

import math
import time
from collections import deque

from nvalchemi.hooks.context import DynamicsContext, HookContext, TrainContext
from nvalchemi.hooks.protocols import Progress
from nvalchemi.hooks.reporting.snapshot import ScalarSnapshot

_FREE_SECONDS = 0.5
"""Time that collecting reports may take in any run: a short one is shown in full."""

_LARGEST_SHARE = 0.01
"""Part of the time of a run that collecting further reports may take, and as much again drawing them."""

_TRIED = 4
"""Reports made before a stride is judged."""

_WINDOW = 32
"""Reports over which rates are taken: a relaxation gets faster while structures converge."""


class Rates:
    """Rates between the oldest and the newest of the last reports."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int, float]] = deque(maxlen=_WINDOW)
        self._active_atoms = 0.0

    def restart(self) -> None:
        """Leave out the time until the next report: nothing ran."""
        self._seen.clear()

    def update(
        self, ctx: HookContext, snapshot: ScalarSnapshot, progress: Progress | None
    ) -> dict[str, float]:
        """Scalars ``<workflow>/steps_per_s``, ``/eta_s`` where the end is known, and what a step does per second.

        Those are ``dynamics/atom_steps_per_s`` (atoms of active structures) and ``training/structures_per_s``.
        """
        training = isinstance(ctx, TrainContext)
        kind = "training" if training else "dynamics" if isinstance(ctx, DynamicsContext) else "run"
        done = snapshot.step if progress is None else progress.done
        now = time.perf_counter()
        if self._seen and (snapshot.step < self._seen[-1][1] or done < self._seen[-1][2]):
            self._seen.clear()
        atom_steps = 0.0
        if self._seen:
            atom_steps = self._seen[-1][3] + self._active_atoms * (snapshot.step - self._seen[-1][1])
        if snapshot.graphs:
            self._active_atoms = float(snapshot.graphs["num_atoms"] @ snapshot.graphs["active"])
        self._seen.append((now, snapshot.step, done, atom_steps))
        then, first_step, first_done, first_atom_steps = self._seen[0]
        seconds = now - then
        if seconds <= 0 or snapshot.step == first_step:
            return {}
        steps_per_s = (snapshot.step - first_step) / seconds
        rates = {f"{kind}/steps_per_s": steps_per_s}
        if snapshot.graphs:
            rates[f"{kind}/atom_steps_per_s"] = (atom_steps - first_atom_steps) / seconds
        if training and ctx.batch is not None:
            rates[f"{kind}/structures_per_s"] = ctx.batch.num_graphs * steps_per_s
        if progress is not None and progress.total is not None and done > first_done:
            rates[f"{kind}/eta_s"] = (progress.total - done) * seconds / (done - first_done)
        return rates


class Budget:
    """Which of the reports that are due are made: every one, then every second, every fourth … as time gets short.

    It is for reporters that need not have every report, and counts what collecting and handing over takes.
    """

    def __init__(self) -> None:
        self._spent = 0.0
        self._opened = self._began = time.perf_counter()
        self._due, self._stride = 0, 1
        self._since = (0, 0.0, self._opened)

    def restart(self) -> None:
        """Begin a run; the stride stays, so that curves which go on are even."""
        self._spent, self._opened = 0.0, time.perf_counter()
        self._since = (0, 0.0, self._opened)

    def begin(self, *, needed: bool) -> bool:
        """Whether to make the report that is due; it is when ``needed``."""
        self._began = time.perf_counter()
        self._due += 1
        return needed or (self._due - 1) % self._stride == 0

    def end(self) -> None:
        """The report was made; make fewer if this many would take too long."""
        now = time.perf_counter()
        self._spent += now - self._began
        made, spent, then = self._since
        self._since = (made + 1, spent + now - self._began, then)
        over = self._spent > _FREE_SECONDS + _LARGEST_SHARE * (now - self._opened)
        # A few reports show what this stride costs: one may have been held up.
        if over and made + 1 >= _TRIED and self._since[1] > _LARGEST_SHARE * (now - then):
            self._stride *= 2
            self._since = (0, 0.0, now)


class Throttle:
    """Whether it is time to draw anew: every so many seconds, or less often where drawing takes long."""

    def __init__(self, every_seconds: float) -> None:
        self._every = every_seconds
        self._next = -math.inf
        self._first = True
        self.interval = every_seconds
        """Seconds until the next drawing, as decided after the last."""

    @property
    def is_due(self) -> bool:
        """Whether to draw now."""
        return time.monotonic() >= self._next

    def drawn(self, began: float) -> None:
        """It was drawn, from the time ``began`` (:func:`time.monotonic`) until now."""
        # The first loads and compiles what later ones find ready: it says nothing of those.
        taken = 0.0 if self._first else time.monotonic() - began
        self._first = False
        self.interval = max(self._every, taken / _LARGEST_SHARE)
        self._next = began + self.interval
