"""Restart files: written whole or not at all, checked when read, never executed.

A file is in the ``safetensors`` format: the tensors of :mod:`nvalchemi.dynamics.state`, and the rest as JSON in
the entry ``state.json``. Its metadata name the format, its version and a SHA-256 of all entries. A new
state is written beside the file, forced to the disk and renamed over it; the one before is kept as
``<name>.previous``, so that at any moment one of the two is intact.
"""

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvalchemi._optional import import_extra
from nvalchemi._tree import flatten, unflatten

if TYPE_CHECKING:
    from nvalchemi.dynamics.base import BaseDynamics

FORMAT = "nvalchemi dynamics restart"
VERSION = 1
_JSON = "state.json"

logger = logging.getLogger(__name__)


class RestartError(ValueError):
    """A restart file that cannot be used: damaged, or not a restart file at all."""


# ---------------------------------------------------------------------- one file
def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state to a new file and force it to the disk."""
    save_file = import_extra("safetensors.torch", extra="checkpoint", needed_by="a restart file").save_file
    tree, tensors = flatten(state)
    tensors[_JSON] = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    metadata = {"format": FORMAT, "version": str(VERSION), "sha256": _digest(tensors)}
    save_file(tensors, path, metadata)
    _force_to_disk(path)


def read_state(path: Path) -> dict[str, Any]:
    """Read a state and check it.

    Raises
    ------
    RestartError
        The file is damaged, of another kind, or of a version that this package does not read.
    """
    safetensors = import_extra("safetensors", extra="checkpoint", needed_by="a restart file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise RestartError(f"{path} is not a restart file: its format is {metadata.get('format')!r}")
            if metadata.get("version") != str(VERSION):
                raise RestartError(
                    f"restart file {path} has version {metadata.get('version')}, this package reads {VERSION}"
                )
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}
    except safetensors.SafetensorError as error:
        raise RestartError(f"{path} is damaged or not a restart file: {error}") from error
    if metadata.get("sha256") != _digest(tensors):
        raise RestartError(f"restart file {path} is damaged: its content is not what was written")
    return unflatten(json.loads(tensors.pop(_JSON).numpy().tobytes()), tensors)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- the file of a run
class RestartFile:
    """The last two states of a run, and where in the program it was.

    A program may call ``run`` several times with the same file; the file says in which of these calls it was
    interrupted, and after how many steps.

    Parameters
    ----------
    path : str or Path
        The file; missing folders are made. The state before the last is ``<name>.previous`` next to it.
    every : int
        Steps between two saves.

    Raises
    ------
    ValueError
        ``every`` is not an int of 1 or more.
    """

    def __init__(self, path: str | Path, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"save_every must be an int ≥ 1, got {every!r}")
        self.path = Path(path)
        self.every = every
        self._run = 0
        self._saved: tuple[int, int] | None = None
        self._intact = False
        self.is_stopped = False
        """Whether a run was asked to stop: it may have steps left, which a later run must not be saved over."""

    @property
    def previous(self) -> Path:
        """Where the state before the last is."""
        return self.path.with_name(self.path.name + ".previous")

    def exists(self) -> bool:
        """Whether there is something to go on from."""
        return self.path.exists() or self.previous.exists()

    def begin_run(self, engine: "BaseDynamics") -> None:
        """Count one more run; at the first, give the engine the newest state there is."""
        if self.is_stopped:
            logger.warning("%s: run %d was asked to stop, no later run makes steps", self.path, self._run)
            return
        self._run += 1
        if self._run > 1:
            return
        found = self.read()
        if found is not None:
            engine.load_state_dict(found["engine"])
            self._saved = (found["run"], found["steps"])
            logger.info("%s: taking up run %d after %d steps", self.path, *self._saved)

    @property
    def run_is_over(self) -> bool:
        """Whether this run had come to its end, and the state is of a later one."""
        return self._saved is not None and self._saved[0] > self._run

    def steps_made(self, engine: "BaseDynamics") -> int:
        """Steps of this run that were made before the interruption. A new run is saved here."""
        if self._saved is not None and self._saved[0] == self._run:
            return self._saved[1]
        self.save(engine, 0)
        return 0

    def step_made(self, engine: "BaseDynamics", steps: int) -> None:
        """Save if that is due after so many steps of this run."""
        if steps % self.every == 0:
            self.save(engine, steps)

    def end_run(self, engine: "BaseDynamics", steps: int) -> None:
        """Save the end of this run."""
        if self._saved != (self._run, steps):
            self.save(engine, steps)

    # ------------------------------------------------------------------ reading and writing
    def read(self) -> dict[str, Any] | None:
        """Newest intact state; ``None`` when there is no file yet.

        Warns (``UserWarning``) when the last one cannot be used and the one before is taken.

        Raises
        ------
        RestartError
            There is something at this path, but nothing that can be used.
        """
        problems: list[RestartError] = []
        for path in (self.path, self.previous):
            if not path.exists():
                continue
            try:
                state = read_state(path)
            except RestartError as error:
                problems.append(error)
                continue
            for problem in problems:
                warnings.warn(f"{problem}; taking the state before it, {path}", UserWarning, stacklevel=5)
            self._intact = path == self.path
            return state
        if problems:
            raise RestartError("; ".join(str(problem) for problem in problems))
        return None

    def save(self, engine: "BaseDynamics", steps: int) -> None:
        """Write the state of the engine; a kill at any moment leaves this state or the last one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {"run": self._run, "steps": steps, "engine": engine.state_dict()}
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            write_state(temporary, state)
            if self._intact:
                os.replace(self.path, self.previous)
            os.replace(temporary, self.path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _force_to_disk(self.path.parent)
        self._intact, self._saved = True, (self._run, steps)


# ---------------------------------------------------------------------- files that grow during a run
def position_to_resume(path: Path, *, keep: bool) -> int:
    """Length of a file that is being appended to, forced to the disk; 0 where it is not there or not to be kept."""
    if not keep or not path.exists():
        return 0
    _force_to_disk(path)
    return path.stat().st_size


def cut_back(path: Path, position: int) -> None:
    """Cut a file back to where it ended when the state was saved: what comes after will be written again.

    Warns (``UserWarning``) when it is shorter than that, as when somebody removed it.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < position:
        warnings.warn(
            f"{path} has {size} bytes and had {position} when the run was saved: something is missing there",
            UserWarning,
            stacklevel=2,
        )
    elif size > position:
        os.truncate(path, position)
