"""The ``nvalchemi`` command.

Nothing is imported until a command runs, so that help and shell completion answer at once.
"""

import os
import signal
import sys
import warnings
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``nvalchemi`` command; always ends in ``SystemExit`` with the command's exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the name of the command; default ``sys.argv[1:]``.

    Notes
    -----
    Mistakes end in one line on standard error. With the environment variable ``NVALCHEMI_DEBUG`` set, they end in a
    traceback.
    """
    try:
        from nvalchemi.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"nvalchemi: the command line needs {error.name}: pip install 'nvalchemi[cli]'")
    from nvalchemi.cli.errors import CommandError

    before, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        app(args=None if arguments is None else list(arguments), prog_name="nvalchemi")
    except CommandError as error:
        if os.environ.get("NVALCHEMI_DEBUG"):
            raise
        print(f"nvalchemi: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        warnings.formatwarning = before
        if arguments is None:
            # All is done and written: a further Ctrl-C ends the process without a traceback of its last moments.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Words of a warning, without the place in the code that gave it."""
    return f"nvalchemi: warning: {message}\n"
