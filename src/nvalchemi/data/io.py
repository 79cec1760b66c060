"""Files: every format that ASE reads or writes, frame by frame."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import StringIO
from itertools import count, islice
from math import prod
from operator import index as as_int
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
import torch

from nvalchemi.data._xyz_text import BROKEN_FILE, xyz_texts
from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch

if TYPE_CHECKING:
    from ase import Atoms

_TEXT_FORMATS = ("extxyz", "xyz")
_DATABASES = ("db", "json")


def iread(
    path: str | os.PathLike[str],
    index: int | str | slice = ":",
    *,
    format: str | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    energy_key: str = "energy",
    forces_key: str = "forces",
    stress_key: str = "stress",
    fields: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    system_id: int | None = None,
) -> Iterator[AtomicData]:
    """Read structures one at a time, so that a file of any length needs the memory of one frame.

    Parameters
    ----------
    path : path
        File in any format that ASE reads (extxyz, cif, POSCAR, traj, db, …; compressed ones too), or a Zarr
        store (``.zarr``; its fields are read under their own names).
    index : int, slice or str, default ":"
        Which frames, as in ASE. Counting backwards (``"::-1"``) keeps the chosen frames in memory.
    format : str, optional
        ASE's name of the format, where the file's name and content do not tell.
    on_error : {"raise", "skip"}, default "raise"
        A frame that cannot be read is an error naming file and frame, or is skipped. Skipped frames are
        counted in one ``UserWarning`` at the end. Formats other than xyz and extxyz cannot be resumed behind
        a broken frame.
    energy_key, forces_key, stress_key, fields, device, dtype
        As in :func:`nvalchemi.data.ase.from_atoms`.
    system_id : int, optional
        Only the frames of this system, out of the trajectories of a run of many; with the default ``index``.

    Yields
    ------
    AtomicData
        In the order of the file.

    Raises
    ------
    FileNotFoundError
        No such file.
    ValueError
        An empty file, a format that ASE does not know or cannot read, or a frame that cannot be read.

    Warns
    -----
    UserWarning
        Frames without the label asked for, when they carry one under a similar name.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    if system_id is not None and index != ":":
        raise ValueError("give index or system_id, not both")
    file = Path(path)
    if format == "zarr" or (format is None and _is_zarr(path)):
        from nvalchemi.data.zarr import iread_zarr

        return iread_zarr(path, index, on_error=on_error, device=device, dtype=dtype, system_id=system_id)
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not a file" if file.exists() else f"no such file: {file}")
    if file.stat().st_size == 0:
        raise ValueError(f"{file}: the file is empty")
    kind = format or _detect(file)
    from ase.io.formats import ioformats

    if kind not in ioformats or not ioformats[kind].can_read:
        raise ValueError(f"{file}: ASE cannot read a format {kind!r}")
    torch.empty(0, device=device, dtype=dtype)  # A wrong device or dtype is not the fault of the first frame.
    keys = {"energy": energy_key, "forces": forces_key, "stress": stress_key}
    wanted = keys | {name: source for source, name in (fields or {}).items()}
    convert = partial(
        AtomicData.from_atoms,
        **{f"{name}_key": key for name, key in keys.items()},
        fields=fields,
        device=device,
        dtype=dtype,
    )
    if kind in _TEXT_FORMATS:
        frames = _xyz_frames(file, kind, index)
    elif kind in _DATABASES:
        frames = _database_frames(file, kind, index)
    else:
        frames = _ase_frames(file, kind, index)
    structures = _convert(file, frames, convert, on_error, _LabelCheck(file, wanted))
    if system_id is None:
        return structures
    return (data for data in structures if data.info.get("system_id") == system_id)


