"""ASE databases: SQLite (``.db``), JSON (``.json``) and, with the extra ``lmdb``, LMDB (``.aselmdb``).

A row holds what ASE knows of a structure. ``info``, with charge and spin in it, and per-atom arrays that ASE has no
column for go into the row's ``data``: each entry of ``info`` under its own key, the arrays under ``"arrays"``. In the
other direction ``data`` and the key-value pairs of a row are its ``info``.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from nvalchemi._optional import import_extra
from nvalchemi.data.atomic_data import AtomicData

if TYPE_CHECKING:
    from ase import Atoms

COLUMNS = frozenset(
    ["numbers", "positions", "momenta", "tags", "initial_magmoms", "initial_charges", "masses"]
)
"""Per-atom arrays for which ASE's own formats have a place."""


def is_lmdb(path: str | os.PathLike[str]) -> bool:
    """Whether the name is that of an LMDB database."""
    return os.fspath(path).endswith(".aselmdb")


def connect(path: str, kind: str, *, writable: bool = False) -> Any:
    """Connection to a database of ASE's kind ``"db"`` or ``"json"``; ``ImportError`` naming the extra for LMDB."""
    import ase.db

    if not is_lmdb(path):
        return ase.db.connect(path, type=kind, use_lock_file=False)
    import_extra("ase_db_backends", extra="lmdb", needed_by="an .aselmdb file")
    if writable:
        return ase.db.connect(path)
    number = os.stat(path).st_ino
    opened = _lmdb_connections()
    if path not in opened or opened[path][0] != number:
        opened.pop(path, None)
        opened[path] = number, ase.db.connect(path, readonly=True)
    return opened[path][1]


@cache
def _lmdb_connections() -> dict[str, tuple[int, Any]]:
    # LMDB allows one connection per file in a process, and none that was opened before a fork.
    opened: dict[str, tuple[int, Any]] = {}
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=opened.clear)
    return opened


# ---------------------------------------------------------------------- rows
def atoms_from_row(row: Any) -> "Atoms":
    """Structure of a row, its key-value pairs and data in ``info``."""
    atoms = cast("Atoms", row.toatoms())
    atoms.info.update(row.data)
    atoms.info.update(row.key_value_pairs)
    arrays = atoms.info.get("arrays")
    if isinstance(arrays, Mapping) and all(np.shape(array)[:1] == (len(atoms),) for array in arrays.values()):
        del atoms.info["arrays"]
        for name, array in arrays.items():
            atoms.set_array(name, np.asarray(array))
    return atoms


def _row_data(atoms: "Atoms") -> dict[str, Any]:
    """What ASE does not write by itself."""
    from ase.io.jsonio import encode

    data = {name: _plain(value) for name, value in atoms.info.items()}
    if atoms.get_celldisp().any():
        data["celldisp"] = atoms.get_celldisp()
    for name, value in data.items():
        try:
            encode(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"info[{name!r}] cannot be kept in a database: {error}") from error
    arrays = {name: array for name, array in atoms.arrays.items() if name not in COLUMNS}
    return data | {"arrays": arrays} if arrays else data


def _plain(value: Any) -> Any:
    """The value with Python's numbers for NumPy's, which SQLite databases do not take."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in cast(list[Any], value)]
    return value


def write_rows(path: str, kind: str, frames: "Iterable[Atoms]") -> int:
    """Make a database of structures, one at a time; returns how many."""
    written = 0
    try:
        with connect(path, kind, writable=True) as connection:
            for atoms in frames:
                connection.write(atoms, data=_row_data(atoms))
                written += 1
    finally:
        if is_lmdb(path) and os.path.exists(f"{path}-lock"):
            os.unlink(f"{path}-lock")
    return written


def rows(path: str, kind: str, chosen: slice) -> Iterator[tuple[int, Any]]:
    """Some of the rows with their numbers, in the order of their ids; backwards from memory."""
    connection = connect(path, kind)
    numbers = range(connection.count())[chosen]
    if len(numbers) == 0:
        return
    first, last = sorted((numbers[0], numbers[-1]))
    span = enumerate(connection.select(offset=first, limit=last - first + 1), start=first)
    picked = ((number, row) for number, row in span if number in numbers)
    yield from picked if numbers.step > 0 else reversed(list(picked))


class AseDatabase:
    """Rows of an ASE database by position, in the order of their ids.

    Parameters
    ----------
    path : str
        The database.
    dtype : torch.dtype
        Floating-point type of the result.
    **options
        Passed to :func:`nvalchemi.data.ase.from_atoms`.
    """

    def __init__(self, path: str, *, dtype: torch.dtype, **options: Any) -> None:
        self.path = path
        self._options: dict[str, Any] = {"dtype": dtype, **options}
        self._connection: tuple[int, Any] | None = None
        if is_lmdb(path):
            self._ids = np.array(sorted(self._database().ids), dtype=np.int64)
        else:
            found = self._database().select(columns=["id"], include_data=False)
            self._ids = np.array(sorted(row.id for row in found), dtype=np.int64)

    def _database(self) -> Any:
        if is_lmdb(self.path):
            return connect(self.path, "db")
        # SQLite connections must not cross a fork.
        if self._connection is None or self._connection[0] != os.getpid():
            self._connection = os.getpid(), connect(self.path, "db")
        return self._connection[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> AtomicData:
        from nvalchemi.data.ase import from_atoms

        number = int(self._ids[index])
        try:
            return from_atoms(atoms_from_row(self._database().get(id=number)), **self._options)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path}, row {number}: {error}") from error

    def num_nodes(self) -> np.ndarray:
        """Number of atoms of each row."""
        found = self._database().select(columns=["id", "numbers"], include_data=False)
        sizes = {row.id: row.natoms for row in found}
        return np.array([sizes[i] for i in self._ids.tolist()], dtype=np.int64)

    def num_edges(self) -> np.ndarray:
        """Number of edges of each row: none are stored."""
        return np.zeros(len(self), dtype=np.int64)
