"""In which order, and how many at a time: orders give the structures of an epoch, batchers cut them into batches.

Both are pure functions of the seed and the epoch, so that a run can be resumed at any batch and does not depend on
how many processes read the data.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np


class Sampler(ABC):
    """Order of an epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of structures in an epoch."""

    @abstractmethod
    def order(self, epoch: int) -> np.ndarray:
        """Numbers of the structures of an epoch, in order, int64 [len]."""


class SequentialSampler(Sampler):
    """All of ``n`` structures, in order."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def order(self, epoch: int) -> np.ndarray:
        """0, 1, … n − 1."""
        return np.arange(self._n)


class ShuffleSampler(Sampler):
    """All of ``n`` structures in a random order, another one in each epoch.

    Parameters
    ----------
    n : int
        Number of structures.
    seed : int, default 0
        Seed of the order.
    block_size : int, optional
        Shuffle for stores that are read in chunks: blocks of this many neighbours come in random order, and
        structures are mixed within windows of ``window`` blocks, so that a chunk is decoded once per epoch. Default:
        no blocks.
    window : int, default 32
        Blocks that are mixed; the chunks of all their fields should fit into the cache of the reader.

    Examples
    --------
    >>> sampler = ShuffleSampler(5, seed=1)
    >>> sorted(sampler.order(0).tolist()), (sampler.order(0) == sampler.order(0)).all().item()
    ([0, 1, 2, 3, 4], True)
    """

    def __init__(self, n: int, *, seed: int = 0, block_size: int | None = None, window: int = 32) -> None:
        if (block_size is not None and block_size < 1) or window < 1:
            raise ValueError(f"block_size and window must be at least 1, got {block_size} and {window}")
        self._n, self._seed, self._block_size, self._window = n, seed, block_size, window

    def __len__(self) -> int:
        return self._n

    def order(self, epoch: int) -> np.ndarray:
        """A permutation of 0 … n − 1."""
        rng = np.random.default_rng([self._seed, epoch])
        if self._block_size is None:
            return rng.permutation(self._n)
        # Blocks begin at another place in each epoch, so that the same structures do not always stay together.
        first = int(rng.integers(self._block_size))
        bounds = np.arange(first, self._n, self._block_size)
        blocks = np.split(np.arange(self._n), bounds)
        shuffled = [blocks[k] for k in rng.permutation(len(blocks))]
        windows = [
            np.concatenate(shuffled[start : start + self._window])
            for start in range(0, len(shuffled), self._window)
        ]
        return np.concatenate([rng.permutation(window) for window in windows])


class WeightedSampler(Sampler):
    """Structures drawn with replacement, each in proportion to its weight.

    Parameters
    ----------
    weights : sequence of float
        One weight per structure, at least 0.
    num_samples : int, optional
        Structures per epoch. Default: as many as there are.
    seed : int, default 0
        Seed of the draw.
    """

    def __init__(
        self, weights: Sequence[float] | np.ndarray, *, num_samples: int | None = None, seed: int = 0
    ) -> None:
        self._weights = _normalised(weights, "weights")
        self._num_samples = len(self._weights) if num_samples is None else num_samples
        self._seed = seed

    def __len__(self) -> int:
        return self._num_samples

    def order(self, epoch: int) -> np.ndarray:
        """Numbers drawn."""
        rng = np.random.default_rng([self._seed, epoch])
        return rng.choice(len(self._weights), size=self._num_samples, p=self._weights)


