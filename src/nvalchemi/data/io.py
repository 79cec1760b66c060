"""Files: every format that ASE reads or writes, frame by frame."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, dropwhile, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, overload

import torch

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch

if TYPE_CHECKING:
    from ase import Atoms

_TEXT_FORMATS = ("extxyz", "xyz")


def iread(
    path: str | os.PathLike[str],
    index: int | str | slice = ":",
    *,
    format: str | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Iterator[AtomicData]:
    """Read structures one at a time, so that a file of any length needs the memory of one frame.

    Parameters
    ----------
    path : path
        File in any format that ASE reads (extxyz, cif, POSCAR, traj, db, …; compressed ones too).
    index : int, slice or str, default ":"
        Which frames, as in ASE.
    format : str, optional
        ASE's name of the format, where the file's name and content do not tell.
    on_error : {"raise", "skip"}, default "raise"
        A frame that cannot be read is an error naming file and frame, or is skipped. Skipped frames are counted in one
        ``UserWarning`` at the end. Formats other than xyz and extxyz cannot be resumed behind a broken frame.
    dtype : torch.dtype, default torch.float32
        Floating-point type of the result.
    **options
        Passed to :func:`nvalchemi.data.ase.from_atoms` (``energy_key``, ``fields``, ``device``, …).

    Yields
    ------
    AtomicData
        In the order of the file.

    Raises
    ------
    FileNotFoundError
        No such file.
    ValueError
        A format that ASE does not know, or a frame that cannot be read.

    Warns
    -----
    UserWarning
        Frames without the label asked for, when they carry one under a similar name.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not a file" if file.exists() else f"no such file: {file}")
    kind = format or _detect(file)
    frames = _xyz_frames(file, kind, index) if kind in _TEXT_FORMATS else _ase_frames(file, kind, index)
    return _convert(file, frames, on_error, _LabelCheck(file, options), dtype=dtype, **options)


@overload
def read(path: str | os.PathLike[str], index: int, **options: Any) -> AtomicData: ...
@overload
def read(path: str | os.PathLike[str], index: str | slice = ":", **options: Any) -> list[AtomicData]: ...
def read(path: str | os.PathLike[str], index: int | str | slice = ":", **options: Any) -> AtomicData | list[AtomicData]:
    """Read structures; one for an integer index, else a list (options as in :func:`iread`).

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from ase.build import bulk
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "copper.extxyz"
    >>> write(path, AtomicData.from_atoms(bulk("Cu")))
    1
    >>> [data.chemical_formula for data in read(path)]
    ['Cu']
    """
    frames = list(iread(path, index, **options))
    if isinstance(index, int):
        if not frames:
            raise IndexError(f"{path} has no frame {index}")
        return frames[0]
    return frames


def write(
    path: str | os.PathLike[str],
    data: "AtomicData | Batch | Iterable[AtomicData]",
    *,
    format: str | None = None,
    append: bool = False,
) -> int:
    """Write structures to a file in any format that ASE writes.

    The file appears whole or not at all: it is written under another name and then renamed. A file of that name is replaced.

    Parameters
    ----------
    path : path
        Where to; the suffix chooses the format unless ``format`` does.
    data : AtomicData, Batch or iterable of AtomicData
        What to write; an iterable is consumed one structure at a time for xyz and extxyz.
    format : str, optional
        ASE's name of the format.
    append : bool, default False
        Add to an existing xyz or extxyz file instead.

    Returns
    -------
    int
        Number of structures written.

    Raises
    ------
    ValueError
        A format that ASE does not write, more structures than the format holds, or ``append`` for another format.
    """
    file = Path(path)
    kind = output_format(file, format)
    if isinstance(data, AtomicData):
        data = [data]
    structures: Iterable[AtomicData] = data.to_data_list() if isinstance(data, Batch) else data
    if append:
        if kind not in _TEXT_FORMATS:
            raise ValueError(f"{file}: cannot append to a file of format {kind!r}, only to xyz and extxyz")
        with file.open("a") as stream:
            return _write_stream(stream, structures, kind)
    with _replacing(file) as temporary:
        if kind in _TEXT_FORMATS:
            with temporary.open("w") as stream:
                return _write_stream(stream, structures, kind)
        import ase.io
        from ase.io.formats import ioformats

        atoms = [structure.to_atoms() for structure in structures]
        if len(atoms) != 1 and ioformats[kind].single:
            raise ValueError(f"{file}: format {kind!r} holds one structure, not {len(atoms)}; write extxyz or traj instead")
        ase.io.write(temporary, atoms if len(atoms) != 1 else atoms[0], format=kind)
        return len(atoms)


