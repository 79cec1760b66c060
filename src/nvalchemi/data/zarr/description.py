"""What a store holds, from its metadata and as little of its data as that takes."""

from dataclasses import dataclass

import numpy as np

from nvalchemi.data.schema import Level
from nvalchemi.data.zarr.reader import AtomicDataZarrReader

# Rows of atomic numbers looked at in one go.
_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredArray:
    """How one field is stored.

    Attributes
    ----------
    name, level, dtype : str
        The field.
    shape : tuple of int
        Shape of one row.
    frames : int
        Structures that have it.
    chunk_rows : int
        Rows in a chunk.
    chunks_per_shard : int
        Chunks in a file.
    compression : str
        Codecs behind one another.
    nbytes, nbytes_stored : int
        Size of the committed rows in memory, and of the array in the store.
    """

    name: str
    level: Level
    dtype: str
    shape: tuple[int, ...]
    frames: int
    chunk_rows: int
    chunks_per_shard: int
    compression: str
    nbytes: int
    nbytes_stored: int


def describe_arrays(reader: AtomicDataZarrReader) -> list[StoredArray]:
    """All fields of a store that has structures, without reading them."""
    frames = reader.counts()
    out: list[StoredArray] = []
    for name, stored, path in reader._names:
        rows, array = reader._rows(path), reader._group[path]
        shards: tuple[int, ...] | None = array.shards
        codecs = [type(codec).__name__.removesuffix("Codec").lower() for codec in array.compressors]
        out.append(
            StoredArray(
                name=name,
                level=stored.level,
                dtype=stored.dtype,
                shape=() if stored.scalar else stored.shape,
                frames=frames[name],
                chunk_rows=rows.rows_per_chunk,
                chunks_per_shard=1 if shards is None else shards[0] // rows.rows_per_chunk,
                compression="+".join(codecs) or "none",
                nbytes=rows.nbytes,
                nbytes_stored=int(array.nbytes_stored()),
            )
        )
    return out


def count_elements(reader: AtomicDataZarrReader) -> dict[int, int]:
    """Atoms by atomic number, from one pass over the atomic numbers alone."""
    rows = reader._rows("node/atomic_numbers")
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, rows.length, _ROWS):
        found = np.bincount(rows.span(start, min(start + _ROWS, rows.length)), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return {int(z): int(counts[z]) for z in np.flatnonzero(counts)}
