"""How functions of this package are compiled."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: ``numba.njit`` with these options, kept on disk where there is a place for it.

    numba keeps what it compiled in ``__pycache__`` beside the source, else in the user's cache folder, and in
    ``NUMBA_CACHE_DIR`` before both. Where none can be written to, which it takes for an error, each process compiles
    anew.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # cannot cache function: no locator available
            return numba.njit(**options)(function)

    return decorate
