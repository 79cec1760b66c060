"""Structures in Zarr stores; the layout is described in ``docs/zarr_format.md``."""

from nvalchemi.data.zarr.files import append_zarr, iread_zarr, write_zarr
from nvalchemi.data.zarr.reader import AtomicDataZarrReader
from nvalchemi.data.zarr.stores import CorruptChunkError
from nvalchemi.data.zarr.writer import AtomicDataZarrWriter

__all__ = [
    "AtomicDataZarrReader",
    "AtomicDataZarrWriter",
    "CorruptChunkError",
    "append_zarr",
    "iread_zarr",
    "write_zarr",
]
