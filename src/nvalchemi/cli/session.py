"""What ``relax`` and ``md`` have in common: threads, device, potential, and the run itself."""

import logging
import re
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nvalchemi.cli.errors import InputError, InterruptError, RunError
from nvalchemi.cli.interrupt import StopOnSignal, interrupted
from nvalchemi.cli.output import log_backend

if TYPE_CHECKING:
    from nvalchemi.cli.record import RunRecord
    from nvalchemi.cli.structures import Rejected, Structure
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


def trajectory_hooks(file: Path | None, *, frequency: int, overwrite: bool) -> "list[Hook]":
    """The trajectory that was asked for."""
    if file is None:
        return []
    from nvalchemi.dynamics.hooks import SnapshotHook
    from nvalchemi.dynamics.sinks import ExtxyzTrajectory, ZarrData

    if file.suffix == ".zarr":
        return [
            SnapshotHook(ZarrData(file, config={"mode": "w"} if overwrite else None), frequency=frequency)
        ]
    return [SnapshotHook(ExtxyzTrajectory(file), frequency=frequency)]


def failure_hooks() -> "list[Hook]":
    """What gives up a structure whose energy or forces are not finite any more, and leaves the others alone."""
    from nvalchemi.dynamics.hooks import NaNDetectorHook

    return [NaNDetectorHook(action="quarantine")]


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
    from nvalchemi.cli.progress import ProgressBar, ProgressHook
    from nvalchemi.dynamics import DynamicsStage

    def show(bar: ProgressBar, ctx: "DynamicsContext") -> None:
        bar.show(ctx.step_count + 1, description=describe(ctx))

    return [ProgressHook(ProgressBar(steps, "step", quiet=quiet), DynamicsStage.AFTER_STEP, show)]


def usable_structures(
    found: "tuple[list[Structure], list[Rejected]]",
    potential: "BaseModelMixin",
    device: torch.device,
    *,
    velocities: bool,
    skip: bool,
) -> "tuple[list[Structure], Batch, list[Rejected]]":
    """Structures that can be run, as a batch, and those that cannot.

    Parameters
    ----------
    found
        Structures that may be, and those that are rejected already.
    potential, device
        With what they are to be run, where.
    velocities : bool
        Whether to keep velocities where all have them.
    skip : bool
        Leave out what cannot be run; otherwise all of it is named in an :class:`InputError`.
    """
    from nvalchemi.cli import structures as inputs
    from nvalchemi.cli.trial import unusable

    structures, rejected = found
    batch = inputs.make_batch(structures, potential, device, keep_velocities=velocities)
    bad = unusable(batch, potential)
    if bad:
        structures, rejected = inputs.leave_out(structures, bad, rejected)
    inputs.refuse(rejected, len(structures), skip=skip)
    if bad:
        batch = inputs.make_batch(structures, potential, device, keep_velocities=velocities)
    close = inputs.close_atoms(structures, batch)
    if close:
        warn("atoms are closer than any bond in " + some(close))
    return structures, batch, rejected


def run(
    dynamics: "BaseDynamics",
    structures: "Sequence[Structure]",
    batch: "Batch",
    n_steps: int,
    *,
    record: "RunRecord",
    report: Path | None = None,
    restart: Path | None = None,
    save_every: int = 100,
) -> signal.Signals | None:
    """Run, or go on with the run whose state is in ``restart``; the signal that stopped it, or ``None``.

    What is wrong before the first step (a state of another run, model and options that do not fit) is an
    :class:`InputError`, and no file is left behind; what goes wrong later is a :class:`RunError`. Either is one
    line.
    """

    def label(number: int) -> str:
        return structures[number].label

    record.check(restart)
    dynamics.register_hook(record)
    with StopOnSignal(dynamics.request_stop) as stop, _log_to_standard_error(label):
        with _nothing_left_behind(report, restart):
            try:
                # Admission alone: checks the batch, and computes the first forces that the run then starts from.
                dynamics.run(batch, n_steps=0, restart=restart, save_every=save_every)
            except ValueError as error:
                raise InputError(with_origins(str(error), label)) from error
            if stop.received is not None:
                raise interrupted(stop.received, "interrupted before the first step")
        try:
            dynamics.run(batch, n_steps=n_steps, restart=restart, save_every=save_every)
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            reason = with_origins(str(error), label)
            raise RunError(f"the run failed at step {dynamics.step_count}: {reason}") from error
    return stop.received


@contextmanager
def _nothing_left_behind(report: Path | None, restart: Path | None) -> Generator[None]:
    """Undo what a run that does not begin has written: its page, and a state that was not there before."""
    from nvalchemi.dynamics.restart import RestartFile

    page = report.read_bytes() if report is not None and report.exists() else None
    begins = restart is not None and not RestartFile(restart, 1).exists()
    try:
        yield
    except (InputError, InterruptError):
        if report is not None and page is not None:
            report.write_bytes(page)
        elif report is not None:
            report.unlink(missing_ok=True)
        if restart is not None and begins:
            restart.unlink(missing_ok=True)
        raise


@contextmanager
def _log_to_standard_error(label: "Callable[[int], str]") -> Generator[None]:
    """Say warnings of the engine as the command says its own, with structures as their files call them."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warn(with_origins(record.getMessage(), label))

    handler = Handler(logging.WARNING)
    logger = logging.getLogger("nvalchemi")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def warn(message: str) -> None:
    """A line on standard error."""
    print(f"nvalchemi: warning: {message}", file=sys.stderr)


def some(names: Sequence[str], between: str = ", ") -> str:
    """The first of many names."""
    return between.join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


_GRAPHS = re.compile(r"graphs? (?:\d+|\[[\d, ]*\]) \(system_id (\d+|\[[\d, ]*\])\)")
"""How the engine names structures, which it knows by their number in the batch."""


def with_origins(message: str, label: "Callable[[int], str]") -> str:
    """A message of the engine, with structures called as ``label`` calls their number."""

    def labels(match: re.Match[str]) -> str:
        return ", ".join(label(int(digits)) for digits in re.findall(r"\d+", match[1]))

    return _GRAPHS.sub(labels, message)


def without_graph_names(reason: str) -> str:
    """A reason of the engine, to be said behind the name of the structure."""
    return _GRAPHS.sub("it", re.sub(rf" (?:of|in) {_GRAPHS.pattern}", "", reason))


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


def failures(batch: "Batch") -> dict[int, str]:
    """Structures that the run has given up, by number, with the reason."""
    return {
        number: without_graph_names(str(info["failure"]))
        for number, info in enumerate(batch.info)
        if int(batch.status[number]) < 0
    }


def failed_in_words(
    structures: "Sequence[Structure]", failed: "dict[int, str]", rejected: "Sequence[Rejected]"
) -> str:
    """Which structures failed, and why."""
    names = [f"{structures[number].label}: {reason}" for number, reason in failed.items()]
    names += [f"{each.label}: {each.reason}" for each in rejected]
    return f"{len(names)} of {len(structures) + len(rejected)} structures failed: {some(names, '; ')}"
