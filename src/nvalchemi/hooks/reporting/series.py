"""Curves and clouds of points of bounded size, however long a run is."""

from collections.abc import Mapping

import numpy as np


class Curve:
    """Rows of numbers over steps: every one at first, every second, every fourth … as they become many.

    Parameters
    ----------
    capacity : int, default 2000
        Rows kept at most, besides the last.
    """

    def __init__(self, capacity: int = 2000) -> None:
        self._capacity = capacity
        self._stride = 1
        self._count = 0
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
        if self._count % self._stride == 0:
            self._rows.append(row)
            if len(self._rows) > self._capacity:
                self._rows = self._rows[::2]
                self._stride *= 2
        self._count += 1

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
