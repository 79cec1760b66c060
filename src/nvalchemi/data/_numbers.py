"""Numbers of structures as users give them, brought into one form."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

Indices = Sequence[int] | np.ndarray | Tensor


def position(index: int, count: int, holder: str) -> int:
    """The number ``index``, possibly counted from the end, as 0 ≤ number < ``count``; ``holder`` is whose it is.

    Raises
    ------
    IndexError
        There is no such structure.
    """
    if not -count <= index < count:
        raise IndexError(f"structure {index} is out of range: {holder} has {count}")
    return index % count


def positions(indices: Indices, count: int, holder: str) -> np.ndarray:
    """The numbers that an integer index, or a mask over all structures, stands for; int64.

    Raises
    ------
    IndexError
        There is no such structure, or the index is of another shape or type.
    """
    idx = np.asarray(indices)
    if idx.dtype == np.bool_:
        if idx.shape != (count,):
            raise IndexError(f"a mask over structures must have shape [{count}], got {list(idx.shape)}")
        return np.flatnonzero(idx)
    if idx.size == 0:
        return np.zeros(0, dtype=np.int64)
    if idx.ndim != 1 or idx.dtype.kind not in "iu":
        raise IndexError(
            f"structures are chosen by a 1-D integer or boolean index, got {list(idx.shape)} of {idx.dtype}"
        )
    for extreme in (int(idx.min()), int(idx.max())):
        position(extreme, count, holder)
    return np.where(idx < 0, idx + count, idx).astype(np.int64)