class BalancedSampler(Sampler):
    """Parts of a :class:`~nvalchemi.data.datasets.MultiDataset` in given shares, whatever their sizes.

    Each part is gone through in random order without replacement, again and again where its share asks for more than
    it has.

    Parameters
    ----------
    lengths : sequence of int
        Number of structures of each part (``multi.lengths``).
    weights : sequence of float, optional
        Share of each part. Default: all parts alike.
    num_samples : int, optional
        Structures per epoch. Default: as many as there are.
    seed : int, default 0
        Seed of the draw.

    Examples
    --------
    >>> order = BalancedSampler([90, 10]).order(epoch=0)
    >>> int((order < 90).sum()), int((order >= 90).sum())
    (50, 50)
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
        seed: int = 0,
    ) -> None:
        shares = _normalised([1.0] * len(lengths) if weights is None else weights, "weights")
        if len(shares) != len(lengths):
            raise ValueError(f"{len(shares)} weights given for {len(lengths)} datasets")
        for part, (length, share) in enumerate(zip(lengths, shares, strict=True)):
            if length == 0 and share > 0:
                raise ValueError(f"dataset {part} is empty and cannot be drawn from; give it weight 0")
        self._lengths, self._shares, self._seed = list(lengths), shares, seed
        self._num_samples = sum(lengths) if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._num_samples

    def order(self, epoch: int) -> np.ndarray:
        """Numbers drawn, parts mixed."""
        rng = np.random.default_rng([self._seed, epoch])
        # Differences of rounded cumulated shares: they sum to num_samples and none is off by more than one.
        counts = np.diff(np.rint(np.cumsum([0.0, *self._shares]) * self._num_samples).astype(int))
        start = 0
        drawn: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        for length, count in zip(self._lengths, counts.tolist(), strict=True):
            rounds = -(-count // length) if length else 0
            order = [rng.permutation(length) for _ in range(rounds)]
            drawn.append(start + np.concatenate([*order, np.zeros(0, dtype=np.int64)])[:count])
            start += length
        return rng.permutation(np.concatenate(drawn))


def _normalised(weights: Sequence[float] | np.ndarray, name: str) -> np.ndarray:
    values = np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any() or values.sum() == 0:
        raise ValueError(f"{name} must be finite, at least 0 and not all 0, got shape {list(values.shape)}")
    return values / values.sum()


# ---------------------------------------------------------------------- batches
class Batcher(ABC):
    """Cuts the order of an epoch into batches."""

    @abstractmethod
    def cut(self, order: np.ndarray) -> Iterator[np.ndarray]:
        """Batches of an epoch, each an array of numbers of structures."""


class FixedBatcher(Batcher):
    """Batches of a fixed number of structures.

    Parameters
    ----------
    batch_size : int
        Structures per batch; the last batch may have fewer.
    drop_last : bool, default False
        Leave out a last batch that has fewer.
    """

    def __init__(self, batch_size: int, *, drop_last: bool = False) -> None:
        if not isinstance(batch_size, int | np.integer) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        self._batch_size, self._drop_last = batch_size, drop_last

    def cut(self, order: np.ndarray) -> Iterator[np.ndarray]:
        """Batches in order."""
        stop = len(order) - len(order) % self._batch_size if self._drop_last else len(order)
        return (order[start : start + self._batch_size] for start in range(0, stop, self._batch_size))


class BudgetBatcher(Batcher):
    """Batches that stay within a number of atoms, edges and structures: structures are added until one does not fit.

    Parameters
    ----------
    num_nodes, num_edges : sequence of int
        Atoms and edges of each structure; edges are needed for ``max_edges`` only.
    max_atoms, max_edges, max_graphs : int, optional
        Largest sums per batch, at least one of them.
    oversized : {"error", "skip"}, default "error"
        What to do with a structure that is above a budget alone.

    Examples
    --------
    >>> batcher = BudgetBatcher([5, 5, 9, 1], max_atoms=10)
    >>> [batch.tolist() for batch in batcher.cut(np.arange(4))]
    [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        num_nodes: Sequence[int] | np.ndarray,
        num_edges: Sequence[int] | np.ndarray | None = None,
        *,
        max_atoms: int | None = None,
        max_edges: int | None = None,
        max_graphs: int | None = None,
        oversized: str = "error",
    ) -> None:
        if oversized not in ("error", "skip"):
            raise ValueError(f"oversized must be 'error' or 'skip', got {oversized!r}")
        sizes = {"atoms": np.asarray(num_nodes, dtype=np.int64)}
        budgets = {"atoms": max_atoms, "edges": max_edges, "graphs": max_graphs}
        if max_edges is not None:
            edges = np.asarray([] if num_edges is None else num_edges, dtype=np.int64)
            if len(edges) != len(sizes["atoms"]) or not edges.any():
                raise ValueError(
                    "max_edges needs the number of edges of each structure, and none are known: give num_edges=…"
                )
            sizes["edges"] = edges
        sizes["graphs"] = np.ones_like(sizes["atoms"])
        self._budgets = [(name, limit, sizes[name]) for name, limit in budgets.items() if limit is not None]
        if not self._budgets:
            raise ValueError("give at least one of max_atoms, max_edges and max_graphs")
        for name, limit, _ in self._budgets:
            if limit < 1:
                raise ValueError(f"max_{name} must be at least 1, got {limit}")
        self._oversized = oversized

    def cut(self, order: np.ndarray) -> Iterator[np.ndarray]:
        """Batches in order."""
        order = self._without_oversized(order)
        limits = [limit for _, limit, _ in self._budgets]
        # sums[k] is the running sum before each structure; a batch ends where one of them would pass its limit.
        sums = [np.concatenate([[0], np.cumsum(size[order])]) for _, _, size in self._budgets]
        start = 0
        while start < len(order):
            stops = (
                int(np.searchsorted(total, total[start] + limit, side="right")) - 1
                for total, limit in zip(sums, limits, strict=True)
            )
            stop = min(stops)
            yield order[start:stop]
            start = stop

    def _without_oversized(self, order: np.ndarray) -> np.ndarray:
        for name, limit, size in self._budgets:
            too_large = size[order] > limit
            if too_large.any() and self._oversized == "error":
                worst = int(order[too_large][0])
                raise ValueError(
                    f"structure {worst} has {size[worst]} {name}, more than max_{name}={limit}; raise it or pass "
                    f"oversized='skip'"
                )
            order = order[~too_large]
        return order
