"""In-place updates of per-atom state that leave inactive rows as they are, to the bit."""

import torch
from torch import Tensor


def add_product(target: Tensor, a: Tensor, b: Tensor, rows: Tensor | None) -> None:
    """``target += a * b`` in the rows marked (bool, broadcast against ``target``); all when ``rows`` is ``None``.

    Inactive rows are selected, not multiplied by zero: a failed structure may hold NaN, and −0 must stay −0.
    """
    if rows is None:
        target.addcmul_(a, b)
    else:
        torch.where(rows, torch.addcmul(target, a, b), target, out=target)


def assign(target: Tensor, value: Tensor, rows: Tensor | None) -> None:
    """``target = value`` in the rows marked; all when ``rows`` is ``None``."""
    if rows is None:
        target.copy_(value)
    else:
        torch.where(rows, value, target, out=target)
