"""Reading structures from a Zarr store: one, many at once, all in order."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self, overload

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data._numbers import Indices, position, positions
from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.schema import FIELDS, Level
from nvalchemi.data.zarr.chunks import ChunkCache, ChunkedRows
from nvalchemi.data.zarr.record import INFO, POINTERS, SIGNATURE, Record, StoredField
from nvalchemi.data.zarr.stores import CorruptChunkError, decode_info, open_root, open_store

# Structures read at a time when iterating one by one.
_ITERATION_BATCH = 1024


class AtomicDataZarrReader:
    """Structures of a Zarr store, by number.

    Parameters
    ----------
    store : path, URL or zarr store
        As for :class:`AtomicDataZarrWriter`.
    fields : sequence of str, optional
        Fields to read (``positions`` and ``atomic_numbers`` always are). Default: all.
    dtype : torch.dtype, optional
        Floating-point type of the result. Default: as stored.
    cache_bytes : int, default 134217728
        Memory for decoded chunks.
    storage_options : mapping, optional
        Options of the fsspec file system of a URL.

    Raises
    ------
    FileNotFoundError
        No such store.
    ValueError
        The store holds no structures in a format that this version reads, or lacks a field asked for.
    ImportError
        The extra ``zarr`` is not installed.

    Notes
    -----
    ``reader[i]`` is an :class:`AtomicData`; ``reader[slice | list | array]`` a :class:`Batch`. The reader sees the
    structures that were committed when it was opened; :meth:`refresh` shows it later ones. Any number of readers,
    threads and processes may read while one writer appends. A reader can be pickled; the copy opens the store again.

    Examples
    --------
    >>> import tempfile, torch
    >>> from nvalchemi.data.zarr import AtomicDataZarrReader, write_zarr
    >>> path = tempfile.mkdtemp() + "/atoms.zarr"
    >>> atom = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([18]), energy=-0.5)
    >>> write_zarr(path, [atom, atom])
    2
    >>> reader = AtomicDataZarrReader(path)
    >>> reader[0].energy.item(), reader[:].num_graphs
    (-0.5, 2)
    """

    def __init__(
        self,
        store: Any,
        *,
        fields: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        cache_bytes: int = 1 << 27,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._source = os.fspath(store) if isinstance(store, os.PathLike) else store
        self._options: dict[str, Any] = {
            "fields": fields,
            "dtype": dtype,
            "cache_bytes": cache_bytes,
            "storage_options": storage_options,
        }
        self.path = str(store)
        self.cache_bytes = cache_bytes
        self._dtype = dtype
        self._chosen = None if fields is None else {"positions", "atomic_numbers", *fields}
        self._cache = ChunkCache(cache_bytes)
        self._store = open_store(store, read_only=True, storage_options=storage_options)
        self._record = Record()
        self._arrays: dict[str, ChunkedRows] = {}
        self.refresh()
        unknown = (self._chosen or set()) - self._record.fields.keys()
        if unknown and len(self):
            raise ValueError(
                f"{self.path} has no field {sorted(unknown)}; it has {', '.join(self._record.fields)}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self._source, "options": self._options, "length": len(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["source"], **state["options"])
        # The copy sees the structures that the original sees, so that sizes and indices agree between processes.
        self._length = state["length"]

    def refresh(self) -> int:
        """Look for structures committed since; returns how many there are now."""
        self._group = open_root(self._store, self.path)
        old, self._record = self._record, Record.from_json(self._group.attrs.asdict(), self.path)
        grown = {
            path: array
            for path, array in self._arrays.items()
            if array.length != self._record.arrays().get(path)
        }
        # The last chunk of each array has more rows now.
        self._cache.drop(
            lambda path, number: (
                path in grown and (number + 1) * grown[path].rows_per_chunk > grown[path].length
            )
        )
        for path in grown:
            del self._arrays[path]
        if self._record.num_frames < old.num_frames:
            self._cache.drop(lambda path, number: True)
            self._arrays.clear()
        self._length = self._record.num_frames
        self._names = [
            (name, stored, stored.path(name))
            for name, stored in self._record.fields.items()
            if self._chosen is None or name in self._chosen
        ]
        self._present = [frozenset(names) for names in self._record.signatures]
        self._shared: dict[
            int, tuple[dict[str, Level], frozenset[str], list[tuple[str, StoredField, str]]]
        ] = {}
        return self._length

    # ------------------------------------------------------------------ what is there
    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"AtomicDataZarrReader({self.path!r}, {len(self)} structures; {', '.join(self.fields)})"

    @property
    def fields(self) -> dict[str, Level]:
        """Name and level of every field that is read."""
        return {name: stored.level for name, stored, _ in self._names}

    def counts(self) -> dict[str, int]:
        """How many structures have each field."""
        numbers = np.bincount(self._rows(SIGNATURE).span(0, len(self)), minlength=len(self._present))
        return {
            name: int(sum(n for n, present in zip(numbers, self._present, strict=True) if name in present))
            for name, _, _ in self._names
        }

    def num_nodes(self) -> np.ndarray:
        """Number of atoms of each structure, int64 [num_frames]."""
        return np.diff(self._rows(POINTERS["node"]).span(0, len(self) + 1))

    def num_edges(self) -> np.ndarray:
        """Number of stored edges of each structure, int64 [num_frames]."""
        return np.diff(self._rows(POINTERS["edge"]).span(0, len(self) + 1))

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Number of atoms and of stored edges of one structure, without reading it."""
        index = self._position(index)
        (n0, n1), (e0, e1) = (
            self._rows(POINTERS[level]).span(index, index + 2).tolist() for level in ("node", "edge")
        )
        return n1 - n0, e1 - e0

    def column(self, name: str) -> Tensor:
        """A system field of all structures, [num_frames, ...]; NaN or 0 where a structure does not have it."""
        stored = self._record.fields.get(name)
        if stored is None or stored.level != "system":
            raise ValueError(
                f"{self.path} has no system field {name!r}; it has {', '.join(self._record.fields)}"
            )
        return self._tensor(self._rows(stored.path(name)).span(0, len(self)))

    def system_ids(self) -> list[int]:
        """Whose frames there are: every ``system_id``, ascending."""
        return np.unique(self._known("system_id")[1]).tolist()

    def trajectory_index(self, system_id: int) -> np.ndarray:
        """Numbers of the frames of one system by their ``system_step``, for :meth:`read` and datasets.

        Raises
        ------
        ValueError
            There is no frame of this system, or there are two of the same step: they are of two runs that were written
            to one store, and no trajectory.
        """
        frames, ids = self._known("system_id")
        frames = frames[ids == system_id]
        if len(frames) == 0:
            raise ValueError(f"{self.path} has no frame of system_id {system_id}")
        steps = self._steps(frames)
        order = np.argsort(steps, kind="stable")
        frames, steps = frames[order], steps[order]
        repeated = np.flatnonzero((steps[1:] == steps[:-1]) & (steps[1:] >= 0))
        if len(repeated):
            first = repeated[0]
            raise ValueError(
                f"{self.path}: frames {frames[first]} and {frames[first + 1]} are both step {steps[first]} of "
                f"system_id {system_id}, so these are frames of several runs, and no trajectory; read them by "
                "number"
            )
        return frames

    def last_steps(self) -> dict[int, int]:
        """Last ``system_step`` of each ``system_id``; −1 for a system whose frames say no step."""
        frames, ids = self._known("system_id")
        systems, which = np.unique(ids, return_inverse=True)
        last = np.full(len(systems), -1)
        np.maximum.at(last, which, self._steps(frames))
        return dict(zip(systems.tolist(), last.tolist(), strict=True))

    def _steps(self, frames: np.ndarray) -> np.ndarray:
        """``system_step`` of frames, −1 where there is none."""
        with_step, known = self._known("system_step")
        steps = np.full(len(self), -1)
        steps[with_step] = known
        return steps[frames]

    def trajectory(
        self, system_id: int, *, on_error: Literal["raise", "skip"] = "raise"
    ) -> Iterator[AtomicData]:
        """Frames of one system in the order of its steps, as a run of many systems has written them side by side.

        Options as in :meth:`iter_batches`, errors as in :meth:`trajectory_index`.
        """
        return self.frames(self.trajectory_index(system_id), on_error=on_error)

    def _known(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Structures that have a whole number as system field ``name``, and these numbers."""
        stored = self._record.fields.get(name)
        if stored is None or stored.level != "system" or len(self) == 0:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        having = np.array([name in present for present in self._present])
        frames = np.flatnonzero(having[self._rows(SIGNATURE).span(0, len(self))])
        values = self._rows(stored.path(name)).span(0, len(self)).reshape(len(self))
        return frames, values[frames]

    @property
    def frames_per_chunk(self) -> int:
        """About how many neighbouring structures share a chunk of the largest field."""
        largest = max(
            (self._rows(path) for _, _, path in self._names), key=lambda rows: rows.nbytes, default=None
        )
        if largest is None or len(self) == 0:
            return 1
        return max(1, largest.rows_per_chunk * len(self) // max(1, largest.length))

    @property
    def nbytes(self) -> int:
        """Memory that all structures would take."""
        return sum(self._rows(path).nbytes for _, _, path in self._names)

    # ------------------------------------------------------------------ reading
    @overload
    def __getitem__(self, index: int) -> AtomicData: ...
    @overload
    def __getitem__(self, index: slice | Indices) -> Batch: ...
    def __getitem__(self, index: int | slice | Indices) -> AtomicData | Batch:
        if isinstance(index, int | np.integer):
            return self._one(self._position(int(index)))
        if isinstance(index, slice):
            return self.read(np.arange(len(self))[index])
        return self.read(index)

    def read(self, index: Indices, *, missing: Literal["error", "fill"] = "error") -> Batch:
        """Many structures as one batch, in the order asked for, with as few reads as the chunks allow.

        Parameters
        ----------
        index : sequence of int
            Numbers of the structures (repeats and negative ones allowed), or a mask of booleans.
        missing : {"error", "fill"}, default "error"
            What to do with fields that only some of them have, as in :meth:`Batch.from_data_list`.
        """
        if missing not in ("error", "fill"):
            raise ValueError(f"missing must be 'error' or 'fill', got {missing!r}")
        idx = self._index(index)
        fields = self._fields_of(idx, missing)
        node_starts, node_stops = self._ranges("node", idx)
        ptr = _pointers(node_starts, node_stops)
        with_edges = any(stored.level == "edge" for _, stored, _ in fields)
        edge_starts, edge_stops = self._ranges("edge", idx) if with_edges else (idx, idx)
        edge_ptr = _pointers(edge_starts, edge_stops)
        node_runs, edge_runs = _runs(node_starts, node_stops), _runs(edge_starts, edge_stops)
        tensors: dict[str, Tensor] = {}
        for name, stored, path in fields:
            rows = self._rows(path)
            if stored.level == "system":
                tensor = self._tensor(rows.take(idx))
            else:
                tensor = self._tensor(rows.spans(*(node_runs if stored.level == "node" else edge_runs)))
                if stored.level == "edge" and name in FIELDS and FIELDS[name].refers_to_atoms:
                    first = torch.repeat_interleave(ptr[:-1], edge_ptr.diff()).to(tensor.dtype)
                    tensor += first.reshape(-1, *[1] * (tensor.ndim - 1))
            tensors[name] = tensor
        levels: dict[str, Level] = {name: stored.level for name, stored, _ in fields}
        scalars = frozenset(name for name, stored, _ in fields if stored.scalar)
        return Batch._make(ptr, edge_ptr if with_edges else None, levels, tensors, scalars, self._info(idx))

    def read_parts(self, index: Indices) -> list[Batch]:
        """Many structures in as many batches as there are changes in the set of fields from one to the next."""
        return [self.read(part) for part in self._same_fields(self._index(index))]

    def __iter__(self) -> Iterator[AtomicData]:
        return self.frames()

    def frames(
        self,
        index: slice | Sequence[int] | np.ndarray | None = None,
        *,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> Iterator[AtomicData]:
        """Structures one at a time (default: all in order); options as in :meth:`iter_batches`."""
        if index is None:
            index = slice(None)
        idx = np.arange(len(self))[index] if isinstance(index, slice) else self._index(index)
        for batch in self._pieces(idx, _ITERATION_BATCH, on_error, "error"):
            yield from batch.to_data_list()

    def iter_batches(
        self,
        batch_size: int = _ITERATION_BATCH,
        *,
        on_error: Literal["raise", "skip"] = "raise",
        missing: Literal["error", "fill"] = "error",
    ) -> Iterator[Batch]:
        """All structures in order, ``batch_size`` at a time.

        Parameters
        ----------
        batch_size : int, default 1024
            Structures per batch; fewer where ``on_error="skip"`` leaves some out or, unless ``missing="fill"``, where
            the set of fields changes.
        on_error : {"raise", "skip"}, default "raise"
            A structure in a damaged chunk is an error, or is left out; those left out are counted in one
            ``UserWarning`` at the end.
        missing : {"error", "fill"}, default "error"
            ``"fill"`` batches structures with different fields together, as in :meth:`read`.
        """
        yield from self._pieces(np.arange(len(self)), batch_size, on_error, missing)

    def _pieces(
        self, idx: np.ndarray, size: int, on_error: str, missing: Literal["error", "fill"]
    ) -> Iterator[Batch]:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        skipped: list[int] = []
        first_error: CorruptChunkError | None = None
        for start in range(0, len(idx), size):
            piece = idx[start : start + size]
            try:
                for part in [piece] if missing == "fill" else self._same_fields(piece):
                    yield self.read(part, missing=missing)
                continue
            except CorruptChunkError as error:
                if on_error == "raise":
                    raise
                first_error = first_error or error
            bad = [i for i in piece.tolist() if not self._intact(i)]
            skipped += bad
            good = piece[~np.isin(piece, bad)]
            for part in [good] if missing == "fill" and len(good) else self._same_fields(good):
                yield self.read(part, missing=missing)
        if skipped:
            shown = ", ".join(map(str, skipped[:8])) + (" …" if len(skipped) > 8 else "")
            warnings.warn(
                f"skipped {len(skipped)} structure(s) in damaged chunks: {shown}; first: {first_error}",
                UserWarning,
                stacklevel=3,
            )

    def _same_fields(self, idx: np.ndarray) -> list[np.ndarray]:
        """Consecutive structures with the same fields."""
        signature = self._rows(SIGNATURE).take(idx)
        return [part for part in np.split(idx, np.flatnonzero(np.diff(signature)) + 1) if len(part)]

    def _intact(self, index: int) -> bool:
        try:
            self._one(index)
        except CorruptChunkError:
            return False
        return True

    def _one(self, index: int) -> AtomicData:
        levels, scalars, fields = self._layout(int(self._rows(SIGNATURE).span(index, index + 1)[0]))
        n0, n1 = self._rows(POINTERS["node"]).span(index, index + 2).tolist()
        e0 = e1 = -1
        data = object.__new__(AtomicData)
        attributes = vars(data)
        attributes["_levels"] = dict(levels)
        attributes["_scalars"] = scalars
        for name, stored, path in fields:
            rows = self._rows(path)
            if stored.level == "node":
                values = rows.span(n0, n1)
            elif stored.level == "system":
                values = rows.span(index, index + 1)
                values = values.reshape(()) if stored.scalar else values
            else:
                if e0 < 0:
                    e0, e1 = self._rows(POINTERS["edge"]).span(index, index + 2).tolist()
                values = rows.span(e0, e1)
            attributes[name] = self._tensor(values)
        attributes["_info"] = self._info(np.array([index]))[0]
        return data

    # ------------------------------------------------------------------ parts
    def _rows(self, path: str) -> ChunkedRows:
        rows = self._arrays.get(path)
        if rows is None:
            try:
                array = self._group[path]
            # A damaged zarr.json raises whatever the JSON parser or Zarr make of it; it is named and chained.
            except Exception as error:
                raise CorruptChunkError(
                    f"{self.path}: array {path!r} cannot be opened: {type(error).__name__}: {error}"
                ) from error
            rows = ChunkedRows(self.path, path, array, self._record.arrays()[path], self._cache)
            self._arrays[path] = rows
        return rows

    def _layout(
        self, signature: int
    ) -> tuple[dict[str, Level], frozenset[str], list[tuple[str, StoredField, str]]]:
        """Levels, scalars and stored fields of the structures of one signature."""
        if signature not in self._shared:
            fields = [entry for entry in self._names if entry[0] in self._present[signature]]
            levels: dict[str, Level] = {name: stored.level for name, stored, _ in fields}
            scalars = frozenset(name for name, stored, _ in fields if stored.scalar)
            self._shared[signature] = levels, scalars, fields
        return self._shared[signature]

    def _fields_of(self, idx: np.ndarray, missing: str) -> list[tuple[str, StoredField, str]]:
        """Fields of a batch of these structures, by the rules of :meth:`Batch.from_data_list`."""
        signatures = self._rows(SIGNATURE).take(idx)
        kinds = np.unique(signatures).tolist()
        if len(kinds) == 1:
            return self._layout(kinds[0])[2]
        present = [self._present[kind] for kind in kinds]
        fields: list[tuple[str, StoredField, str]] = []
        for entry in self._names:
            name, stored, _ = entry
            having = [name in names for names in present]
            if not all(having):
                known = FIELDS.get(name)
                if stored.level == "edge" or not any(having):
                    continue
                if missing == "error" and (known is None or known.neutral is None):
                    lacking = [kind for kind, has in zip(kinds, having, strict=True) if not has]
                    frames = idx[np.isin(signatures, lacking)][:8].tolist()
                    raise ValueError(
                        f"{self.path}: field {name!r} is missing in structures {frames} while others asked for have "
                        f"it; read them apart, leave it out with fields=…, or pass missing='fill'"
                    )
            fields.append(entry)
        return fields

    def _ranges(self, level: str, idx: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pointers = self._rows(POINTERS[level])
        if len(idx) and idx[-1] - idx[0] == len(idx) - 1 and (np.diff(idx) == 1).all():
            both = pointers.span(int(idx[0]), int(idx[-1]) + 2)
            return both[:-1], both[1:]
        return pointers.take(idx), pointers.take(idx + 1)

    def _info(self, idx: np.ndarray) -> list[dict[str, Any]]:
        if self._record.num_info == 0:
            return [{} for _ in idx]
        starts, stops = self._ranges("info", idx)
        text = self._rows(INFO).spans(*_runs(starts, stops)).tobytes()
        ends = np.cumsum(stops - starts).tolist()
        return [decode_info(text[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]

    def _tensor(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    def _position(self, index: int) -> int:
        return position(index, len(self), self.path)

    def _index(self, index: Indices) -> np.ndarray:
        idx = positions(index, len(self), self.path)
        if len(index) == 0:
            raise IndexError("no structures asked for; a batch has at least one")
        return idx

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._cache.drop(lambda path, number: True)


def _pointers(starts: np.ndarray, stops: np.ndarray) -> Tensor:
    ptr = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(stops - starts, out=ptr[1:])
    return torch.from_numpy(ptr)


def _runs(starts: np.ndarray, stops: np.ndarray) -> tuple[list[int], list[int]]:
    """The same rows in the fewest ranges: neighbours are joined."""
    breaks = np.flatnonzero(starts[1:] != stops[:-1])
    return starts[np.concatenate([[0], breaks + 1])].tolist(), stops[
        np.concatenate([breaks, [len(stops) - 1]])
    ].tolist()
