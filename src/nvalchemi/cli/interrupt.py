"""Ctrl-C and SIGTERM: a run ends behind the step under way, with everything saved."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from nvalchemi.cli.errors import InterruptError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it, and a process that is killed cannot bring it back


class StopOnSignal:
    """Context in which the first SIGINT or SIGTERM asks a run to stop and a second one kills the process.

    Parameters
    ----------
    request_stop : callable
        Asks for the stop. Called from the signal handler, so it should do no more than set a flag.

    Attributes
    ----------
    received : signal.Signals or None
        The signal that came.
    """

    def __init__(self, request_stop: Callable[[], None]) -> None:
        self._request_stop = request_stop
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._request_stop()
        # Left to the system the next one ends the process even inside a long evaluation of the model.
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        # Not print(): the handler may have come in the midst of another one.
        message = b"nvalchemi: stopping behind this step; once more to stop at once\n"
        os.write(2, b"\n" + _SHOW_CURSOR + message if sys.stderr.isatty() else message)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def interrupted(received: signal.Signals, message: str) -> InterruptError:
    """Error that ends a command which a signal has stopped, with the exit code that stands for the signal."""
    error = InterruptError(message)
    error.exit_code = 128 + received
    return error
