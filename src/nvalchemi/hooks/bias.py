"""An extra potential on top of the model's."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.hooks.context import HookContext, active_graphs
from nvalchemi.hooks.protocols import CheckpointableHook

BiasFunction = Callable[[Batch], tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]]

_NAMES = ("energy", "forces", "stress")


class BiasedPotentialHook:
    """Add a bias potential to what the model wrote.

    Parameters
    ----------
    bias_fn : callable
        ``bias_fn(batch)`` returns the bias energy ``[B, 1]`` (eV) and its forces ``[N, 3]`` (eV/Å), and,
        where the bias depends on the cell, its stress ``[B, 3, 3]`` (eV/Å³, (1/V) ∂E/∂ε). They must have
        the dtype and device of the batch's own. One with ``state_dict`` and ``load_state_dict``, such as a
        bias that grows during the run, is saved and restored by restarts.
    stage : Enum, optional
        Where to add; default ``AFTER_COMPUTE``.
    frequency : int, default 1
        Every so many steps. Anything but 1 makes the forces alternate; it is for biases that are meant so.
    inplace : bool, default True
        Add into the batch's tensors; ``False`` replaces them, for code that keeps references to the
        unbiased ones.

    Raises
    ------
    ValueError
        When called: ``bias_fn`` returned another number of tensors, or one of another shape, dtype or
        device than the field it is added to. Shapes never broadcast.

    Notes
    -----
    Graphs that are not being advanced are left untouched. A stress is added when the batch has one.

    Examples
    --------
    >>> def pull(batch):  # a constant force along x
    ...     forces = torch.zeros_like(batch.forces)
    ...     forces[:, 0] = 0.1
    ...     return torch.zeros_like(batch.energy), forces
    >>> BiasedPotentialHook(pull).frequency
    1
    """

    default_stages = ("AFTER_COMPUTE",)
    part_of_evaluation = True
    order_role = "bias"

    def __init__(
        self, bias_fn: BiasFunction, stage: Enum | None = None, frequency: int = 1, inplace: bool = True
    ) -> None:
        self.bias_fn = bias_fn
        self.stage = stage
        self.frequency = frequency
        self.inplace = inplace

    def state_dict(self) -> dict[str, Any]:
        """State of the bias function, if it has one."""
        return dict(self.bias_fn.state_dict()) if isinstance(self.bias_fn, CheckpointableHook) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state of the bias function."""
        if isinstance(self.bias_fn, CheckpointableHook):
            self.bias_fn.load_state_dict(state)

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Evaluate the bias and add it."""
        batch = ctx.batch
        if batch is None:
            raise ValueError(f"BiasedPotentialHook needs a batch; stage {stage.name} has none")
        terms = self.bias_fn(batch)
        if not isinstance(terms, tuple) or len(terms) not in (2, 3):
            raise ValueError(
                f"bias_fn must return (energy, forces) or (energy, forces, stress), got {_describe(terms)}"
            )
        active = active_graphs(ctx)
        for name, term in zip(_NAMES, terms, strict=False):
            if name == "stress" and name not in batch:
                continue
            self._add(batch, name, term, active)

    def _add(self, batch: Batch, name: str, term: Tensor, active: Tensor | None) -> None:
        target: Tensor = batch[name]
        if term.shape != target.shape or term.dtype != target.dtype or term.device != target.device:
            raise ValueError(f"bias {name} is {_describe(term)}, the batch's {name} is {_describe(target)}")
        if active is not None:
            mask = active[batch.batch_idx] if name == "forces" else active
            term = torch.where(mask.view(-1, *[1] * (term.ndim - 1)), term, 0)
        if self.inplace:
            target.add_(term)
        else:
            batch.add_key(name, target + term)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return f"a {type(value).__name__}"