@overload
def read(path: str | os.PathLike[str], index: int, **options: Any) -> AtomicData: ...
@overload
def read(path: str | os.PathLike[str], index: str | slice = ":", **options: Any) -> list[AtomicData]: ...
def read(
    path: str | os.PathLike[str], index: int | str | slice = ":", **options: Any
) -> AtomicData | list[AtomicData]:
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
    """Write structures to a file in any format that ASE writes, or to a Zarr store (``.zarr``).

    The file appears whole or not at all: it is written under another name and then renamed. A file of that
    name is replaced.

    Parameters
    ----------
    path : path
        Where to; the suffix chooses the format unless ``format`` does.
    data : AtomicData, Batch or iterable of AtomicData
        What to write; an iterable is consumed one structure at a time for xyz, extxyz and ASE's databases. What a
        format has no place for is lost: edges everywhere, nearly all but the geometry in cif and POSCAR.
        Per-atom fields that ASE does not know are lost in traj, with a warning.
    format : str, optional
        ASE's name of the format.
    append : bool, default False
        Add to an xyz or extxyz file or a Zarr store instead.

    Returns
    -------
    int
        Number of structures written.

    Raises
    ------
    ValueError
        A format that ASE does not write, more structures than the format holds, or ``append`` for another format.
    FileNotFoundError, IsADirectoryError
        The folder does not exist; the path is a folder.
    """
    file = Path(path)
    if format == "zarr" or (format is None and _is_zarr(path)):
        from nvalchemi.data.zarr import append_zarr, write_zarr

        return append_zarr(path, data) if append else write_zarr(path, data)
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"no such folder: {file.parent}")
    kind = output_format(file, format)
    if isinstance(data, AtomicData):
        data = [data]
    frames = _frames_of(data)
    if append:
        if kind not in _TEXT_FORMATS:
            raise ValueError(f"{file}: cannot append to a file of format {kind!r}, only to xyz and extxyz")
        return _write_xyz(file, "a", frames, kind)
    # A link stays a link: the file it points to is replaced.
    with _replacing(Path(os.path.realpath(file))) as temporary:
        if kind in _TEXT_FORMATS:
            return _write_xyz(temporary, "w", frames, kind)
        if kind in _DATABASES:
            from nvalchemi.data.databases import write_rows

            return write_rows(os.fspath(temporary), kind, frames)
        import ase.io
        from ase.io.formats import ioformats

        atoms = list(frames)
        if kind == "traj":
            _warn_of_lost_arrays(file, atoms)
        if len(atoms) != 1 and ioformats[kind].single:
            raise ValueError(
                f"{file}: format {kind!r} holds one structure, not {len(atoms)}; write extxyz or traj instead"
            )
        ase.io.write(temporary, atoms if len(atoms) != 1 else atoms[0], format=kind)
        return len(atoms)


def _warn_of_lost_arrays(file: Path, frames: "Iterable[Atoms]") -> None:
    from nvalchemi.data.ase import BOOKKEEPING
    from nvalchemi.data.databases import COLUMNS

    lost = sorted({name for atoms in frames for name in atoms.arrays.keys() - COLUMNS - BOOKKEEPING})
    if lost:
        warnings.warn(
            f"{file}: format 'traj' has no place for the per-atom arrays {', '.join(lost)}, they are left out; "
            ".extxyz, .db and .zarr keep them",
            UserWarning,
            stacklevel=3,
        )


def _is_zarr(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).rstrip("/").endswith(".zarr")


def _frames_of(structures: Iterable[AtomicData]) -> "Iterator[Atoms]":
    for number, structure in enumerate(structures):
        if not isinstance(structure, AtomicData):
            raise TypeError(f"structure {number} is a {type(structure).__name__}, not an AtomicData")
        yield structure.to_atoms()


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

    if format == "zarr" or (format is None and _is_zarr(path)):
        return "zarr"
    try:
        kind = format or filetype(os.fspath(path), read=False)
        writable = ioformats[kind].can_write
    except (UnknownFileTypeError, KeyError) as error:
        raise ValueError(
            f"{path}: no file format is known for this name; give it a suffix that says which, like .extxyz, .traj, "
            ".cif, .db or .zarr, or name the format"
        ) from error
    if not writable:
        raise ValueError(f"{path}: format {kind!r} can be read but not written; use .extxyz")
    return kind


def _write_xyz(file: Path, mode: str, frames: "Iterable[Atoms]", kind: str) -> int:
    import ase.io
    from ase.io.formats import open_with_compression

    written = 0
    with open_with_compression(os.fspath(file), mode) as stream:
        for atoms in frames:
            # A frame that fails half-way leaves nothing of itself in the file.
            text = StringIO()
            _make_fit_for_xyz(atoms)
            ase.io.write(text, atoms, format=kind)
            stream.write(text.getvalue())
            written += 1
    return written


def _make_fit_for_xyz(atoms: "Atoms") -> None:
    """Change what ASE would write in a way that spoils the frame on reading."""
    for name, value in list(atoms.info.items()):
        if value is None:
            del atoms.info[name]  # read as True
        elif isinstance(value, str):
            # A line break ends the header; an empty value swallows the entry behind it, pbc for one.
            atoms.info[name] = " ".join(value.split()) or '_JSON ""'
        elif isinstance(value, list | tuple):
            try:
                np.array(value)
            except ValueError:
                atoms.info[name] = str(value)  # rows of unequal length
    for name, array in list(atoms.arrays.items()):
        if array.dtype.kind == "c":
            raise ValueError(f"xyz files cannot hold the complex array {name!r}")
        if array.ndim > 2 or array.shape[1:] == (0,):
            del atoms.arrays[name]
            if columns := prod(array.shape[1:]):
                atoms.arrays[name] = array.reshape(len(atoms), columns)


