"""Opening Zarr stores, and what can go wrong in them."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nvalchemi._optional import import_extra


class CorruptChunkError(ValueError):
    """A chunk of a store is missing, truncated or fails its checksum; the message names store, array and chunk."""


def import_zarr() -> Any:
    """The ``zarr`` package; ``ImportError`` naming the extra where it is absent or too old."""
    zarr = import_extra("zarr", extra="zarr", needed_by="a Zarr store")
    if int(zarr.__version__.split(".")[0]) < 3:
        raise ImportError(
            f"Zarr stores need zarr 3 or newer, found {zarr.__version__}: pip install 'nvalchemi[zarr]'"
        )
    return zarr


def open_store(store: Any, *, read_only: bool, storage_options: Mapping[str, Any] | None = None) -> Any:
    """A Zarr store from a path, a URL that fsspec knows, or a store.

    A store opened for reading raises ``FileNotFoundError`` for a missing chunk, where Zarr alone would return zeros.
    """
    zarr = import_zarr()
    if isinstance(store, str | os.PathLike):
        text = os.fspath(store)
        local = local_path(text)
        if local is not None:
            if read_only and not local.is_dir():
                raise FileNotFoundError(f"no such store: {local}")
            opened = zarr.storage.LocalStore(local, read_only=read_only)
        else:
            options = dict(storage_options or {})
            opened = zarr.storage.FsspecStore.from_url(text, storage_options=options, read_only=read_only)
    elif isinstance(store, zarr.abc.store.Store):
        opened = store
    else:
        raise TypeError(f"a store is a path, a URL or a zarr store, not a {type(store).__name__}")
    return _strict_store_class()(opened) if read_only else opened


def open_root(store: Any, name: str, *, mode: str = "r") -> Any:
    """Root group of an open store; ``FileNotFoundError`` where there is none, ``CorruptChunkError`` for damage."""
    zarr = import_zarr()
    try:
        return zarr.open_group(store, mode=mode)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no Zarr store at {name}") from error
    # A damaged zarr.json raises whatever the JSON parser or Zarr make of it; it is named and chained.
    except Exception as error:
        raise CorruptChunkError(
            f"{name}: zarr.json of the store cannot be read: {type(error).__name__}: {error}"
        ) from error


def local_path(store: Any) -> Path | None:
    """Folder of a store in the local file system, ``None`` for any other store."""
    zarr = import_zarr()
    if isinstance(store, zarr.storage.LocalStore):
        return Path(store.root)
    if isinstance(store, os.PathLike):
        return Path(store)
    if not isinstance(store, str):
        return None
    scheme, _, rest = store.partition("://")
    if not rest:
        return Path(store)
    # fsspec would write file:// URLs in place, without the rename that makes a chunk appear whole.
    return Path(urlsplit(store).path) if scheme == "file" else None


@cache
def _strict_store_class() -> Any:
    zarr = import_zarr()

    class StrictStore(zarr.storage.WrapperStore):  # type: ignore[misc, name-defined]
        """Read-only view of a store in which a chunk that is not there is an error."""

        async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
            value = await self._store.get(key, prototype, byte_range)
            if value is None and ("/c/" in key or key.endswith("/c")):
                raise FileNotFoundError(f"no such chunk: {key}")
            return value

    return StrictStore


# ---------------------------------------------------------------------- writing
def lock_folder(folder: Path) -> int | None:
    """Lock a folder against a second writer; returns the file descriptor that holds the lock.

    The operating system drops the lock when the process ends, however it ends. Where there are no such locks (Windows,
    remote stores) the result is ``None`` and nothing is locked.
    """
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RuntimeError(
            f"{folder} is being written by another writer; a store takes one at a time"
        ) from error
    return descriptor


def is_occupied(path: Path) -> bool:
    """Whether something is at a path that a new store must not replace.

    An empty folder is not, nor one in which a store was killed while it wrote its very first file.
    """
    if path.is_dir():
        return any(not re.fullmatch(r"zarr\.[0-9a-f]{32}\.partial", entry.name) for entry in path.iterdir())
    return path.exists()


def remove_partial_files(folder: Path) -> None:
    """Remove what Zarr's local store leaves when it is killed between writing a file and renaming it."""
    for leftover in folder.rglob("*.partial"):
        with suppress(FileNotFoundError):
            leftover.unlink()


# ---------------------------------------------------------------------- info
def encode_info(info: Mapping[str, Any]) -> bytes:
    """JSON of one structure's ``info`` (arrays and ASE objects as ASE writes them); empty for an empty one."""
    if not info:
        return b""
    try:
        return json.dumps(info).encode()
    except TypeError:
        pass  # not plain JSON: ASE's encoder knows more types
    from ase.io.jsonio import encode

    try:
        return encode(dict(info)).encode()
    except (TypeError, ValueError) as error:
        kinds = {key: type(value).__name__ for key, value in info.items()}
        raise ValueError(f"info cannot be written as JSON: {error}; it holds {kinds}") from error


def decode_info(text: bytes) -> dict[str, Any]:
    """Inverse of :func:`encode_info`."""
    if not text:
        return {}
    if b'"__' in text:
        from ase.io.jsonio import object_hook

        # Not ASE's decode, which makes integers of keys that look like one.
        info: Any = json.loads(text, object_hook=object_hook)
    else:
        info = json.loads(text)
    if "constraints" in info:
        from ase.constraints import dict2constraint

        info["constraints"] = [dict2constraint(c) if isinstance(c, dict) else c for c in info["constraints"]]
    return info
