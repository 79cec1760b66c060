"""Structures by number, wherever they are kept: :class:`Dataset`, :class:`InMemoryDataset`, :class:`MultiDataset`."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, cast, overload

import numpy as np
import torch

from nvalchemi.data._numbers import Indices, position, positions
from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch

Missing = Literal["error", "fill"]


class StructureDataset(ABC):
    """What every dataset offers; write ``__len__`` and ``_get`` and the rest follows.

    ``dataset[i]`` is an :class:`AtomicData`, ``dataset[slice | list | array]`` a :class:`Batch`, and
    ``dataset.select(indices)`` the dataset of some of the structures.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _get(self, index: int) -> AtomicData:
        """The structure ``index``, 0 ≤ index < len."""

    def read(self, indices: Indices, *, missing: Missing = "error") -> Batch:
        """Many structures as one batch, in the order asked for (``missing`` as in :meth:`Batch.from_data_list`)."""
        return Batch.from_data_list(
            [self._get(i) for i in self._positions(indices).tolist()], missing=missing
        )

    def _sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of atoms and of edges of each structure; reads all of them unless overridden."""
        sizes = np.array([(data.num_nodes, data.num_edges) for data in self], dtype=np.int64).reshape(-1, 2)
        return sizes[:, 0], sizes[:, 1]

    @property
    def frames_per_chunk(self) -> int | None:
        """How many neighbouring structures are cheap to read together; ``None`` where the order does not matter."""
        return None

    def num_nodes(self) -> np.ndarray:
        """Number of atoms of each structure, int64 [len]."""
        return self._cached_sizes[0]

    def num_edges(self) -> np.ndarray:
        """Number of stored edges of each structure, int64 [len]; 0 where neighbour lists are not stored."""
        return self._cached_sizes[1]

    @cached_property
    def _cached_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        return self._sizes()

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Number of atoms and of stored edges of one structure."""
        nodes, edges = self._cached_sizes
        index = self._position(index)
        return int(nodes[index]), int(edges[index])

    @overload
    def __getitem__(self, index: int) -> AtomicData: ...
    @overload
    def __getitem__(self, index: slice | Indices) -> Batch: ...
    def __getitem__(self, index: int | slice | Indices) -> AtomicData | Batch:
        if isinstance(index, int | np.integer):
            return self._get(self._position(int(index)))
        if isinstance(index, slice):
            return self.read(np.arange(len(self))[index])
        return self.read(index)

    def __iter__(self) -> Iterator[AtomicData]:
        return (self._get(i) for i in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} structures)"

    def read_parts(self, indices: Indices) -> list[Batch]:
        """Many structures in as many batches as there are changes in the set of fields from one to the next."""
        parts: list[list[AtomicData]] = []
        for data in (self._get(i) for i in self._positions(indices).tolist()):
            if not parts or parts[-1][-1]._levels.keys() != data._levels.keys():
                parts.append([])
            parts[-1].append(data)
        return [Batch.from_data_list(part) for part in parts]

    def iter_batches(self, batch_size: int = 1024, *, missing: Missing = "error") -> Iterator[Batch]:
        """All structures in order, ``batch_size`` at a time; fewer where the set of fields changes, unless filled."""
        for start in range(0, len(self), batch_size):
            piece = np.arange(start, min(start + batch_size, len(self)))
            if missing == "fill":
                yield self.read(piece, missing=missing)
            else:
                yield from self.read_parts(piece)

    def select(self, indices: Indices) -> "Subset":
        """The dataset of some of the structures, in the order given."""
        return Subset(self, indices)

    def _position(self, index: int) -> int:
        return position(index, len(self), "the dataset")

    def _positions(self, indices: Indices) -> np.ndarray:
        return positions(indices, len(self), "the dataset")


