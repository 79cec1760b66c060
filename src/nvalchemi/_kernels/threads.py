"""Compilation of one function for one thread and for many."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
import torch


class ThreadedKernel:
    """A loop over ``numba.prange``, compiled on first use: serial for one thread, parallel for more.

    The serial form has no cost of entering a parallel region (tens of microseconds), which decides for small systems.
    Both forms do the same arithmetic in the same order for each element of the loop. The number of threads is that of
    ``torch.get_num_threads()``.

    Parameters
    ----------
    function : function
        Plain Python function in numba's subset.
    **options
        Options of ``numba.njit``; ``cache=True`` and ``error_model="numpy"`` are set.
    """

    def __init__(self, function: FunctionType, **options: Any) -> None:
        self.serial = numba.njit(_renamed(function, "_serial"), cache=True, error_model="numpy", **options)
        self.parallel = numba.njit(
            _renamed(function, "_parallel"), cache=True, error_model="numpy", parallel=True, **options
        )

    def __call__(self, *args: Any) -> Any:
        """Run the loop with as many threads as torch uses."""
        threads = torch.get_num_threads()
        if threads == 1:
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
