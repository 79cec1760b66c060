"""The commands and their help."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from nvalchemi import __version__
from nvalchemi.cli.errors import InterruptError
from nvalchemi.cli.evaluate import evaluate
from nvalchemi.cli.files import check, convert, info
from nvalchemi.cli.init import app as init
from nvalchemi.cli.md import md
from nvalchemi.cli.models import models
from nvalchemi.cli.option_file import command_with_config
from nvalchemi.cli.relax import relax
from nvalchemi.cli.train import train


class _Commands(TyperGroup):
    def invoke(self, ctx: typer.Context) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run a command; Ctrl-C where nothing catches it, as while a model is loaded, ends it in one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise InterruptError("interrupted") from None


app = typer.Typer(
    cls=_Commands,
    help="Batched atomistic simulation with machine-learned interatomic potentials.",
    epilog=(
        "Exit codes: 0 done; 1 the run failed or did not converge; 2 wrong options or input, nothing written; "
        "130 and 143 stopped by Ctrl-C or SIGTERM, with everything saved."
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


for command in (relax, md):
    app.command(cls=command_with_config(command))(command)
for command in (train, info, check, convert, models):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(init, name="init")