class InMemoryDataset(StructureDataset):
    """Structures held in memory.

    Parameters
    ----------
    data : iterable of AtomicData, or Batch
        The structures; another dataset is read into memory once.

    Examples
    --------
    >>> import torch
    >>> atom = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([18]))
    >>> dataset = InMemoryDataset([atom, atom])
    >>> len(dataset), dataset[:].num_graphs, dataset.get_metadata(0)
    (2, 2, (1, 0))
    """

    def __init__(self, data: Iterable[AtomicData] | Batch | StructureDataset) -> None:
        self._data: list[AtomicData] = data.to_data_list() if isinstance(data, Batch) else list(data)
        for i, structure in enumerate(self._data):
            if not isinstance(structure, AtomicData):
                raise TypeError(f"element {i} is a {type(structure).__name__}, not an AtomicData")

    def __len__(self) -> int:
        return len(self._data)

    def _get(self, index: int) -> AtomicData:
        # A copy: a transform that changes what comes out, in place too, does not change the dataset.
        data = self._data[index].clone()
        vars(data)["_info"] = dict(data.info)
        return data

    def read(self, indices: Indices, *, missing: Missing = "error") -> Batch:
        """Many structures as one batch, in the order asked for (``missing`` as in :meth:`Batch.from_data_list`)."""
        batch = Batch.from_data_list(
            [self._data[i] for i in self._positions(indices).tolist()], missing=missing
        )
        vars(batch)["_info"] = [dict(info) for info in batch.info]
        return batch


def as_dataset(data: Any) -> StructureDataset:
    """A dataset as it is; structures in a list, tuple or batch as an :class:`InMemoryDataset`.

    Raises
    ------
    TypeError
        Anything else.
    """
    if isinstance(data, StructureDataset):
        return data
    if isinstance(data, list | tuple | Batch):
        return InMemoryDataset(cast("list[AtomicData] | tuple[AtomicData, ...] | Batch", data))
    hint = f": Dataset({str(data)!r}) opens a file or store" if isinstance(data, str | os.PathLike) else ""
    raise TypeError(
        f"a dataset, or structures in a list or Batch, is needed, got {type(data).__name__}{hint}"
    )


