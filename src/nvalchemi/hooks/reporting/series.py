"""Curves and clouds of points of bounded size, however long a run is."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

_ENOUGH = 200
"""Points a curve keeps when its beginning is made as coarse as its end."""


class Curve:
    """Rows of numbers over steps, evenly spaced: every one at first, every second, every fourth … as they become many.

    Parameters
    ----------
    capacity : int, default 1000
        Rows kept at most, besides the last.
    """

    def __init__(self, capacity: int = 1000) -> None:
        self._capacity = capacity
        self._spacing = 0.0  # the least between two rows, once there were too many
        self._finest = math.inf  # that there is between two rows
        self._rows: list[tuple[float, Mapping[str, float]]] = []
        self._last: tuple[float, Mapping[str, float]] | None = None

    def add(self, x: float, values: Mapping[str, float]) -> None:
        """Add the values at ``x``; a second time at one ``x`` replaces the first."""
        last, row = self._last, (x, values)
        self._last = row
        if last is not None and last[0] == x:
            if self._rows[-1] is last:
                self._rows[-1] = row
            return
        if self._rows and x - self._rows[-1][0] < self._spacing:
            return
        self._rows.append(row)
        if last is None:
            return
        span, gap = x - self._rows[0][0], x - last[0]
        self._finest = min(self._finest, gap)
        if len(self._rows) > self._capacity:
            self._thin(2 * span / self._capacity)
        else:
            # Where reports have become rarer, the beginning is made no finer than what follows.
            wanted = min(gap, span / _ENOUGH)
            if wanted >= 2 * self._finest:
                self._thin(wanted)

    def _thin(self, spacing: float) -> None:
        self._spacing = self._finest = spacing
        rows, self._rows = self._rows, self._rows[:1]
        for row in rows[1:]:
            if row[0] - self._rows[-1][0] >= spacing:
                self._rows.append(row)

    def __len__(self) -> int:
        return len(self._kept())

    @property
    def last_x(self) -> float | None:
        """Where the last values are."""
        return None if self._last is None else self._last[0]

    def _kept(self) -> list[tuple[float, Mapping[str, float]]]:
        last = self._last
        return self._rows if last is None or self._rows[-1] is last else [*self._rows, last]

    def names(self) -> list[str]:
        """Names of all values, in the order of their appearance."""
        return list(dict.fromkeys(name for _, values in self._kept() for name in values))

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """X and y where there is such a value."""
        pairs = [(x, values[name]) for x, values in self._kept() if name in values]
        return [x for x, _ in pairs], [y for _, y in pairs]

    # ------------------------------------------------------------------ kept from one run to the next
    def to_columns(self, wanted: tuple[str, ...] = ("",)) -> dict[str, Any]:
        """Values whose names begin with one of ``wanted``, as plain values for :meth:`from_columns`."""
        rows = self._kept()
        names = [name for name in self.names() if name.startswith(wanted)]
        columns = {name: [values.get(name) for _, values in rows] for name in names}
        return {"x": [x for x, _ in rows], "columns": columns}

    @classmethod
    def from_columns(cls, saved: Mapping[str, Any], until: float, capacity: int = 1000) -> Self:
        """A curve that was saved, as far as ``until``."""
        curve = cls(capacity)
        columns: Mapping[str, Sequence[float | None]] = saved["columns"]
        for k, x in enumerate(saved["x"]):
            if x <= until:
                row = {name: column[k] for name, column in columns.items()}
                curve.add(x, {name: value for name, value in row.items() if value is not None})
        return curve


class PointSample:
    """Label and prediction of a random sample of all values seen, with the errors over all of them.

    Each value draws a number, and those with the smallest stay: every one has the same chance.

    Parameters
    ----------
    capacity : int, default 2000
        Values kept at most.
    """

    def __init__(self, capacity: int = 2000) -> None:
        self._capacity = capacity
        self._random = np.random.default_rng(0)
        self._keys = np.empty(0)
        self.labels = np.empty(0)
        self.predictions = np.empty(0)
        self.count = 0
        self._absolute = self._square = 0.0

    def add(self, labels: np.ndarray, predictions: np.ndarray) -> None:
        """Add values; those without a finite label are left out."""
        known = np.isfinite(labels)
        labels, predictions = labels[known], predictions[known]
        error = predictions - labels
        self.count += labels.size
        self._absolute += float(np.abs(error).sum())
        self._square += float((error * error).sum())
        keys = np.concatenate([self._keys, self._random.random(labels.size)])
        stay = np.sort(np.argsort(keys)[: self._capacity])
        self._keys = keys[stay]
        self.labels = np.concatenate([self.labels, labels])[stay]
        self.predictions = np.concatenate([self.predictions, predictions])[stay]

    @property
    def mae(self) -> float:
        """Mean absolute error over all values."""
        return self._absolute / max(self.count, 1)

    @property
    def rmse(self) -> float:
        """Root of the mean square error over all values."""
        return (self._square / max(self.count, 1)) ** 0.5
