"""Random access to structures in xyz files."""

import io
import mmap
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nvalchemi.data.atomic_data import AtomicData

# Bytes of an xyz file whose line ends are looked for at a time.
_SCAN_BYTES = 1 << 26
# Names in the comment line of a frame that look like those of energies and forces.
_LABEL_NAMES = re.compile(rb"[\w-]*(?:energy|force)[\w-]*", re.IGNORECASE)


class XyzFile:
    """Frames of an xyz or extended xyz file by number.

    Parameters
    ----------
    path : str
        The file; not compressed, because offsets into it are kept.
    dtype : torch.dtype
        Floating-point type of the result.
    **options
        Passed to :func:`nvalchemi.data.ase.from_atoms`.

    Raises
    ------
    ValueError
        A line that should hold a number of atoms does not, or the last frame is cut short; names file and frame.

    Warns
    -----
    UserWarning
        Frames without energy or forces under the names asked for, when they have such values under other names.
    """

    def __init__(self, path: str, *, dtype: torch.dtype, **options: Any) -> None:
        self.path = path
        self._options: dict[str, Any] = {"dtype": dtype, **options}
        self._offsets, self._num_nodes, names = _scan(path)
        _warn_of_other_names(path, names, options)
        # A file that changes under an index would give wrong frames in silence.
        self._stamp = _stamp(path)

    def __len__(self) -> int:
        return len(self._num_nodes)

    def __getitem__(self, index: int) -> AtomicData:
        import ase.io

        from nvalchemi.data.ase import from_atoms

        if _stamp(self.path) != self._stamp:
            raise ValueError(f"{self.path} has changed since it was opened; open it again")
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            text = file.read(int(self._offsets[index + 1] - self._offsets[index])).decode()
        try:
            atoms = ase.io.read(io.StringIO(text), format="extxyz", index=0)
            return from_atoms(atoms, **self._options)  # pyright: ignore[reportArgumentType]
        # ASE's parser raises nearly anything on a broken frame; whatever it is, it is named and chained.
        except Exception as error:
            raise ValueError(f"{self.path}, frame {index}: {error}") from error

    def num_nodes(self) -> np.ndarray:
        """Number of atoms of each frame."""
        return self._num_nodes

    def num_edges(self) -> np.ndarray:
        """Number of edges of each frame: none are stored."""
        return np.zeros_like(self._num_nodes)


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _warn_of_other_names(path: str, names: Counter[frozenset[bytes]], options: Mapping[str, Any]) -> None:
    for label, stem in (("energy", b"energy"), ("forces", b"force")):
        key = options.get(f"{label}_key", label)
        lacking = {found: count for found, count in names.items() if key.encode() not in found}
        others: Counter[str] = Counter()
        for found, count in lacking.items():
            others.update({name.decode(): count for name in found if stem in name.lower()})
        if others:
            have = "; ".join(f"{count} have {name!r}" for name, count in others.items())
            warnings.warn(
                f"{path}: {sum(lacking.values())} of {names.total()} frames have no {label} under the key {key!r}; "
                f"{have} ({label}_key=… says which to take)",
                UserWarning,
                stacklevel=5,
            )


def _scan(path: str) -> tuple[np.ndarray, np.ndarray, Counter[frozenset[bytes]]]:
    """Offset of each frame (and of the end), number of atoms, and names like labels, by hopping from head to head."""
    names: Counter[frozenset[bytes]] = Counter()
    offsets: list[int] = []
    counts: list[int] = []
    size = os.path.getsize(path)
    if size == 0:
        return np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64), names
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        starts = np.zeros(1, dtype=np.int64)  # where the lines of this block begin
        head = 0  # line of the next frame's head, counted from the first of `starts`
        for begin in range(0, size, _SCAN_BYTES):
            block = np.frombuffer(content[begin : begin + _SCAN_BYTES], dtype=np.uint8)
            starts = np.concatenate([starts, np.flatnonzero(block == ord("\n")) + (begin + 1)])
            while head < len(starts) and (offset := int(starts[head])) < size:
                end = content.find(b"\n", offset)
                line = content[offset : size if end < 0 else end].strip()
                if not line:
                    head += 1
                    continue
                if not line.isdigit():
                    raise ValueError(
                        f"{path}, frame {len(counts)}: expected a number of atoms, found {line[:40].decode()!r}"
                    )
                offsets.append(offset)
                counts.append(int(line))
                comment = content[end + 1 : content.find(b"\n", end + 1)]
                names[frozenset(_LABEL_NAMES.findall(comment))] += 1
                head += counts[-1] + 2
            # Lines before the last are done with; what remains to be hopped over is in later blocks.
            done = min(head, len(starts))
            starts, head = starts[done:], head - done
        # A file that ends with a line end has one beginning of a line more than it has lines.
        missing = 0 if len(starts) else head + (content[size - 1] == ord("\n"))
    if missing > 0:
        raise ValueError(
            f"{path}, frame {len(counts) - 1}: truncated, {counts[-1]} atoms announced, {missing} line(s) missing"
        )
    return np.array([*offsets, size], dtype=np.int64), np.array(counts, dtype=np.int64), names