class Subset(StructureDataset):
    """Some structures of another dataset.

    Parameters
    ----------
    dataset : StructureDataset
        Where they come from.
    indices : sequence of int
        Their numbers there.
    """

    def __init__(self, dataset: StructureDataset, indices: Indices) -> None:
        self.dataset = dataset
        self.indices = dataset._positions(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def _get(self, index: int) -> AtomicData:
        return self.dataset[int(self.indices[index])]

    def read(self, indices: Indices, *, missing: Missing = "error") -> Batch:
        """Many structures as one batch."""
        return self.dataset.read(self.indices[self._positions(indices)], missing=missing)

    def _sizes(self) -> tuple[np.ndarray, np.ndarray]:
        return self.dataset.num_nodes()[self.indices], self.dataset.num_edges()[self.indices]

    @property
    def frames_per_chunk(self) -> int | None:
        """Chunk of the dataset below, thinned by the selection; only where that keeps its order."""
        chunk = self.dataset.frames_per_chunk
        if chunk is None or len(self) < 2 or (np.diff(self.indices) < 0).any():
            return None
        return max(1, chunk * len(self) // len(self.dataset))


class MultiDataset(StructureDataset):
    """Several datasets, one after another.

    Parameters
    ----------
    datasets : sequence of StructureDataset, or mapping of name to StructureDataset
        The parts; without names they are called ``"0"``, ``"1"``, …

    Notes
    -----
    Every structure says where it comes from in ``info["dataset"]``. How often each part is drawn is the business of a
    sampler: :class:`~nvalchemi.data.samplers.BalancedSampler` takes ``multi.lengths``.
    """

    def __init__(self, datasets: Sequence[StructureDataset] | Mapping[str, StructureDataset]) -> None:
        if not datasets:
            raise ValueError("MultiDataset needs at least one dataset")
        named = datasets if isinstance(datasets, Mapping) else {str(i): d for i, d in enumerate(datasets)}
        self.names = list(named)
        self.datasets = list(named.values())
        self.lengths = [len(dataset) for dataset in self.datasets]
        self._starts = np.array([0, *accumulate(self.lengths)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """Number of the part that structure ``index`` is in, and its number there."""
        index = self._position(index)
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return part, index - int(self._starts[part])

    def _get(self, index: int) -> AtomicData:
        part, local = self.locate(index)
        data = self.datasets[part][local]
        data.info["dataset"] = self.names[part]
        return data

    def read(self, indices: Indices, *, missing: Missing = "error") -> Batch:
        """Many structures as one batch; each part is read once."""
        idx = self._positions(indices)
        part = np.searchsorted(self._starts, idx, side="right") - 1
        order = np.argsort(part, kind="stable")
        pieces: list[Batch] = []
        for number in np.unique(part).tolist():
            piece = self.datasets[number].read(idx[part == number] - self._starts[number], missing=missing)
            for info in piece.info:
                info["dataset"] = self.names[number]
            pieces.append(piece)
        batch = pieces[0] if len(pieces) == 1 else Batch.from_data_list(pieces, missing=missing)
        if (order[1:] > order[:-1]).all():
            return batch
        return batch.index_select(np.argsort(order).tolist())

    def _sizes(self) -> tuple[np.ndarray, np.ndarray]:
        return (
            np.concatenate([dataset.num_nodes() for dataset in self.datasets]),
            np.concatenate([dataset.num_edges() for dataset in self.datasets]),
        )

    @property
    def frames_per_chunk(self) -> int | None:
        """The smallest of the parts that have one."""
        chunks = [dataset.frames_per_chunk for dataset in self.datasets]
        return min((chunk for chunk in chunks if chunk is not None), default=None)


class Dataset(StructureDataset):
    """Structures of a file or store, read when they are asked for.

    Parameters
    ----------
    path : path, URL or zarr store
        A Zarr store (``.zarr``, a URL or a store object), an ASE database (``.db``, and ``.aselmdb`` with the
        extra ``lmdb``) or a file in (extended) xyz format.
    dtype : torch.dtype, optional
        Floating-point type of the result. Default: as stored in Zarr, float32 for the others.
    **options
        For Zarr those of :class:`AtomicDataZarrReader`, for the others those of :func:`nvalchemi.data.ase.from_atoms`
        (``energy_key``, …).

    Raises
    ------
    FileNotFoundError
        No such file or store.
    ValueError
        A kind of file that is not known, or one that cannot be read.

    Notes
    -----
    For xyz files the offset of each frame is found in one fast pass when the dataset is opened. A dataset can be
    pickled; the copy, in a worker process for instance, opens the file again.
    """

    def __init__(self, path: Any, *, dtype: torch.dtype | None = None, **options: Any) -> None:
        self.path = str(path)
        self._source = _open_source(path, dtype, options)

    def __len__(self) -> int:
        return len(self._source)

    def __repr__(self) -> str:
        return f"Dataset({self.path!r}, {len(self)} structures)"

    def _get(self, index: int) -> AtomicData:
        return self._source[index]

    def read(self, indices: Indices, *, missing: Missing = "error") -> Batch:
        """Many structures as one batch, in the order asked for (``missing`` as in :meth:`Batch.from_data_list`)."""
        from nvalchemi.data.zarr import AtomicDataZarrReader

        if isinstance(self._source, AtomicDataZarrReader):
            return self._source.read(indices, missing=missing)
        return super().read(indices, missing=missing)

    def read_parts(self, indices: Indices) -> list[Batch]:
        """Many structures in as many batches as there are changes in the set of fields from one to the next."""
        from nvalchemi.data.zarr import AtomicDataZarrReader

        if isinstance(self._source, AtomicDataZarrReader):
            return self._source.read_parts(indices)
        return super().read_parts(indices)

    def _sizes(self) -> tuple[np.ndarray, np.ndarray]:
        return self._source.num_nodes(), self._source.num_edges()

    @property
    def frames_per_chunk(self) -> int | None:
        """Structures per chunk of a Zarr store that does not fit into its cache; ``None`` for anything else."""
        from nvalchemi.data.zarr import AtomicDataZarrReader

        if isinstance(self._source, AtomicDataZarrReader) and self._source.nbytes > self._source.cache_bytes:
            return self._source.frames_per_chunk
        return None


def _open_source(path: Any, dtype: torch.dtype | None, options: dict[str, Any]) -> Any:
    from nvalchemi.data.databases import AseDatabase
    from nvalchemi.data.sources import XyzFile
    from nvalchemi.data.zarr import AtomicDataZarrReader

    if not isinstance(path, str | os.PathLike):
        return AtomicDataZarrReader(path, dtype=dtype, **options)
    text = os.fspath(path)
    suffix = os.path.splitext(text.rstrip("/"))[1].lower()
    if suffix == ".zarr" or "://" in text or os.path.isfile(os.path.join(text, "zarr.json")):
        return AtomicDataZarrReader(path, dtype=dtype, **options)
    if not os.path.exists(text):
        raise FileNotFoundError(f"no such file: {text}")
    if suffix in (".db", ".aselmdb"):
        return AseDatabase(text, dtype=dtype or torch.float32, **options)
    if suffix in (".xyz", ".extxyz"):
        return XyzFile(text, dtype=dtype or torch.float32, **options)
    raise ValueError(
        f"{text}: a dataset is a .zarr store, an ASE .db or .aselmdb, or an .xyz or .extxyz file; convert "
        f"other formats with nvalchemi.data.write('…zarr', nvalchemi.data.iread({text!r}))"
    )


# ---------------------------------------------------------------------- splits
def split(
    dataset: StructureDataset | Sequence[AtomicData] | Batch,
    fractions: Mapping[str, float],
    *,
    by: str | Callable[[AtomicData], Hashable] | Sequence[Hashable] | None = None,
    seed: int = 0,
) -> dict[str, Subset]:
    """Divide a dataset at random, the same way for the same seed.

    Parameters
    ----------
    dataset : StructureDataset, list of AtomicData, or Batch
        What to divide.
    fractions : mapping of str to float
        Share of each part by name; they sum to 1.
    by : str, callable or sequence, optional
        Keep structures with the same key in the same part: a key of ``info`` (``"formula"``: the chemical formula), a
        function of the structure, or one key per structure. The shares then hold as nearly as the groups allow.
    seed : int, default 0
        Seed of the division.

    Returns
    -------
    dict of str to Subset
        The parts, each in the order of the dataset.

    Examples
    --------
    >>> atoms = [
    ...     AtomicData(positions=[[0.0, 0.0, 0.0]], atomic_numbers=[z]) for z in (1, 1, 2, 2, 3, 3, 4, 4)
    ... ]
    >>> parts = split(InMemoryDataset(atoms), {"train": 0.75, "val": 0.25}, by="formula")
    >>> [len(part) for part in parts.values()]
    [6, 2]
    """
    shares = np.array(list(fractions.values()), dtype=float)
    if len(shares) == 0 or (shares < 0).any() or abs(shares.sum() - 1) > 1e-6:
        raise ValueError(f"fractions must be at least 0 and sum to 1, got {dict(fractions)}")
    dataset = as_dataset(dataset)
    rng = np.random.default_rng(seed)
    n = len(dataset)
    if by is None:
        # Bounds by rounding the cumulated shares: every structure is in one part and none is off by more than one.
        bounds = np.rint(np.cumsum(shares) * n).astype(int)[:-1]
        parts = np.split(rng.permutation(n), bounds)
    else:
        _, group = np.unique(_group_numbers(dataset, by), return_inverse=True)
        sizes = np.bincount(group)
        part_of_group = np.zeros(len(sizes), dtype=np.int64)
        room = shares * n
        # Large groups first, into the part that lacks most; groups of a size in random order.
        shuffled = rng.permutation(len(sizes))
        for g in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
            part_of_group[g] = np.argmax(room)
            room[part_of_group[g]] -= sizes[g]
        parts = [np.flatnonzero(part_of_group[group] == k) for k in range(len(shares))]
    return {name: dataset.select(np.sort(part)) for name, part in zip(fractions, parts, strict=True)}


def _group_numbers(dataset: StructureDataset, by: Any) -> np.ndarray:
    if isinstance(by, str):
        keys: Iterable[Hashable] = (_info_key(i, data, by) for i, data in enumerate(dataset))
    elif callable(by):
        keys = (by(data) for data in dataset)
    else:
        keys = list(by)
        if len(keys) != len(dataset):
            raise ValueError(f"by has {len(keys)} keys for {len(dataset)} structures")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _info_key(index: int, data: AtomicData, key: str) -> Hashable:
    if key in data.info:
        return data.info[key]
    if key == "formula":
        return data.chemical_formula
    raise ValueError(f"structure {index} has no info[{key!r}]; it has {', '.join(data.info) or 'none'}")