def output_format(path: str | os.PathLike[str], format: str | None = None) -> str:
    """ASE's name of the format that :func:`write` would use, checked before any work is done.

    Raises
    ------
    ValueError
        No format for that name, or one that ASE cannot write.

    >>> output_format("relaxed.extxyz")
    'extxyz'
    """
    from ase.io.formats import UnknownFileTypeError, filetype, ioformats

    try:
        kind = format or filetype(os.fspath(path), read=False)
        writable = ioformats[kind].can_write
    except (UnknownFileTypeError, KeyError) as error:
        raise ValueError(f"{path}: no file format is known for this name; give format=… or a suffix like .extxyz") from error
    if not writable:
        raise ValueError(f"{path}: format {kind!r} can be read but not written; use .extxyz")
    return kind


def _write_stream(stream: IO[str], structures: Iterable[AtomicData], kind: str) -> int:
    import ase.io

    count = 0
    for count, structure in enumerate(structures, start=1):
        ase.io.write(stream, structure.to_atoms(), format=kind)
    return count


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Another name in the same folder that takes the file's place when the block ends without an error."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------- reading
Frame = tuple[int, "Callable[[], Atoms]"]


def _detect(file: Path) -> str:
    from ase.io.formats import UnknownFileTypeError, filetype

    try:
        return filetype(os.fspath(file))
    except UnknownFileTypeError as error:
        raise ValueError(f"{file}: not a structure file, or of a format that ASE does not know") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error


def _convert(
    file: Path, frames: Iterator[Frame], on_error: str, labels: "_LabelCheck", **options: Any
) -> Iterator[AtomicData]:
    from nvalchemi.data.ase import from_atoms

    skipped: list[int] = []
    for number, parse in frames:
        try:
            atoms = parse()
            data = from_atoms(atoms, **options)
        # Parsers of ASE raise nearly anything on a broken file; whatever it is, it is named and chained.
        except Exception as error:
            if on_error == "raise":
                raise ValueError(f"{file}, frame {number}: {_reason(error)}") from error
            skipped.append(number)
            continue
        labels.see(data)
        yield data
    if skipped:
        shown = ", ".join(map(str, skipped[:8])) + (" …" if len(skipped) > 8 else "")
        warnings.warn(f"{file}: skipped {len(skipped)} frame(s) that cannot be read: {shown}", UserWarning, stacklevel=3)
    labels.report()


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _ase_frames(file: Path, kind: str, index: int | str | slice) -> Iterator[Frame]:
    """Frames of a format that only ASE can take apart."""
    import ase.io

    source = ase.io.iread(file, index=index, format=kind)
    number = 0
    while True:
        failure: Exception | None = None
        atoms: Atoms | None = None
        try:
            atoms = next(source)  # pyright: ignore[reportArgumentType]
        except StopIteration:
            return
        except Exception as error:  # handed on by the frame's own parse call
            failure = error
        yield number, _outcome(atoms, failure)
        if failure is not None:
            return
        number += 1


def _outcome(atoms: "Atoms | None", failure: Exception | None) -> "Callable[[], Atoms]":
    def parse() -> "Atoms":
        if atoms is None:
            raise failure or ValueError("no structure")
        return atoms

    return parse


