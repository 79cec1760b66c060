"""What goes wrong in a command, as its user sees it: one line on standard error and an exit code."""


class CommandError(Exception):
    """Ends a command with a message and an exit code, without a traceback."""

    exit_code: int


class InputError(CommandError):
    """The options or the input files are wrong; nothing was run and nothing written."""

    exit_code = 2


class RunError(CommandError):
    """The run failed or did not reach what was asked for."""

    exit_code = 1


class InterruptError(CommandError):
    """A signal stopped the run; what there was is written."""

    exit_code = 130  # 128 + SIGINT
