"""What ``relax`` and ``md`` have in common: threads, device, potential, and the run itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nvalchemi.cli.errors import InputError, InterruptError, RunError
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


def load(name: str, device: torch.device) -> "BaseModelMixin":
    """The potential of that name; :class:`InputError` when it is unknown or its package is missing."""
    from nvalchemi.models.catalog import load_model

    try:
        return load_model(name, device=device)
    except (ValueError, ImportError) as error:
        raise InputError(f"--model {name}: {error}") from error


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


def terminal_hooks(steps: int, describe: "Callable[[DynamicsContext], str]", *, quiet: bool) -> "list[Hook]":
    """Progress, and Ctrl-C between two steps."""
    from nvalchemi.cli.progress import InterruptHook, ProgressHook

    return [ProgressHook(steps, describe, quiet=quiet), InterruptHook()]


def run(
    dynamics: "BaseDynamics",
    structures: "Sequence[Structure]",
    batch: "Batch",
    n_steps: int,
    *,
    restart: Path | None = None,
    save_every: int = 100,
) -> bool:
    """Run, or go on with the run whose state is in ``restart``, and say whether the user stopped it.

    What is wrong before the first step (model, structures and options that do not fit) is an
    :class:`InputError`, and no file was touched; what goes wrong later is a :class:`RunError`. Either is one
    line.
    """
    try:
        # Admission alone: checks the batch, and computes the first forces that the run then starts from.
        dynamics.run(batch, n_steps=0, restart=restart, save_every=save_every)
    except KeyboardInterrupt:
        raise InterruptError("interrupted before the first step; nothing was written") from None
    except ValueError as error:
        raise InputError(str(error)) from error
    wrong = _not_finite(structures, batch)
    if wrong:
        raise InputError(f"energy or forces are not finite: {wrong}; do atoms overlap?")
    try:
        dynamics.run(batch, n_steps=n_steps, restart=restart, save_every=save_every)
    except KeyboardInterrupt:
        return True
    except (ValueError, RuntimeError, OSError) as error:
        raise RunError(f"the run failed at step {dynamics.step_count}: {error}") from error
    return False


def how_to_resume(restart: Path | None) -> str:
    """End of the message about an interruption."""
    return "" if restart is None else f"; the same command goes on from the last state in {restart}"


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
