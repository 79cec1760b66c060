"""The text of the frames of an xyz file, cut so that a broken frame does not hide those behind it."""

import lzma
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Self

BROKEN_FILE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What the decompressors raise on a damaged file."""


def xyz_texts(file: Path) -> Iterator[bytes | ValueError]:
    """Text of each frame, or what is wrong with it."""
    from ase.io.formats import open_with_compression

    with open_with_compression(os.fspath(file), "rb") as stream:
        lines = _Lines(stream)
        for line in lines:
            if not line.strip():
                continue
            atoms = _atom_count(line)
            if atoms is None:
                yield ValueError(f"expected a number of atoms, found {_shown(line)}")
                lines.skip_to(lambda text: _atom_count(text) is not None)
                continue
            rows = list(islice(lines, atoms + 1))
            # A bare number among the atoms is the head of the next frame: this one is too short.
            head = next((k for k, row in enumerate(rows[1:], start=1) if _atom_count(row) is not None), None)
            if head is not None:
                lines.push_back(rows[head:])
                yield ValueError(f"{atoms} atoms announced, {head - 1} found")
            elif len(rows) < atoms + 1:
                yield ValueError(f"truncated: {atoms} atoms announced, {max(len(rows) - 1, 0)} found")
            elif atoms and len(lines.peek().split()) == len(rows[-1].split()) > 1:
                lines.skip_to(lambda text: _atom_count(text) is not None)
                yield ValueError(f"more atoms than the {atoms} announced")
            else:
                yield line + b"".join(rows)
    if lines.failure is not None:
        yield ValueError(f"cannot be read any further: {lines.failure}")


class _Lines:
    """Lines of a stream, some of which can be put back. Damage to a compressed file ends them: see ``failure``."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        self.stream = iter(stream)
        self.waiting: deque[bytes] = deque()
        self.failure: Exception | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        if self.waiting:
            return self.waiting.popleft()
        try:
            return next(self.stream)
        except BROKEN_FILE as error:
            self.failure = error
            raise StopIteration from None

    def push_back(self, rows: Iterable[bytes]) -> None:
        self.waiting.extendleft(reversed(list(rows)))

    def peek(self) -> bytes:
        """Next line without taking it; empty at the end."""
        self.push_back(list(islice(self, 1)))
        return self.waiting[0] if self.waiting else b""

    def skip_to(self, wanted: Callable[[bytes], bool]) -> None:
        """Drop lines until the next one is wanted."""
        self.push_back(list(islice(filter(wanted, self), 1)))


def _atom_count(line: bytes) -> int | None:
    text = line.strip()
    return int(text) if text.isdigit() else None


def _shown(line: bytes) -> str:
    return repr(line.strip()[:40].decode(errors="replace"))
