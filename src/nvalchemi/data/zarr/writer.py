"""Writing structures into a Zarr store, so that a crash costs at most what was not committed yet."""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.schema import Level
from nvalchemi.data.zarr.frames import Frames, filler, frames_from_batch, frames_from_data
from nvalchemi.data.zarr.record import INFO, POINTERS, RECORD_KEY, SIGNATURE, Record, StoredField
from nvalchemi.data.zarr.stores import (
    import_zarr,
    is_occupied,
    local_path,
    lock_folder,
    open_root,
    open_store,
    remove_partial_files,
)

# Structures joined into one batch at a time when an iterable is written.
_GROUP = 1024
_PADDED = frozenset({"neighbor_matrix", "neighbor_matrix_shifts"})
# A chunk of zeros must be there too, or a lost one could not be told from it. (Not kept in the store: said at each
# opening.)
_ARRAY_CONFIG = {"write_empty_chunks": True}


class AtomicDataZarrWriter:
    """Append structures to a Zarr store (format 3).

    Parameters
    ----------
    store : path, URL or zarr store
        Where to: a local folder, any URL that fsspec knows (``"s3://bucket/set.zarr"``, ``"memory://set.zarr"``), or an
        open :class:`zarr.abc.store.Store`.
    mode : {"a", "w", "x"}, default "a"
        Append (and create), replace, or create and refuse to touch what exists.
    fields : sequence of str, optional
        Names of the fields to keep (``positions`` and ``atomic_numbers`` always are). Default: every field but padded
        neighbour matrices, which cannot be stored, and the working state of integrators.
    dtypes : mapping of str to dtype, optional
        Stored type by field, for example ``{"forces": "float32"}``. Default: the type of the first structure that has
        the field.
    chunk_bytes : int, default 262144
        Size of a chunk before compression. A random read decodes one chunk per field.
    chunks_per_shard : int, default 1
        Chunks per file. More than one keeps the number of files of a large set low, but each commit rewrites the last
        file of each field.
    compressor : {"zstd", "blosc", "gzip", "none"} or zarr codec, default "zstd"
        Compression of the chunks. A CRC-32C checksum is added behind it.
    buffer_frames, buffer_bytes, buffer_seconds : int, int, float
        Commit as soon as this many structures (default 1000) or bytes (default 32 MiB) wait, or this long after the
        last commit (default 10 s; looked at whenever something is added). What waits is lost in a crash, and where
        the writer is never closed: use it in a ``with`` block.
    storage_options : mapping, optional
        Options of the fsspec file system of a URL.

    Raises
    ------
    ImportError
        The extra ``zarr`` is not installed.
    FileExistsError
        Mode ``"x"`` and something is there, or mode ``"w"`` and what is there is no Zarr store.
    RuntimeError
        Another writer has the store open (local stores on systems with file locks).

    Notes
    -----
    A commit first writes the arrays and then, in one write that replaces the old value as a whole, the record of how
    much of them counts. Readers go by the record, so they see whole structures only. Chunks in use are only ever
    replaced by ones that begin with the same rows. Opening a store for appending first cuts off what was written and
    not committed.

    Examples
    --------
    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> with AtomicDataZarrWriter(folder + "/argon.zarr") as writer:
    ...     writer.append(AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([18])))
    >>> from nvalchemi.data.zarr import AtomicDataZarrReader
    >>> len(AtomicDataZarrReader(folder + "/argon.zarr"))
    1
    """

    def __init__(
        self,
        store: Any,
        *,
        mode: Literal["a", "w", "x"] = "a",
        fields: Sequence[str] | None = None,
        dtypes: Mapping[str, Any] | None = None,
        chunk_bytes: int = 1 << 18,
        chunks_per_shard: int = 1,
        compressor: Any = "zstd",
        buffer_frames: int = 1000,
        buffer_bytes: int = 1 << 25,
        buffer_seconds: float = 10.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in ("a", "w", "x"):
            raise ValueError(f"mode must be 'a', 'w' or 'x', got {mode!r}")
        if chunk_bytes < 1 or chunks_per_shard < 1:
            raise ValueError(
                f"chunk_bytes and chunks_per_shard must be at least 1, got {chunk_bytes} and {chunks_per_shard}"
            )
        if padded := sorted(_PADDED.intersection(fields or ())):
            # Their width and the numbers in them belong to one batch.
            raise ValueError(
                f"{', '.join(padded)} cannot be stored; store neighbor_list, which is not padded"
            )
        self._fields = None if fields is None else {"positions", "atomic_numbers", *fields}
        self._dtypes = {name: _numpy_dtype(dtype) for name, dtype in (dtypes or {}).items()}
        self._chunk_bytes, self._chunks_per_shard = chunk_bytes, chunks_per_shard
        self._compressors = _codecs(compressor)
        self._limits = (buffer_frames, buffer_bytes, buffer_seconds)
        self._buffer: list[Frames] = []
        self._buffered_frames = self._buffered_bytes = 0
        self._arrays: dict[str, Any] = {}
        self._closed = False
        self.path = str(store)
        self._open(open_store(store, read_only=False, storage_options=storage_options), mode)
        self._last_commit = time.monotonic()

    # ------------------------------------------------------------------ opening
    def _open(self, store: Any, mode: str) -> None:
        zarr = import_zarr()
        folder = local_path(store)
        occupied = folder is not None and is_occupied(folder)
        self._lock = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(folder)
        try:
            try:
                group = open_root(store, self.path, mode="r+")
            except FileNotFoundError:
                group = None
            if group is None and occupied:
                raise FileExistsError(
                    f"{folder} exists, is not empty and is not a Zarr store; nothing was changed"
                )
            if group is not None and mode == "x":
                raise FileExistsError(f"{self.path} exists; mode 'a' appends to it, mode 'w' replaces it")
            if group is None or mode == "w":
                group = zarr.create_group(store, overwrite=True, attributes={RECORD_KEY: Record().to_json()})
                if folder is not None:
                    # Overwriting made a new folder of that name.
                    self._unlock()
                    self._lock = lock_folder(folder)
            self._group = group
            self._record = Record.from_json(group.attrs.asdict(), self.path)
            if folder is not None:
                remove_partial_files(folder)
            self._repair()
        except BaseException:
            self._unlock()
            raise

    def _repair(self) -> None:
        """Cut off what was written and not committed."""
        if self._record.num_frames == 0:
            return  # whatever is there, the first commit writes over it
        for path, length in self._record.arrays().items():
            try:
                array = self._group[path].with_config(_ARRAY_CONFIG)
            except KeyError as error:
                if length > 0:
                    raise ValueError(
                        f"{self.path}: array {path!r} is missing, {length} rows are committed"
                    ) from error
                continue
            if array.shape[0] < length:
                raise ValueError(
                    f"{self.path}: array {path!r} holds {array.shape[0]} rows, {length} are committed"
                )
            if array.shape[0] > length:
                array.resize((length, *array.shape[1:]))
            self._arrays[path] = array

    # ------------------------------------------------------------------ adding
    def append(self, data: AtomicData | Batch) -> None:
        """Add one structure, or those of a batch; they are copied, and committed with the next :meth:`commit`."""
        frames = (
            frames_from_batch(data, self._fields)
            if isinstance(data, Batch)
            else frames_from_data(data, self._fields)
        )
        self._add(frames)

    def write(self, data: Batch | Iterable[AtomicData]) -> int:
        """Add many structures at once and commit them; returns their number."""
        if isinstance(data, Batch):
            self.append(data)
            self.commit()
            return data.num_graphs
        count = 0
        structures = iter(data)
        while group := list(islice(structures, _GROUP)):
            count += len(group)
            for run in _same_fields(group):
                try:
                    batch = Batch.from_data_list(run)
                except ValueError:
                    # Types or shapes differ: one by one, each is converted or refused by its own number.
                    for structure in run:
                        self._add(frames_from_data(structure, self._fields), bulk=True)
                else:
                    self._add(frames_from_batch(batch, self._fields), bulk=True)
        self.commit()
        return count

    def _add(self, frames: Frames, *, bulk: bool = False) -> None:
        if self._closed:
            raise ValueError(f"the writer of {self.path} is closed")
        if frames.num_frames == 0:
            return
        self._check(frames)
        self._buffer.append(frames)
        self._buffered_frames += frames.num_frames
        self._buffered_bytes += frames.nbytes
        max_frames, max_bytes, max_seconds = self._limits
        late = self._buffered_frames >= max_frames or time.monotonic() - self._last_commit >= max_seconds
        if self._buffered_bytes >= max_bytes or (late and not bulk):
            self.commit()

    def _check(self, frames: Frames) -> None:
        """Fit the columns to the fields of the store, declaring new ones; refuse what would lose something."""
        number = self._record.num_frames + self._buffered_frames
        declared: dict[str, StoredField] = {}
        for name, column in frames.columns.items():
            level, shape, scalar = frames.levels[name], column.shape[1:], name in frames.scalars
            stored = self._record.fields.get(name)
            if stored is None:
                dtype = self._dtypes.get(name, column.dtype)
                stored = declared[name] = StoredField(level, dtype.name, shape, scalar)
            if (stored.level, stored.shape, stored.scalar) != (level, shape, scalar):
                raise ValueError(
                    f"{self.path}: field {name!r} of frame {number} has shape {_row(level, shape, scalar)}, the store "
                    f"has {_row(stored.level, stored.shape, stored.scalar)}"
                )
            target = np.dtype(stored.dtype)
            if column.dtype != target:
                if name not in self._dtypes and not np.can_cast(column.dtype, target, "safe"):
                    raise ValueError(
                        f"{self.path}: field {name!r} of frame {number} is {column.dtype}, the store has {target}; "
                        f"convert it first, or pass dtypes={{{name!r}: {target.name!r}}} to allow it"
                    )
                frames.columns[name] = column.astype(target)
        self._record.fields.update(declared)

    # ------------------------------------------------------------------ committing
    @property
    def num_committed(self) -> int:
        """Number of structures that readers see and that survive a crash."""
        return self._record.num_frames

    def __len__(self) -> int:
        """Number of structures committed and waiting."""
        return self._record.num_frames + self._buffered_frames

    def commit(self) -> None:
        """Write what waits; afterwards readers see it."""
        self._last_commit = time.monotonic()
        if not self._buffer:
            return
        record, buffer = self._record, self._buffer
        for name, stored in record.fields.items():
            column = [self._column(frames, name, stored) for frames in buffer]
            self._extend(
                stored.path(name), record.rows(stored.level), np.concatenate(column), name=name, stored=stored
            )
        num_nodes = np.concatenate([frames.num_nodes for frames in buffer])
        num_edges = np.concatenate([frames.num_edges for frames in buffer])
        info = [text for frames in buffer for text in frames.info]
        sizes = {"node": num_nodes, "edge": num_edges, "info": np.array([len(text) for text in info])}
        for level, counts in sizes.items():
            # The first pointer, 0, is written with the first frames.
            pointers = record.rows(level) + np.concatenate([[0], np.cumsum(counts)])
            self._extend(POINTERS[level], record.num_frames, pointers.astype(np.int64))
        signatures = list(record.signatures)
        numbers = np.concatenate(
            [np.full(f.num_frames, _number(signatures, f), dtype=np.int32) for f in buffer]
        )
        self._extend(SIGNATURE, record.num_frames, numbers)
        self._extend(INFO, record.num_info, np.frombuffer(b"".join(info), dtype=np.uint8))
        committed = Record(
            num_frames=record.num_frames + len(num_nodes),
            num_nodes=record.num_nodes + int(num_nodes.sum()),
            num_edges=record.num_edges + int(num_edges.sum()),
            num_info=record.num_info + sum(map(len, info)),
            fields=record.fields,
            signatures=signatures,
        )
        self._group.attrs[RECORD_KEY] = committed.to_json()
        self._record = committed
        self._buffer, self._buffered_frames, self._buffered_bytes = [], 0, 0

    def _column(self, frames: Frames, name: str, stored: StoredField) -> np.ndarray:
        if name in frames.columns:
            return frames.columns[name]
        return filler(name, np.dtype(stored.dtype), frames.rows(stored.level), stored.shape)

    def _extend(
        self, path: str, start: int, rows: np.ndarray, *, name: str = "", stored: StoredField | None = None
    ) -> None:
        """Write ``rows`` behind the first ``start`` rows of an array."""
        array = self._arrays.get(path)
        if array is None:
            array = self._create(path, rows.dtype, (start + len(rows), *rows.shape[1:]))
            if stored is not None:
                _backfill(array, name, stored, start)
            self._arrays[path] = array
        elif len(rows):
            array.resize((start + len(rows), *rows.shape[1:]))
        if rows.size:
            array[start : start + len(rows)] = rows

    def _create(self, path: str, dtype: np.dtype, shape: Sequence[int]) -> Any:
        tail = [max(1, n) for n in shape[1:]]
        chunk = max(1, self._chunk_bytes // (dtype.itemsize * math.prod(tail)))
        shards = (chunk * self._chunks_per_shard, *tail) if self._chunks_per_shard > 1 else None
        options = {
            "shape": shape,
            "dtype": dtype,
            "chunks": (chunk, *tail),
            "shards": shards,
            "compressors": self._compressors,
            "fill_value": 0,
            "config": _ARRAY_CONFIG,
        }
        try:
            return self._group.create_array(path, **options)
        except import_zarr().errors.ContainsArrayError:
            # What a crash left of an array that was never committed.
            return self._group.create_array(path, overwrite=True, **options)

    # ------------------------------------------------------------------ closing
    def close(self) -> None:
        """Commit what waits and let the next writer in; closing twice does nothing."""
        if self._closed:
            return
        try:
            self.commit()
        finally:
            self._closed = True
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _backfill(array: Any, name: str, stored: StoredField, rows: int) -> None:
    """First rows of a new field, for the frames that were there before it."""
    step = (array.shards or array.chunks)[0]
    if 0 in stored.shape:
        return
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        array[start:stop] = filler(name, array.dtype, stop - start, stored.shape)


def _same_fields(group: Sequence[AtomicData]) -> list[list[AtomicData]]:
    """Consecutive structures that have the same fields."""
    runs: list[list[AtomicData]] = []
    for data in group:
        if not runs or runs[-1][-1]._levels != data._levels or runs[-1][-1]._scalars != data._scalars:
            runs.append([])
        runs[-1].append(data)
    return runs


def _number(signatures: list[list[str]], frames: Frames) -> int:
    names = sorted(frames.columns)
    if names not in signatures:
        signatures.append(names)
    return signatures.index(names)


def _row(level: Level, shape: Sequence[int], scalar: bool) -> str:
    return "[]" if scalar else f"[num_{level}s{''.join(f', {n}' for n in shape)}]"


def _numpy_dtype(dtype: Any) -> np.dtype:
    if isinstance(dtype, torch.dtype):
        return torch.empty(0, dtype=dtype).numpy().dtype
    return np.dtype(dtype)


def _codecs(compressor: Any) -> tuple[Any, ...]:
    codecs = import_zarr().codecs
    known = {
        "zstd": lambda: codecs.ZstdCodec(level=1),
        "blosc": lambda: codecs.BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle"),
        "gzip": lambda: codecs.GzipCodec(level=5),
    }
    if compressor == "none":
        return (codecs.Crc32cCodec(),)
    if isinstance(compressor, str):
        if compressor not in known:
            raise ValueError(
                f"compressor must be one of {', '.join(known)}, 'none' or a zarr codec, got {compressor!r}"
            )
        compressor = known[compressor]()
    return (compressor, codecs.Crc32cCodec())
