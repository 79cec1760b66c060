"""Rows of chunked arrays through a cache of decoded chunks."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

import numpy as np

from nvalchemi.data.zarr.stores import CorruptChunkError

# Chunks read in one call: enough for Zarr to decode them in parallel, few enough to bound the memory of the call.
_CHUNKS_PER_READ = 32


class ChunkCache:
    """Decoded chunks, the least recently used dropped first; may be used from several threads.

    Parameters
    ----------
    max_bytes : int
        Memory to stay within. The chunks of one request are kept until it is answered, whatever their size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._chunks: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def get(self, path: str, number: int) -> np.ndarray | None:
        """A chunk, if it is here."""
        key = (path, number)
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._chunks.move_to_end(key)
            return chunk

    def put(self, path: str, number: int, chunk: np.ndarray) -> None:
        """Keep a chunk."""
        with self._lock:
            self._drop((path, number))
            self._chunks[path, number] = chunk
            self._bytes += chunk.nbytes
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._chunks)))

    def drop(self, condition: Callable[[str, int], bool]) -> None:
        """Forget the chunks for which ``condition(path, number)`` holds."""
        with self._lock:
            for key in [key for key in self._chunks if condition(*key)]:
                self._drop(key)

    def _drop(self, key: tuple[str, int]) -> None:
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self._bytes -= chunk.nbytes


class ChunkedRows:
    """The first ``length`` rows of an array of a store.

    Parameters
    ----------
    store : str
        Name of the store, for messages.
    path : str
        Path of the array in the store.
    array : zarr.Array
        The array.
    length : int
        Number of rows that are committed.
    cache : ChunkCache
        Shared with the other arrays of the store.
    """

    def __init__(self, store: str, path: str, array: Any, length: int, cache: ChunkCache) -> None:
        if array.shape[0] < length:
            raise ValueError(f"{store}: array {path!r} holds {array.shape[0]} rows, {length} are committed")
        self._store, self._path, self._array, self._cache = store, path, array, cache
        self.length = length
        self.rows_per_chunk: int = array.chunks[0]
        self.shape: tuple[int, ...] = array.shape[1:]
        self.dtype: np.dtype = array.dtype

    @property
    def nbytes(self) -> int:
        """Memory of all rows, decoded."""
        return self.length * self.dtype.itemsize * int(np.prod(self.shape))

    def span(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop``, copied."""
        size = self.rows_per_chunk
        first = start // size
        if stop <= (first + 1) * size and start < stop:
            begin = first * size
            return self._chunk(first)[start - begin : stop - begin].copy()
        return self.spans([start], [stop])

    def spans(self, starts: Iterable[int], stops: Iterable[int]) -> np.ndarray:
        """Rows of several ranges, one range after another."""
        size = self.rows_per_chunk
        pieces: list[tuple[int, int, int]] = []
        for start, stop in zip(starts, stops, strict=True):
            while start < stop:
                number = start // size
                end = min(stop, (number + 1) * size)
                pieces.append((number, start - number * size, end - number * size))
                start = end
        if not pieces or 0 in self.shape:
            rows = sum(stop - start for _, start, stop in pieces)
            return np.empty((rows, *self.shape), dtype=self.dtype)
        chunks = self._chunks({number for number, _, _ in pieces})
        return np.concatenate([chunks[number][start:stop] for number, start, stop in pieces])

    def take(self, index: np.ndarray) -> np.ndarray:
        """Single rows by number (int64 array), copied."""
        if 0 in self.shape or len(index) == 0:
            return np.empty((len(index), *self.shape), dtype=self.dtype)
        numbers, within = np.divmod(index, self.rows_per_chunk)
        first = int(numbers[0])
        if (numbers == first).all():
            return self._chunk(first)[within]
        out = np.empty((len(index), *self.shape), dtype=self.dtype)
        for number, chunk in self._chunks(set(numbers.tolist())).items():
            chosen = numbers == number
            out[chosen] = chunk[within[chosen]]
        return out

    def _chunk(self, number: int) -> np.ndarray:
        chunk = self._cache.get(self._path, number)
        return self._load(number, number + 1)[0] if chunk is None else chunk

    def _chunks(self, numbers: set[int]) -> dict[int, np.ndarray]:
        found: dict[int, np.ndarray] = {}
        absent: list[int] = []
        for number in sorted(numbers):
            chunk = self._cache.get(self._path, number)
            if chunk is None:
                absent.append(number)
            else:
                found[number] = chunk
        while absent:
            # Neighbouring chunks are read in one call.
            count = 1
            while count < min(len(absent), _CHUNKS_PER_READ) and absent[count] == absent[0] + count:
                count += 1
            loaded = self._load(absent[0], absent[0] + count)
            found.update(zip(absent[:count], loaded, strict=True))
            del absent[:count]
        return found

    def _load(self, first: int, last: int) -> list[np.ndarray]:
        """Chunks ``first`` to ``last - 1``, decoded; one that cannot be is named."""
        size = self.rows_per_chunk
        try:
            rows = self._read(first * size, min(last * size, self.length))
        # Codecs raise nearly anything on broken bytes; whatever it is, it is named and chained.
        except Exception as error:
            if last - first > 1:
                return [chunk for number in range(first, last) for chunk in self._load(number, number + 1)]
            raise CorruptChunkError(
                f"{self._store}: array {self._path!r}, chunk {first} (rows {first * size} to "
                f"{min(last * size, self.length) - 1}) cannot be read: {error}"
            ) from error
        if last - first == 1:
            chunks = [rows]
        else:
            # Copies, so that dropping one chunk frees its memory.
            chunks = [rows[start : start + size].copy() for start in range(0, len(rows), size)]
        for number, chunk in enumerate(chunks, start=first):
            self._cache.put(self._path, number, chunk)
        return chunks

    def _read(self, start: int, stop: int) -> np.ndarray:
        # A writer may replace the last shard between a reader's look at its index and at the chunk.
        for _ in range(2 if self._array.shards else 0):
            try:
                return self._array[start:stop]
            except (ValueError, OSError):
                continue
        return self._array[start:stop]
