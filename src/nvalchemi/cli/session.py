"""What ``relax`` and ``md`` have in common: threads, device, potential, and the run itself."""

import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nvalchemi.cli.errors import InputError, RunError
from nvalchemi.cli.interrupt import StopOnSignal, interrupted
from nvalchemi.cli.output import log_backend

if TYPE_CHECKING:
    from nvalchemi.cli.structures import Structure
    from nvalchemi.data import AtomicData, Batch
    from nvalchemi.dynamics import BaseDynamics
    from nvalchemi.hooks import DynamicsContext, Hook
    from nvalchemi.models.base import BaseModelMixin


def choose_device(name: str) -> torch.device:
    """Device by name; ``auto`` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ) as error:  # torch raises AssertionError without CUDA
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {name} cannot be used here: {reason}") from error
    return device


def set_threads(threads: int | None) -> None:
    """Number of CPU threads for torch and for the compiled kernels, which follow it."""
    if threads is not None:
        torch.set_num_threads(threads)


def load(name: str, device: torch.device, option: str = "--model") -> "BaseModelMixin":
    """The potential of that name, of a file, or that a training has left in a directory.

    :class:`InputError` when it is unknown or its package is missing.
    """
    from nvalchemi.models.catalog import load_model

    try:
        if Path(name).is_dir():
            from nvalchemi.cli.train_setup import trained_model

            return trained_model(Path(name), device)
        return load_model(name, device=device)
    except (ValueError, ImportError) as error:
        raise InputError(f"{option} {name}: {error}") from error


def log_hooks(file: Path | None, *, frequency: int) -> "list[Hook]":
    """The log that was asked for."""
    if file is None:
        return []
    from nvalchemi.dynamics.hooks import LoggingHook

    return [LoggingHook(log_backend(file), frequency, file, append=False)]


def trajectory_hooks(file: Path | None, *, frequency: int) -> "list[Hook]":
    """The trajectory that was asked for."""
    if file is None:
        return []
    from nvalchemi.dynamics.hooks import SnapshotHook
    from nvalchemi.dynamics.sinks import ExtxyzTrajectory

    return [SnapshotHook(ExtxyzTrajectory(file), frequency=frequency)]


def report_hooks(
    file: Path | None, structures: "Sequence[Structure]" = (), *, frequency: int = 1
) -> "list[Hook]":
    """The page that was asked for."""
    if file is None:
        return []
    from nvalchemi.hooks import HTMLReporter, ReportingOrchestrator

    names = [structure.name for structure in structures]
    return [ReportingOrchestrator([HTMLReporter(file)], frequency=frequency, names=names)]


def progress_hooks(steps: int, describe: "Callable[[DynamicsContext], str]", *, quiet: bool) -> "list[Hook]":
    """The progress bar."""
    from nvalchemi.cli.progress import ProgressHook

    return [ProgressHook(steps, describe, quiet=quiet)]


def run(
    dynamics: "BaseDynamics",
    structures: "Sequence[Structure]",
    batch: "Batch",
    n_steps: int,
    *,
    restart: Path | None = None,
    save_every: int = 100,
) -> signal.Signals | None:
    """Run, or go on with the run whose state is in ``restart``; the signal that stopped it, or ``None``.

    What is wrong before the first step (model, structures and options that do not fit) is an
    :class:`InputError`, and no file was touched; what goes wrong later is a :class:`RunError`. Either is one
    line.
    """

    def label(number: int) -> str:
        return structures[number].label

    with StopOnSignal(dynamics.request_stop) as stop:
        try:
            # Admission alone: checks the batch, and computes the first forces that the run then starts from.
            dynamics.run(batch, n_steps=0, restart=restart, save_every=save_every)
        except ValueError as error:
            raise InputError(with_origins(str(error), label)) from error
        wrong = _not_finite(structures, batch)
        if wrong:
            raise InputError(f"energy or forces are not finite: {wrong}; do atoms overlap?")
        if stop.received is not None:
            raise interrupted(stop.received, "interrupted before the first step")
        try:
            dynamics.run(batch, n_steps=n_steps, restart=restart, save_every=save_every)
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            reason = with_origins(str(error), label)
            raise RunError(f"the run failed at step {dynamics.step_count}: {reason}") from error
    return stop.received


_GRAPHS = re.compile(r"graphs? (?:\d+|\[[\d, ]*\]) \(system_id (\d+|\[[\d, ]*\])\)")
"""How the engine names structures, which it knows by their number in the batch."""


def with_origins(message: str, label: "Callable[[int], str]") -> str:
    """A message of the engine, with structures called as ``label`` calls their number."""

    def labels(match: re.Match[str]) -> str:
        return ", ".join(label(int(digits)) for digits in re.findall(r"\d+", match[1]))

    return _GRAPHS.sub(labels, message)


def how_to_resume(restart: Path | None) -> str:
    """End of the message about an interruption."""
    return "" if restart is None else f"; the same command goes on from there ({restart})"


def save(file: Path, structures: "Sequence[AtomicData]") -> None:
    """Write results; a :class:`RunError` says why that failed."""
    from nvalchemi.data import write

    try:
        write(file, structures)
    except (OSError, ValueError) as error:
        raise RunError(f"{file} could not be written: {error}") from error


def check_finite(structures: "Sequence[Structure]", batch: "Batch") -> None:
    """:class:`RunError` that names the structures which a run has left without a finite energy."""
    wrong = _not_finite(structures, batch)
    if wrong:
        raise RunError(f"energy or forces are not finite any more: {wrong}")


def _not_finite(structures: "Sequence[Structure]", batch: "Batch") -> str:
    """Names of the structures whose energy, forces or positions are not finite."""
    bad = ~batch.energy[:, 0].isfinite()
    bad[batch.batch_idx[~(batch.positions + batch.forces).isfinite().all(dim=1)]] = True
    return ", ".join(structures[k].label for k in bad.nonzero()[:, 0].tolist())
