"""Where the states of a run go: files that take one snapshot after another."""

from pathlib import Path
from typing import Protocol, Self, TextIO, runtime_checkable

from torch import Tensor

from nvalchemi.data import Batch


@runtime_checkable
class SnapshotSink(Protocol):
    """What :class:`~nvalchemi.dynamics.hooks.SnapshotHook` writes to."""

    def write(self, batch: Batch, mask: Tensor | None = None) -> None:
        """Store the structures of ``batch``, or those where the boolean ``mask`` (shape ``[B]``) is true."""
        ...

    def close(self) -> None:
        """Finish what is being written. A later :meth:`write` goes on where this one ended."""
        ...


class ExtxyzTrajectory:
    """Trajectory of any number of structures in one extended-xyz file, which ASE, OVITO and others read.

    Every frame says whose it is and when: ``system_id`` and ``system_step`` (steps that this structure has
    made) stand in its comment line, next to the ``info`` that the structure came with. The file is flushed
    after every write, so a killed run loses at most the frame being written.

    Parameters
    ----------
    path : str or Path
        The file; missing folders are made. Nothing is touched before the first write.
    append : bool, default False
        Go on behind the frames of an existing file instead of replacing it.

    Examples
    --------
    >>> from nvalchemi.dynamics.hooks import SnapshotHook
    >>> hook = SnapshotHook(ExtxyzTrajectory("argon.extxyz"), frequency=100)
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self._append = append
        self._file: TextIO | None = None

    def write(self, batch: Batch, mask: Tensor | None = None) -> None:
        """Append one frame for each structure, or for each where ``mask`` is true."""
        from ase.io.extxyz import write_extxyz

        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a" if self._append else "w", encoding="utf-8")
            self._append = True
        chosen = batch if mask is None else batch[mask]
        write_extxyz(self._file, [data.to_atoms() for data in chosen.to_data_list()])
        self._file.flush()

    def close(self) -> None:
        """Close the file; a later :meth:`write` appends to it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
