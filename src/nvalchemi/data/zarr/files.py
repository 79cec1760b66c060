"""Whole stores: written, appended to and read as files of other formats are."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.zarr.reader import AtomicDataZarrReader
from nvalchemi.data.zarr.stores import is_occupied, local_path
from nvalchemi.data.zarr.writer import AtomicDataZarrWriter


def write_zarr(store: Any, data: AtomicData | Batch | Iterable[AtomicData], **options: Any) -> int:
    """Write a whole store; a local one appears whole or not at all, and replaces one of that name.

    Parameters
    ----------
    store : path, URL or zarr store
        Where to.
    data : AtomicData, Batch or iterable of AtomicData
        What to write; an iterable is consumed piece by piece.
    **options
        Options of :class:`AtomicDataZarrWriter` other than ``mode``.

    Returns
    -------
    int
        Number of structures written.
    """
    structures = [data] if isinstance(data, AtomicData) else data
    target = local_path(store) if isinstance(store, str | os.PathLike) else None
    if target is None:
        with AtomicDataZarrWriter(store, mode="w", **options) as writer:
            return writer.write(structures)
    if target.exists() and not (target / "zarr.json").is_file() and is_occupied(target):
        raise FileExistsError(f"{target} exists and is not a Zarr store; nothing was changed")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with AtomicDataZarrWriter(temporary, mode="w", **options) as writer:
            count = writer.write(structures)
        _replace_folder(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return count


def append_zarr(store: Any, data: AtomicData | Batch | Iterable[AtomicData], **options: Any) -> int:
    """Add structures to a store (a new one where there is none); returns how many."""
    with AtomicDataZarrWriter(store, **options) as writer:
        return writer.write([data] if isinstance(data, AtomicData) else data)


def _replace_folder(source: Path, target: Path) -> None:
    if target.exists():
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        target.rename(old)
        source.rename(target)
        shutil.rmtree(old)
    else:
        source.rename(target)


def iread_zarr(
    store: Any,
    index: int | str | slice = ":",
    *,
    on_error: Literal["raise", "skip"] = "raise",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    system_id: int | None = None,
) -> Iterator[AtomicData]:
    """Structures of a store one at a time, as :func:`nvalchemi.data.iread` does for files.

    Parameters
    ----------
    store : path, URL or zarr store
        The store.
    index : int, slice or str, default ":"
        Which structures, as in ASE.
    on_error : {"raise", "skip"}, default "raise"
        A structure in a damaged chunk is an error, or is left out and counted in a ``UserWarning``.
    device, dtype
        Where the tensors go, and their floating-point type (default: as stored).
    system_id : int, optional
        Only the frames of this system, by its steps, instead of ``index``.
    """
    reader = AtomicDataZarrReader(store, dtype=dtype)
    if system_id is not None:
        chosen = reader.trajectory_index(system_id)
    else:
        from ase.utils import string2index

        which = cast(int | slice, string2index(index)) if isinstance(index, str) else index
        chosen = slice(which, which + 1 or None) if isinstance(which, int) else which
    frames = reader.frames(chosen, on_error=on_error)
    return frames if device is None else (data.to(device) for data in frames)
