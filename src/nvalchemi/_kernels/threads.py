"""Compilation of one function for one thread and for many."""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import numba
import torch

from nvalchemi._kernels.compiler import compiled


class ThreadedKernel:
    """A loop over ``numba.prange``, compiled on first use: serial for one thread, parallel for more.

    The serial form has no cost of entering a parallel region (tens of microseconds), which decides for small systems.
    Both forms do the same arithmetic in the same order for each element of the loop. The number of threads is that of
    ``torch.get_num_threads()``.

    Parameters
    ----------
    function : function
        Plain Python function in numba's subset.
    min_length : int, default 0
        Shorter first arguments are done by one thread: the number for which the serial form takes about 50 µs.
    **options
        Options of ``numba.njit``; ``error_model="numpy"`` is set.
    """

    def __init__(self, function: FunctionType, min_length: int = 0, **options: Any) -> None:
        compile_ = partial(compiled, error_model="numpy", **options)
        self.serial = compile_()(_renamed(function, "_serial"))
        self.parallel = compile_(parallel=True)(_renamed(function, "_parallel"))
        self._min_length = min_length

    def __call__(self, *args: Any) -> Any:
        """Run the loop with as many threads as torch uses."""
        threads = torch.get_num_threads()
        if threads == 1 or len(args[0]) < self._min_length:
            return self.serial(*args)
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # pyright: ignore
        return self.parallel(*args)


def _renamed(function: FunctionType, suffix: str) -> Callable[..., Any]:
    # numba's cache on disk is keyed by the name of the function and not by the options of the compilation.
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__ + suffix, None, function.__closure__
    )
    copy.__qualname__ = function.__qualname__ + suffix
    copy.__module__ = function.__module__
    return copy
