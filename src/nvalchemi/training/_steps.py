"""Zeroing and stepping optimizers, and how to know that a step really ran."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
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


class Gradients(Mapping[str, Tensor]):
    """Gradients of models by name of the parameter, looked up when they are asked for.

    Examples
    --------
    >>> layer = torch.nn.Linear(1, 1)
    >>> layer(torch.ones(1, 1)).sum().backward()
    >>> {name: gradient.tolist() for name, gradient in Gradients({"main": layer}).items()}
    {'weight': [[1.0]], 'bias': [1.0]}
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models

    def _present(self) -> dict[str, Tensor]:
        several = len(self._models) > 1
        return {
            f"{key}.{name}" if several else name: parameter.grad
            for key, model in self._models.items()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._present()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._present())

    def __len__(self) -> int:
        return len(self._present())


def total_norm(gradients: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients together, as :func:`torch.nn.utils.get_total_norm` has it, to the bit.

    Examples
    --------
    >>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])]).item()
    5.0
    """
    if not _alike(gradients):
        return torch.nn.utils.get_total_norm(gradients, norm_type)
    norms = torch._foreach_norm(gradients, norm_type)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def scale_to_norm(parameters: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of this norm down, as :func:`torch.nn.utils.clip_grads_with_norm_` does, to the bit."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if _alike(gradients):
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def _alike(tensors: list[Tensor]) -> bool:
    """Whether one operation may take them all. Torch sorts them first, which takes longer than the operation."""
    if not tensors:
        return False
    device, dtype = tensors[0].device, tensors[0].dtype
    return all(type(t) is Tensor and t.device == device and t.dtype is dtype for t in tensors)


def zero_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Set all gradients to ``None``."""
    for optimizer in optimizers:
        if type(optimizer).zero_grad is not Optimizer.zero_grad:
            optimizer.zero_grad(set_to_none=True)
            continue
        # What Optimizer.zero_grad comes to, without the profiler's record that takes longer than all of it.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def step_optimizers(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler | None],
    scaler: torch.amp.GradScaler | None = None,
) -> bool:
    """Step each optimizer that has gradients, then each scheduler whose optimizer really stepped.

    An optimizer none of whose parameters took part in the batch would change nothing; its schedule waits.

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
        Whether a step really ran: there were gradients, and the scaler did not find that they overflowed.
    """
    stepped = [optimizer for optimizer in optimizers if has_gradients(optimizer)]
    if scaler is not None:
        stepped = _step_with_scaler(stepped, scaler)
    else:
        for optimizer in stepped:
            optimizer.step()
    for scheduler in schedulers:
        if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
            continue
        if any(scheduler.optimizer is optimizer for optimizer in stepped):
            scheduler.step()
    return bool(stepped)


def _step_with_scaler(optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler) -> list[Optimizer]:
    """Optimizers that really stepped."""
    before = [steps_made(optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        scaler.step(optimizer)
    if optimizers:
        scaler.update()
    return [optimizer for optimizer, n in zip(optimizers, before, strict=True) if steps_made(optimizer) > n]
