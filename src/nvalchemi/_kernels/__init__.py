"""Functions that numba compiles for the CPU. Importing this package compiles nothing; its modules are imported on use.

Each stands beside portable torch operations that give the same, for other devices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_in_use = True


def serve(tensor: "Tensor") -> bool:
    """Whether compiled functions do the work on this tensor, and not portable operations."""
    return _in_use and tensor.device.type == "cpu"


@contextmanager
def portable_operations() -> Iterator[None]:
    """Inside the block the CPU runs what other devices run: for tests of that code."""
    global _in_use
    before, _in_use = _in_use, False
    try:
        yield
    finally:
        _in_use = before
