"""Batches for training: :class:`DataLoader`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import get_worker_info

from nvalchemi.data._transfer import PackedBatch, pack, unpack
from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.datasets import Missing, StructureDataset, as_dataset
from nvalchemi.data.samplers import (
    Batcher,
    BudgetBatcher,
    FixedBatcher,
    Sampler,
    SequentialSampler,
    ShuffleSampler,
)

Transform = Callable[[AtomicData], AtomicData]
BatchTransform = Callable[[Batch], Batch]

# What the processes are told: epoch, number of the batch in it, numbers of the structures.
_Request = tuple[int, int, np.ndarray]


class DataLoader:
    """Batches of a dataset, epoch after epoch, in an order that only the seed decides.

    Parameters
    ----------
    dataset : StructureDataset, list of AtomicData, or Batch
        Where the structures come from; those of a list or batch are held in an :class:`InMemoryDataset`.
    batch_size : int, default 32
        Structures per batch; not used with a budget.
    shuffle : bool, default False
        Another random order in each epoch. From a Zarr store that does not fit into its cache structures are mixed over
        windows of many chunks (see :class:`~nvalchemi.data.samplers.ShuffleSampler`).
    seed : int, default 0
        Seed of the order, and of the random numbers that torch gives to transforms.
    drop_last : bool, default False
        Leave out a last batch that is smaller and, with several ranks, the last batches that not every rank would get.
    max_atoms, max_edges : int, optional
        Budget of a batch instead of ``batch_size``. Edges are those stored with the structures, or ``num_edges``.
    num_edges : sequence of int, optional
        Number of edges of each structure, where the dataset does not store them.
    sampler : Sampler, optional
        Order of the epochs, instead of ``shuffle``.
    batcher : Batcher, optional
        How the order is cut, instead of ``batch_size`` and budgets.
    transforms : sequence of callable, default ()
        Applied to each :class:`AtomicData`, in the process that reads.
    batch_transforms : sequence of callable, default ()
        Applied to each :class:`Batch` after that.
    missing : {"error", "fill"}, default "error"
        What to do with fields that only some structures of a batch have, as in :meth:`Batch.from_data_list`.
    dtype : torch.dtype, optional
        Floating-point type of the batches.
    num_workers : int, default 0
        Processes that read ahead; 0 reads in this one.
    prefetch_factor : int, default 2
        Batches that each process has ready.
    pin_memory : bool, default False
        Batches in page-locked memory, for transfers to a GPU.
    multiprocessing_context : str, optional
        How processes are started (``"fork"``, ``"spawn"``, ``"forkserver"``); default: as Python does it here.
    rank, world_size : int, default 0 and 1
        Of the batches of an epoch this loader yields every ``world_size``-th, beginning with ``rank`` (see
        :meth:`divide`, which sets them later).

    Notes
    -----
    The order depends on dataset, sampler, batcher, seed and epoch, not on the number of processes. Torch's random
    numbers are seeded for each batch before its transforms run (and restored afterwards), so that these repeat too.

    :meth:`state_dict` taken between two batches holds the position; after :meth:`load_state_dict` the next loop goes
    on with the batch that would have come next. A loop that was left early starts its epoch again.

    Examples
    --------
    >>> import torch
    >>> atoms = [
    ...     AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([z])) for z in range(1, 6)
    ... ]
    >>> loader = DataLoader(atoms, batch_size=2)
    >>> [batch.atomic_numbers.tolist() for batch in loader]
    [[1, 2], [3, 4], [5]]
    """

    def __init__(
        self,
        dataset: StructureDataset | Sequence[AtomicData] | Batch,
        batch_size: int = 32,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        max_atoms: int | None = None,
        max_edges: int | None = None,
        num_edges: Sequence[int] | np.ndarray | None = None,
        sampler: Sampler | None = None,
        batcher: Batcher | None = None,
        transforms: Sequence[Transform] = (),
        batch_transforms: Sequence[BatchTransform] = (),
        missing: Missing = "error",
        dtype: torch.dtype | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if sampler is not None and shuffle:
            raise ValueError("give either sampler or shuffle=True: a sampler decides the order")
        dataset = as_dataset(dataset)
        self.dataset, self.seed = dataset, seed
        sampler = sampler or _sampler(dataset, shuffle, seed)
        if batcher is None and (max_atoms is not None or max_edges is not None):
            edges = None if max_edges is None else dataset.num_edges() if num_edges is None else num_edges
            batcher = BudgetBatcher(dataset.num_nodes(), edges, max_atoms=max_atoms, max_edges=max_edges)
        self._smallest = 1  # structures of a batch that drop_last keeps
        if batcher is None:
            batcher = FixedBatcher(batch_size, drop_last=drop_last)
            self._smallest = batch_size
        source = _Source(dataset, tuple(transforms), tuple(batch_transforms), missing, dtype, seed)
        self._requests = _Requests(sampler, batcher, drop_last)
        self._count: tuple[int, int] | None = None
        self.divide(rank, world_size)
        self._loader = TorchDataLoader(
            source,
            batch_sampler=self._requests,  # pyright: ignore[reportArgumentType]
            collate_fn=_as_is,  # pyright: ignore[reportArgumentType]
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            # Torch draws a seed for its processes; not from the generator of the caller.
            generator=torch.Generator(),
            multiprocessing_context=multiprocessing_context if num_workers else None,
        )
        self._epoch = self._position = 0
        self._resuming = False

    # ------------------------------------------------------------------ ranks
    @property
    def rank(self) -> int:
        """Number of the rank whose share this loader yields."""
        return self._requests.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that the batches of an epoch are dealt out to."""
        return self._requests.world_size

    def divide(self, rank: int, world_size: int, *, even: bool = False) -> None:
        """Yield, from the next epoch on, the share of one of several ranks.

        Parameters
        ----------
        rank, world_size : int
            The share: every ``world_size``-th batch, beginning with number ``rank``.
        even : bool, default False
            Give all ranks the same number of batches by repeating the first ones of the epoch, as training in step
            needs. Otherwise (and without ``drop_last``) some ranks may have one more than others.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0 … world_size − 1, got rank {rank} of {world_size}")
        self._requests.check_not_empty(self._smallest, world_size)
        self._requests.rank, self._requests.world_size, self._requests.even = rank, world_size, even
        self._count = None

    # ------------------------------------------------------------------ batches
    @property
    def epoch(self) -> int:
        """Number of the epoch that is, or would be, under way; set it to repeat or skip one."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch, self._position, self._resuming = value, 0, False

    def __len__(self) -> int:
        """Number of batches of the current epoch on this rank."""
        if self._count is None or self._count[0] != self._epoch:
            self._count = self._epoch, sum(1 for _ in self.batches(self._epoch))
        return self._count[1]

    def batches(self, epoch: int) -> Iterator[np.ndarray]:
        """Numbers of the structures of each batch of an epoch on this rank, without reading them."""
        return self._requests.batches(epoch)

    def __iter__(self) -> Iterator[Batch]:
        if not self._resuming:
            self._position = 0
        self._resuming = False
        epoch = self._epoch
        self._requests.epoch, self._requests.first = epoch, self._position
        for batch in self._loader:
            self._position += 1
            yield unpack(batch) if isinstance(batch, PackedBatch) else batch
        self._epoch, self._position = epoch + 1, 0

    # ------------------------------------------------------------------ checkpoints
    def state_dict(self) -> dict[str, int]:
        """Position: epoch, batches already yielded in it and how many it has, and the seed."""
        return {
            "epoch": self._epoch,
            "batch": self._position,
            "batches": len(self),
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position.

        Raises
        ------
        ValueError
            The position was taken with another seed, or inside an epoch of another number of batches, so that it means
            other batches.
        """
        if state["seed"] != self.seed:
            raise ValueError(
                f"the position was taken with seed {state['seed']}, this loader has seed {self.seed}"
            )
        number = sum(1 for _ in self.batches(state["epoch"])) if state["batch"] else None
        if number is not None and number != state["batches"]:
            raise ValueError(
                f"the position is after batch {state['batch']} of {state['batches']}, here the epoch has {number}: "
                "dataset, batch size or number of ranks are others"
            )
        self._epoch, self._position = state["epoch"], state["batch"]
        self._resuming = True


def _sampler(dataset: StructureDataset, shuffle: bool, seed: int) -> Sampler:
    if shuffle:
        return ShuffleSampler(len(dataset), seed=seed, block_size=dataset.frames_per_chunk)
    return SequentialSampler(len(dataset))


class _Requests:
    """Batches of the current epoch that are still to come, for torch's loader."""

    # Knows nothing of the DataLoader: a cycle of references would keep worker processes alive until it is collected.
    def __init__(self, sampler: Sampler, batcher: Batcher, drop_last: bool) -> None:
        self._sampler, self._batcher, self._drop_last = sampler, batcher, drop_last
        self.rank, self.world_size, self.even = 0, 1, False
        self.epoch = self.first = 0

    def check_not_empty(self, batch_size: int, world_size: int) -> None:
        n = len(self._sampler)
        if self._drop_last and n < batch_size * world_size:
            ranks = f" on each of {world_size} ranks" if world_size > 1 else ""
            raise ValueError(
                f"drop_last=True leaves out all batches: an epoch has {n} structures, fewer than one batch of "
                f"{batch_size}{ranks}"
            )

    def batches(self, epoch: int) -> Iterator[np.ndarray]:
        batches = self._batcher.cut(self._sampler.order(epoch))
        first: list[np.ndarray] = []
        while group := list(islice(batches, self.world_size)):
            first = first or list(group)
            if len(group) < self.world_size:
                if self._drop_last:
                    return
                if self.even:
                    group += islice(cycle(first), self.world_size - len(group))
            if self.rank < len(group):
                yield group[self.rank]

    def __iter__(self) -> Iterator[_Request]:
        for number, indices in enumerate(self.batches(self.epoch)):
            if number >= self.first:
                yield self.epoch, number, indices


class _Source(TorchDataset[Batch]):
    """Reads and transforms one batch; this is what worker processes hold."""

    def __init__(
        self,
        dataset: StructureDataset,
        transforms: tuple[Transform, ...],
        batch_transforms: tuple[BatchTransform, ...],
        missing: Missing,
        dtype: torch.dtype | None,
        seed: int,
    ) -> None:
        self._dataset, self._dtype, self._seed = dataset, dtype, seed
        self._missing: Missing = missing
        self._transforms, self._batch_transforms = transforms, batch_transforms

    def __getitems__(self, request: Any) -> Batch | PackedBatch:
        batch = self._batch(request)
        return batch if get_worker_info() is None else pack(batch)

    def _batch(self, request: _Request) -> Batch:
        epoch, number, indices = request
        if not self._transforms and not self._batch_transforms:
            return self._converted(self._dataset.read(indices, missing=self._missing))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(
                int(np.random.SeedSequence([self._seed, epoch, number]).generate_state(1, np.uint64)[0])
            )
            if self._transforms:
                structures = [self._transformed(int(i)) for i in indices]
                batch = Batch.from_data_list(structures, missing=self._missing)
            else:
                batch = self._dataset.read(indices, missing=self._missing)
            batch = self._converted(batch)
            with _transforming(f"a batch of the structures {indices.tolist()}"):
                for transform in self._batch_transforms:
                    batch = transform(batch)
        return batch

    def _transformed(self, index: int) -> AtomicData:
        data = self._dataset[index]
        with _transforming(f"structure {index}"):
            for transform in self._transforms:
                data = transform(data)
        return data

    def _converted(self, batch: Batch) -> Batch:
        return batch if self._dtype is None else batch.to(dtype=self._dtype)


@contextmanager
def _transforming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by a transform of {name}")
        raise


def _as_is(batch: Batch | PackedBatch) -> Batch | PackedBatch:
    return batch
