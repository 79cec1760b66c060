"""``nvalchemi info``, ``check`` and ``convert``: what is in a file, whether to train on it, another format."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvalchemi.cli import options

if TYPE_CHECKING:
    from nvalchemi.data import AtomicData


def info(
    file: Annotated[
        Path,
        typer.Argument(
            help="Structures in any format that ASE reads, a Zarr store, a model file, the directory of a training or "
            "its checkpoints, or the state of a run (--restart).",
            show_default=False,
        ),
    ],
) -> None:
    """Say what is in FILE.

    Of structures: frames, formulas, elements, periodicity, fields and the ranges of their values. Of a Zarr store the
    fields and how they are stored, from its metadata. Of a model its elements, cutoff and size (a file other than
    .safetensors is unpickled, which can run code: only those you trust). Of a checkpoint how far it is, its models, and
    whether it is intact.
    """
    from nvalchemi.cli.contents import describe
    from nvalchemi.cli.errors import InputError

    try:
        lines = [line.rstrip() for line in describe(file)]
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from error
    typer.echo("\n".join(lines))


def check(
    file: Annotated[
        Path,
        typer.Argument(
            help="A data set to train on: any format that ASE reads, or a Zarr store.", show_default=False
        ),
    ],
    quiet: options.NoProgress = False,
) -> None:
    """Say whether FILE is fit to train on.

    Looks for missing labels, duplicates, overlapping atoms, outliers, values that are not finite, and a stress of the
    wrong sign or unit. Exit code 1 when it is not fit.
    """
    from nvalchemi.cli.errors import InputError
    from nvalchemi.cli.progress import ProgressBar
    from nvalchemi.data.check import check_dataset

    try:
        with ProgressBar(None, "structure", quiet=quiet) as bar:
            report = check_dataset(file, bar.advance_to)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from error
    typer.echo("\n".join(report.lines()))
    if not report.fit_to_train:
        raise typer.Exit(1)


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File to read.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.", show_default=False)],
    index: Annotated[str, typer.Option(help="Frames, as in ASE: 5, -1, 10:20, ::10.")] = ":",
    input_format: Annotated[
        str | None, typer.Option(help="Format of IN.  [default: by its name and content]", show_default=False)
    ] = None,
    output_format: Annotated[
        str | None, typer.Option(help="Format of OUT.  [default: by its suffix]", show_default=False)
    ] = None,
    system: Annotated[
        int | None,
        typer.Option(
            help="Frames of this system_id only, by its steps: one trajectory out of a run of many.",
            show_default=False,
        ),
    ] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out frames that cannot be read.")
    ] = False,
    overwrite: options.Overwrite = False,
    quiet: options.NoProgress = False,
) -> None:
    """Convert structures from one format to another.

    Frame by frame; OUT appears whole or not at all.
    """
    import torch

    from nvalchemi.cli.errors import InputError
    from nvalchemi.cli.output import check_outputs
    from nvalchemi.cli.progress import ProgressBar
    from nvalchemi.data import iread, write

    check_outputs({"OUT": target}, [source], overwrite=overwrite)
    try:
        if system is not None and index != ":":
            raise ValueError("give --index or --system, not both")
        frames = iread(
            source,
            index,
            format=input_format,
            on_error="skip" if skip_broken else "raise",
            dtype=torch.float64,
            system_id=system,
        )
        with ProgressBar(None, "frame", quiet=quiet) as bar:
            chosen = bar.count(_not_empty(frames, source, index, system))
            count = write(target, chosen, format=output_format)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from error
    typer.echo(f"{target}: {count} structure{'s' if count != 1 else ''}")


def _not_empty(
    frames: Iterable["AtomicData"], source: Path, index: str, system: int | None
) -> Iterator["AtomicData"]:
    empty = True
    for frame in frames:
        empty = False
        yield frame
    if empty:
        chosen = f"--system {system}" if system is not None else f"--index {index}" if index != ":" else None
        raise ValueError(
            f"{source}: " + (f"{chosen} chooses no frame of it" if chosen else "no structure in it")
        )
