"""Zeroing and stepping optimizers, and how to know that a step really ran."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_made: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def steps_made(optimizer: Optimizer) -> int:
    """Steps the optimizer has really made since it was first asked about.

    A vetoed step, or one that a gradient scaler left out, does not count: the number is kept by a step
    post-hook of the optimizer itself.

    Examples
    --------
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    >>> before = steps_made(optimizer)
    >>> optimizer.step()
    >>> steps_made(optimizer) - before
    1
    """
    count = _made.get(optimizer)
    if count is None:
        _made[optimizer] = count = 0
        optimizer.register_step_post_hook(_count_step)
    return count


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A fused optimizer is called even after an overflow and leaves the weights alone inside its kernel; the
    # scaler tells it so by this attribute, which exists only during that call.
    overflow: Tensor | None = vars(optimizer).get("found_inf")
    if overflow is None or not overflow.item():
        _made[optimizer] += 1


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Every parameter that the optimizers change."""
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether any parameter of the optimizer has a gradient."""
    return any(p.grad is not None for p in parameters_of([optimizer]))


def zero_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Set all gradients to ``None``."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def step_optimizers(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler | None],
    scaler: torch.amp.GradScaler | None = None,
) -> bool:
    """Step each optimizer, then each scheduler whose optimizer really stepped.

    Parameters
    ----------
    optimizers : sequence of Optimizer
        Stepped in this order.
    schedulers : sequence of LRScheduler or None
        Each belongs to the optimizer it was made for. Schedulers driven by a metric are left to validation.
    scaler : GradScaler, optional
        Steps the optimizers in its own way, and is updated once at the end.

    Returns
    -------
    bool
        Whether a step really ran; a scaler leaves it out where gradients overflowed.
    """
    before = [steps_made(optimizer) for optimizer in optimizers]
    if scaler is None:
        for optimizer in optimizers:
            optimizer.step()
    else:
        # The scaler refuses an optimizer none of whose parameters took part in this batch.
        active = [optimizer for optimizer in optimizers if has_gradients(optimizer)]
        for optimizer in active:
            scaler.step(optimizer)
        if active:
            scaler.update()
    stepped = {
        id(optimizer) for optimizer, n in zip(optimizers, before, strict=True) if steps_made(optimizer) > n
    }
    for scheduler in schedulers:
        if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
            continue
        if id(scheduler.optimizer) in stepped:
            scheduler.step()
    return bool(stepped)
