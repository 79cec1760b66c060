"""``nvalchemi train``: a potential from labelled structures."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvalchemi.cli import options

if TYPE_CHECKING:
    import torch

    from nvalchemi.cli.labelled_data import LabelledData
    from nvalchemi.cli.train_hooks import StopTraining
    from nvalchemi.cli.train_setup import TrainingSetup
    from nvalchemi.data.datasets import StructureDataset
    from nvalchemi.training import TrainingStrategy


def train(
    config: Annotated[
        Path,
        typer.Argument(
            help="Configuration (YAML); `nvalchemi init train DATA` writes one.", show_default=False
        ),
    ],
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint: the result is that of a training that was not stopped. Without a "
            "checkpoint, start.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove an earlier training in the same directory.")
    ] = False,
    report: options.Report = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
    show_hooks: options.ShowHooks = False,
) -> None:
    """Train a potential as CONFIG says.

    The directory that it names gets the model with the best validation, which `relax`, `md` and `eval` take as --model,
    checkpoints, a log, and the configuration.
    """
    from nvalchemi.cli import session
    from nvalchemi.cli.errors import InputError, RunError
    from nvalchemi.cli.interrupt import StopOnSignal, interrupted
    from nvalchemi.cli.train_directory import check_directory, prepare_directory
    from nvalchemi.cli.train_setup import CHECKPOINTS

    if resume and overwrite:
        raise InputError(
            "--resume goes on with an earlier training and --overwrite removes it: give one of the two"
        )
    setup = _read(config)
    _check_report(report, setup, overwrite=overwrite or resume)
    going_on = check_directory(setup, resume=resume, overwrite=overwrite)
    session.set_threads(threads)
    where = session.choose_device(device)
    model = setup.make_model(where)
    data = setup.read_data(model)
    if going_on:
        setup.check_same_data(data)
    _print_incomplete(setup, data)
    parts = setup.make_parts(model, data, where)
    batches, validation = setup.loaders(parts)
    strategy = setup.make_strategy(model, batches, validation, where)
    stop = _register_observers(strategy, setup, len(batches), report=report, quiet=quiet)
    if show_hooks:
        strategy.setup()
        typer.echo(strategy.describe_hooks())
        return
    prepare_directory(setup, data, keep=going_on)
    if going_on:
        _restore(strategy, setup)
    if not quiet:
        _print_start(setup, strategy, parts, len(batches))

    with StopOnSignal(stop.request) as signals:
        try:
            if setup.fine_tunes and strategy.step_count == 0:
                _validate_first(strategy, setup, quiet=quiet)
            strategy.run(batches)
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            again = (
                "; --resume goes on from the last checkpoint"
                if (setup.directory / CHECKPOINTS).exists()
                else ""
            )
            reason = session.with_origins(str(error), lambda number: f"frame {number} of the data")
            raise RunError(f"training failed at step {strategy.step_count}: {reason}{again}") from error
    if stop.saved is not None and signals.received is not None:
        raise interrupted(
            signals.received,
            f"interrupted after {strategy.step_count} steps, all of which are saved in {stop.saved}; go on with: "
            f"nvalchemi train {config} --resume",
        )
    last = setup.directory / CHECKPOINTS / f"epoch-{strategy.epoch_count}"
    if not last.exists():
        strategy.save_checkpoint(last)
    if strategy.last_validation is None or strategy.last_validation["step_count"] != strategy.step_count:
        strategy.validate()
    if not quiet:
        _print_results(setup, strategy, parts, where, report)


def _read(config: Path) -> "TrainingSetup":
    """The configuration; that `init` was forgotten is said."""
    from nvalchemi.cli.errors import InputError
    from nvalchemi.cli.train_setup import TrainingSetup

    try:
        return TrainingSetup.read(config)
    except InputError as error:
        if not config.exists() or config.suffix in (".yaml", ".yml"):
            raise
        raise InputError(
            f"{config} is no configuration; if these are structures, first: nvalchemi init train {config}"
        ) from error


def _check_report(report: Path | None, setup: "TrainingSetup", *, overwrite: bool) -> None:
    from nvalchemi.cli import output as outputs
    from nvalchemi.cli.errors import InputError
    from nvalchemi.cli.train_directory import input_files

    if report is not None and report.suffix != ".html":
        raise InputError(f"--report {report}: the suffix must be .html")
    inputs = [setup.file.path, *input_files(setup).values()]
    outputs.check_outputs({"--report": report}, inputs, overwrite=overwrite)


def _print_incomplete(setup: "TrainingSetup", data: "Mapping[str, LabelledData]") -> None:
    """What structures cannot be trained on; not silenced, as it may be a mistake in the name of a key."""
    for name, each in data.items():
        for line in each.incomplete(setup.labels):
            key = line.partition(" ")[0] + "_key"
            typer.echo(f"nvalchemi: warning: {line} (data.{name}, data.{key})", err=True)


def _register_observers(
    strategy: "TrainingStrategy",
    setup: "TrainingSetup",
    num_batches: int,
    *,
    report: Path | None,
    quiet: bool,
) -> "StopTraining":
    """Register what writes and shows; what ends the training on request is returned."""
    from nvalchemi.cli import session
    from nvalchemi.cli.train_hooks import BestModel, StopTraining, TrainingLog, progress_hook
    from nvalchemi.cli.train_setup import CHECKPOINTS, LOG
    from nvalchemi.training import CheckpointHook, EarlyStoppingHook

    config, directory = setup.config, setup.directory
    checkpoints = CheckpointHook(
        directory / CHECKPOINTS,
        epoch_interval=config.output.checkpoint_every,
        keep_last=config.output.keep_checkpoints,
    )

    def save(name: str) -> Path:
        checkpoints.wait()
        path = directory / CHECKPOINTS / name
        strategy.save_checkpoint(path)
        return path

    stop = StopTraining(save)
    strategy.register_hook(BestModel(directory))
    if config.training.patience is not None:
        strategy.register_hook(EarlyStoppingHook(patience=config.training.patience))
    strategy.register_hook(
        TrainingLog(directory / LOG, setup.quantities, (lambda line: None) if quiet else _print_line)
    )
    for hook in session.report_hooks(report):
        strategy.register_hook(hook)
    strategy.register_hook(progress_hook(num_batches, config.training.epochs, quiet=quiet))
    strategy.register_hook(checkpoints)
    strategy.register_hook(stop)
    return stop


def _print_line(line: str) -> None:
    # Not typer.echo, which would write into the line of the progress bar.
    print(line, flush=True)


def _validate_first(strategy: "TrainingStrategy", setup: "TrainingSetup", *, quiet: bool) -> None:
    """Errors of a trained model as it comes; it stays the one that is kept should the training make nothing better."""
    from nvalchemi.cli.train_hooks import errors_in_words

    words = errors_in_words(setup.quantities, strategy.validate())
    if not quiet:
        typer.echo(f"before the training: {words}")


def _restore(strategy: "TrainingStrategy", setup: "TrainingSetup") -> None:
    from nvalchemi.cli.errors import RunError
    from nvalchemi.cli.train_setup import CHECKPOINTS

    try:
        strategy.restore_checkpoint(setup.directory / CHECKPOINTS)
    except (ValueError, OSError) as error:
        raise RunError(f"cannot go on: {error}") from error


def _print_start(
    setup: "TrainingSetup",
    strategy: "TrainingStrategy",
    parts: "Mapping[str, StructureDataset]",
    num_batches: int,
) -> None:
    structures = ", ".join(f"{len(part)} {name}" for name, part in parts.items())
    parameters = sum(p.numel() for p in strategy.model_dict["main"].parameters() if p.requires_grad)
    typer.echo(
        f"{setup.config.model.name} with {parameters} parameters to train, {setup.config.training.epochs} epochs of "
        f"{num_batches} batches; structures: {structures}"
    )
    if strategy.step_count:
        typer.echo(f"going on after epoch {strategy.epoch_count}, step {strategy.step_count}")


def _print_results(
    setup: "TrainingSetup",
    strategy: "TrainingStrategy",
    parts: "Mapping[str, StructureDataset]",
    device: "torch.device",
    report: Path | None,
) -> None:
    """How good the model is that was kept, and where everything is."""
    from nvalchemi.cli.error_table import print_errors
    from nvalchemi.cli.evaluation import evaluate
    from nvalchemi.cli.train_hooks import model_file_name
    from nvalchemi.cli.train_setup import CHECKPOINTS, LOG
    from nvalchemi.models.catalog import load_model

    directory = setup.directory
    path = directory / model_file_name(strategy.model_dict["main"])
    model = load_model(path, device=device)
    if strategy.stop_reason:
        typer.echo(f"ended early: {strategy.stop_reason}")
    typer.echo()
    print_errors({name: evaluate(model, part, device) for name, part in parts.items() if name != "train"})
    typer.echo()
    files = {"model": path, "checkpoints": directory / CHECKPOINTS, "log": directory / LOG, "report": report}
    for name, file in files.items():
        if file is not None:
            typer.echo(f"{name + ':':<12} {file}")
    typer.echo(f"use it:      nvalchemi relax … --model {path}")
