"""The commands and their help."""

from typing import Annotated

import typer

from nvalchemi import __version__
from nvalchemi.cli.files import check, convert, info
from nvalchemi.cli.md import md
from nvalchemi.cli.models import models
from nvalchemi.cli.relax import relax

app = typer.Typer(
    help="Batched atomistic simulation with machine-learned interatomic potentials.",
    epilog=(
        "Exit codes: 0 done; 1 the run failed or did not converge; 2 wrong options or input, nothing written; "
        "130 interrupted."
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None: ...


for command in (relax, md, info, check, convert, models):
    app.command()(command)
