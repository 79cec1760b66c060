"""Checkpoints on disk: directories written whole, checked when read, never executed.

::

    epoch-10/
        manifest.json            format, counters, SHA-256 and size of every other file
        model-<key>.safetensors  weights and buffers of one model
        state.json               everything else; tensors by name
        state.safetensors        those tensors
        spec.json                what the strategy was made of
"""

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from nvalchemi._optional import import_extra
from nvalchemi._tree import unflatten

FORMAT = 1
MANIFEST = "manifest.json"
_TEMPORARY = re.compile(r"^\.(?P<name>.+)\.(tmp|old)-[0-9a-f]{32}$")
_log = logging.getLogger("nvalchemi.training")


class DamagedCheckpointError(ValueError):
    """A checkpoint that is incomplete or not what was written."""


@dataclass
class Snapshot:
    """Everything a checkpoint holds, independent of the objects it was taken from.

    Attributes
    ----------
    counters : dict
        Counters of the strategy.
    weights : dict of str to dict of str to Tensor
        State of each model by its key.
    state, tensors
        The rest, as :func:`~nvalchemi._tree.flatten` gives it.
    spec : dict or None
        What the strategy was made of, as plain values; ``None`` when it cannot be said so.
    """

    counters: dict[str, int]
    weights: dict[str, dict[str, Tensor]]
    state: Any
    tensors: dict[str, Tensor]
    spec: dict[str, Any] | None = field(default=None)

    def tree(self) -> Any:
        """Put the state together again."""
        return unflatten(self.state, self.tensors)


def write_checkpoint(snapshot: Snapshot, path: Path) -> None:
    """Write a checkpoint; until it is complete, nothing is seen at ``path``, and what was there stays."""
    save_file = require_safetensors().save_file
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.tmp-{uuid4().hex}"
    temporary.mkdir()
    try:
        for key, weights in snapshot.weights.items():
            save_file(weights, temporary / f"model-{key}.safetensors")
        save_file(snapshot.tensors, temporary / "state.safetensors")
        _write_json(temporary / "state.json", snapshot.state)
        _write_json(temporary / "spec.json", snapshot.spec)
        files = {file.name: _fingerprint(file) for file in sorted(temporary.iterdir())}
        manifest = {
            "format": FORMAT,
            "counters": snapshot.counters,
            "torch": str(torch.__version__),
            "files": files,
        }
        _write_json(temporary / MANIFEST, manifest)
        for file in temporary.iterdir():
            _flush(file)
        _flush(temporary)
        _replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _replace(temporary: Path, path: Path) -> None:
    """Rename into place; a directory cannot be renamed over another, so an old one steps aside first."""
    old = path.parent / f".{path.name}.old-{uuid4().hex}"
    replaced = path.exists()
    if replaced:
        path.rename(old)
    temporary.rename(path)
    _flush(path.parent)
    if replaced:
        remove_checkpoint(old)


def read_checkpoint(path: Path) -> Snapshot:
    """Read and check one checkpoint.

    Raises
    ------
    FileNotFoundError
        There is none.
    DamagedCheckpointError
        A file is missing or differs from what was written; the message names it.
    """
    load_file = require_safetensors().load_file
    manifest = _read_manifest(path)
    for name, fingerprint in manifest["files"].items():
        if not (path / name).is_file():
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        if _fingerprint(path / name) != fingerprint:
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} is not what was written")
    weights = {
        name.removeprefix("model-").removesuffix(".safetensors"): load_file(path / name)
        for name in manifest["files"]
        if name.startswith("model-")
    }
    state, spec = (
        json.loads((path / name).read_text(encoding="utf-8")) for name in ("state.json", "spec.json")
    )
    return Snapshot(manifest["counters"], weights, state, load_file(path / "state.safetensors"), spec)


def read_newest(directory: Path) -> tuple[Path, Snapshot]:
    """Read a checkpoint, or the newest intact one of a directory of checkpoints.

    Warns (``UserWarning``) about damaged ones that are passed over.

    Raises
    ------
    FileNotFoundError
        There is no checkpoint.
    DamagedCheckpointError
        All are damaged.
    """
    if (directory / MANIFEST).exists():
        return directory, read_checkpoint(directory)
    damaged: list[str] = []
    for path in newest_first(directory, damaged):
        try:
            return path, read_checkpoint(path)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            warnings.warn(f"{error}; falling back to the one before", UserWarning, stacklevel=3)
    if damaged:
        raise DamagedCheckpointError(f"no intact checkpoint in {directory}: {'; '.join(damaged)}")
    raise FileNotFoundError(f"there is no checkpoint in {directory}")


def newest_first(directory: Path, damaged: list[str] | None = None) -> list[Path]:
    """Complete checkpoints of a directory by their counters, the furthest first.

    Equal ones are in the order of the numbers in their names. One whose manifest cannot be read or is of another format
    is left out, with a ``UserWarning`` where ``damaged`` collects the reasons.
    """
    found: list[tuple[tuple[Any, ...], Path]] = []
    for path in _candidates(directory):
        try:
            counters = _read_manifest(path)["counters"]
        except ValueError as error:  # damaged, or of another format
            if damaged is not None:
                damaged.append(str(error))
                warnings.warn(f"{error}; it is left out", UserWarning, stacklevel=4)
            continue
        progress = (counters["batch_count"], counters["step_count"], counters["epoch_count"])
        numbers = tuple(int(digits) for digits in re.findall(r"\d+", path.name))
        found.append(((progress, not path.name.startswith("."), numbers), path))
    return [path for _, path in sorted(found, key=lambda entry: entry[0], reverse=True)]


def _candidates(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        for path in directory.iterdir():
            # ".old-…" is what a crash leaves between the two renames of a replacement: complete, and worth reading.
            if path.is_dir() and ".tmp-" not in path.name and (path / MANIFEST).exists():
                yield path


def remove_remains(directory: Path) -> None:
    """Remove what interrupted writes have left in a directory of checkpoints.

    A checkpoint that had stepped aside for one that never came gets its name back.
    """
    if not directory.is_dir():
        return
    for path in newest_first(directory):
        name = _TEMPORARY.match(path.name)
        if name is not None and not (intact := directory / name["name"]).exists():
            _log.info("bringing back %s, whose replacement was interrupted", intact)
            path.rename(intact)
    for path in directory.iterdir():
        if path.is_dir() and _TEMPORARY.match(path.name):
            _log.info("removing %s, left by an interrupted write", path)
            shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; its manifest goes first, so that a half removed one is none."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(f"{path} is no checkpoint: it has no {MANIFEST}")
    try:
        manifest: Any = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format"]
        counters = {
            name: int(manifest["counters"][name]) for name in ("batch_count", "step_count", "epoch_count")
        }
        if not isinstance(manifest["files"], dict):
            raise TypeError(f"files are {manifest['files']!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {path} is damaged: {MANIFEST} cannot be read ({error!r})"
        ) from error
    if version != FORMAT:
        raise ValueError(f"checkpoint {path} has format {version}; this version reads format {FORMAT}")
    manifest["counters"] |= counters
    return manifest


def _write_json(path: Path, value: Mapping[str, Any] | None) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _flush(path: Path) -> None:
    """Have the system write a file or directory out to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_safetensors() -> Any:
    """Import safetensors, or say which extra brings it."""
    return import_extra("safetensors.torch", extra="checkpoint", needed_by="a checkpoint")


__all__ = [
    "DamagedCheckpointError",
    "Snapshot",
    "newest_first",
    "read_checkpoint",
    "read_newest",
    "remove_checkpoint",
    "remove_remains",
    "require_safetensors",
    "write_checkpoint",
]