def _xyz_frames(file: Path, kind: str, index: int | str | slice) -> Iterator[Frame]:
    """Frames of an xyz or extxyz file, cut out as text so that a broken one does not hide those behind it."""
    from ase.io.formats import string2index

    chosen = string2index(index) if isinstance(index, str) else index
    if isinstance(chosen, int):
        chosen = slice(chosen, chosen + 1 or None)
    if not isinstance(chosen, slice):
        raise ValueError(f"{file}: index {index!r} does not choose frames; use an integer or start:stop:step")
    numbered = enumerate(_xyz_texts(file))
    bounds = (chosen.start, chosen.stop, chosen.step)
    if any(bound is not None and bound < 0 for bound in bounds):
        # Counting from the end needs the number of frames: one pass over the lines, nothing kept.
        count = sum(1 for _ in _xyz_texts(file))
        wanted = range(count)[chosen]
        if wanted.step < 0:
            picked = {number: text for number, text in numbered if number in wanted}
            numbered = ((number, picked[number]) for number in wanted)
        else:
            numbered = ((number, text) for number, text in numbered if number in wanted)
    else:
        numbered = islice(numbered, *bounds)
    for number, text in numbered:
        yield number, _xyz_parser(text, kind)


def _xyz_parser(text: "str | ValueError", kind: str) -> "Callable[[], Atoms]":
    def parse() -> "Atoms":
        import io

        import ase.io

        if isinstance(text, ValueError):
            raise text
        return ase.io.read(io.StringIO(text), format=kind, index=0)  # pyright: ignore[reportReturnType]

    return parse


def _xyz_texts(file: Path) -> "Iterator[str | ValueError]":
    """Text of each frame, or what is wrong with it."""
    from ase.io.formats import open_with_compression

    with open_with_compression(os.fspath(file), "r") as stream:
        lines: Iterator[str] = iter(stream)
        while (line := next(lines, None)) is not None:
            if not line.strip():
                continue
            count = _atom_count(line)
            if count is None:
                yield ValueError(f"expected a number of atoms, found {line.strip()[:40]!r}")
                lines = dropwhile(lambda text: _atom_count(text) is None, lines)
                continue
            rows = list(islice(lines, count + 1))
            # A bare number among the atoms is the head of the next frame: this one is too short.
            head = next((k for k, row in enumerate(rows[1:], start=1) if _atom_count(row) is not None), None)
            if head is not None:
                yield ValueError(f"{count} atoms announced, {head - 1} found")
                lines = chain(rows[head:], lines)
            elif len(rows) < count + 1:
                yield ValueError(f"truncated: {count} atoms announced, {max(len(rows) - 1, 0)} found")
            else:
                yield line + "".join(rows)


def _atom_count(line: str) -> int | None:
    text = line.strip()
    return int(text) if text.isdecimal() else None


class _LabelCheck:
    """Counts frames whose labels are absent, or stand under another name than the one asked for."""

    def __init__(self, file: Path, options: Mapping[str, Any]) -> None:
        self.file = file
        self.keys = {label: options.get(f"{label}_key", label) for label in ("energy", "forces", "stress")}
        self.frames = 0
        self.missing: Counter[str] = Counter()
        self.similar: dict[str, Counter[str]] = {label: Counter() for label in self.keys}

    def see(self, data: AtomicData) -> None:
        self.frames += 1
        for label in self.keys:
            if label not in data:
                self.missing[label] += 1
                stem = label.removesuffix("s") if label == "forces" else label
                self.similar[label].update(name for name in (*data.info, *data.keys()) if stem in name.lower())

    def report(self) -> None:
        for label, key in self.keys.items():
            hint = "".join(f"; {n} have {name!r} (pass {label}_key={name!r})" for name, n in self.similar[label].items())
            if self.missing[label] and (hint or key != label):
                message = f"{self.file}: {self.missing[label]} of {self.frames} frames have no {label} under the key {key!r}"
                warnings.warn(message + hint, UserWarning, stacklevel=4)
