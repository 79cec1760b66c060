"""The ``nvalchemi`` command.

Nothing is imported until a command runs, so that help and shell completion answer at once.
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``nvalchemi`` command; always ends in ``SystemExit`` with the command's exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the name of the command; default ``sys.argv[1:]``.
    """
    try:
        from nvalchemi.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"nvalchemi: the command line needs {error.name}: pip install 'nvalchemi[cli]'")
    from nvalchemi.cli.errors import CommandError

    try:
        app(args=None if arguments is None else list(arguments), prog_name="nvalchemi")
    except CommandError as error:
        print(f"nvalchemi: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