@contextmanager
def _replacing(path: Path) -> Generator[Path]:
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
    except (*BROKEN_FILE, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error


def _convert(
    file: Path,
    frames: Iterator[Frame],
    convert: "Callable[[Atoms], AtomicData]",
    on_error: str,
    labels: "_LabelCheck",
) -> Iterator[AtomicData]:
    skipped: list[int] = []
    for number, parse in frames:
        try:
            data = convert(parse())
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
        warnings.warn(
            f"{file}: skipped {len(skipped)} frame(s) that cannot be read: {shown}", UserWarning, stacklevel=3
        )
    labels.report()


def _reason(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return text if isinstance(error, ValueError) else f"{type(error).__name__} {text}".strip()


def _failing(error: Exception) -> "Callable[[], Atoms]":
    def parse() -> "Atoms":
        raise error

    return parse


def _ase_frames(file: Path, kind: str, index: int | str | slice) -> Iterator[Frame]:
    """Frames of a format that only ASE can take apart."""
    import ase.io
    from ase.utils import string2index

    chosen = string2index(index) if isinstance(index, str) else index
    step = (chosen.step or 1) if isinstance(chosen, slice) else 1
    start = chosen if isinstance(chosen, int) else chosen.start if isinstance(chosen, slice) else 0
    source = ase.io.iread(file, index=index, format=kind)
    for number in count(start if start is not None else min(step, 0), step):
        try:
            atoms = next(source)
        except StopIteration:
            return
        except Exception as error:  # handed on by the frame's own parse call
            yield number, _failing(error)
            return
        yield number, lambda atoms=atoms: atoms


def _xyz_frames(file: Path, kind: str, index: int | str | slice) -> Iterator[Frame]:
    """Frames of an xyz or extxyz file, cut out as text so that a broken one does not hide those behind it."""
    chosen = _as_slice(file, index)
    numbered = enumerate(xyz_texts(file))
    bounds = (chosen.start, chosen.stop, chosen.step)
    if any(bound is not None and bound < 0 for bound in bounds):
        # Counting from the end needs the number of frames: one pass over the lines, nothing kept.
        wanted = range(sum(1 for _ in xyz_texts(file)))[chosen]
        if wanted.step < 0:
            picked = {number: text for number, text in numbered if number in wanted}
            numbered = ((number, picked[number]) for number in wanted)
        else:
            numbered = ((number, text) for number, text in numbered if number in wanted)
    else:
        numbered = islice(numbered, *bounds)
    for number, text in numbered:
        yield number, _failing(text) if isinstance(text, Exception) else partial(_parse_xyz, text, kind)


def _database_frames(file: Path, kind: str, index: int | str | slice) -> Iterator[Frame]:
    """Rows of an ASE database."""
    from nvalchemi.data.databases import atoms_from_row, rows

    chosen = _as_slice(file, index)
    source = rows(os.fspath(file), kind, chosen)
    number = chosen.start or 0
    while True:
        try:
            number, row = next(source)
        except StopIteration:
            return
        except ImportError:
            raise
        except Exception as error:  # handed on by the frame's own parse call
            yield number, _failing(error)
            return
        yield number, partial(atoms_from_row, row)


def _as_slice(file: Path, index: int | str | slice) -> slice:
    from ase.utils import string2index

    chosen = string2index(index) if isinstance(index, str) else index
    if isinstance(chosen, slice):
        return chosen
    try:
        number = as_int(cast(int, chosen))
    except TypeError:
        raise ValueError(
            f"{file}: index {index!r} does not choose frames; use an integer or start:stop:step"
        ) from None
    return slice(number, number + 1 or None)


def _parse_xyz(text: bytes, kind: str) -> "Atoms":
    import ase.io

    return cast("Atoms", ase.io.read(StringIO(text.decode()), format=kind, index=0))


class _LabelCheck:
    """Counts frames whose labels are absent, or stand under another name than the one asked for."""

    def __init__(self, file: Path, keys: Mapping[str, str]) -> None:
        self.file = file
        self.keys = keys
        self.frames = 0
        self.missing: Counter[str] = Counter()
        self.similar: dict[str, Counter[str]] = {label: Counter() for label in self.keys}

    def see(self, data: AtomicData) -> None:
        self.frames += 1
        for label in self.keys:
            if label not in data:
                self.missing[label] += 1
                stem = "force" if label == "forces" else label
                self.similar[label].update(
                    name for name in (*data.info, *data.keys()) if stem in name.lower()
                )

    def report(self) -> None:
        for label, key in self.keys.items():
            hint = "".join(f"; {n} have {name!r}" for name, n in self.similar[label].items())
            usual = key == label and label in ("energy", "forces", "stress")
            if hint and label in ("energy", "forces", "stress"):
                hint += f" ({label}_key=… says which to take)"
            if self.missing[label] and (hint or not usual):
                lacking = (
                    f"{self.missing[label]} of {self.frames} frames have no {label} under the key {key!r}"
                )
                warnings.warn(f"{self.file}: {lacking}{hint}", UserWarning, stacklevel=4)
