"""What a hook is shown: a snapshot of the workflow at one stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nvalchemi.data import Batch


@dataclass(kw_only=True)
class HookContext:
    """Snapshot shared by every workflow.

    Attributes
    ----------
    batch : Batch or None
        Current batch; ``None`` only at stages that have none.
    model : BaseModelMixin or None
        Model of the workflow.
    global_rank : int
        Rank of this process in a distributed run.
    workflow : object
        The engine itself.
    """

    batch: Batch | None
    model: Any = None
    global_rank: int = 0
    workflow: Any = None


@dataclass(kw_only=True)
class DynamicsContext(HookContext):
    """Snapshot of a dynamics engine. Masks are bool ``[B]`` on the batch's device.

    Attributes
    ----------
    step_count : int
        Number of the current step, from 0.
    converged_mask : Tensor or None
        Graphs that newly meet the criteria; at ``ON_CONVERGE`` only.
    active_graph_mask : Tensor or None
        Graphs that are being advanced; ``None`` while all are.
    graduated_mask : Tensor or None
        Graphs whose status reached the exit status in this step; at ``ON_GRADUATE`` only.
    admitted_mask : Tensor or None
        Graphs that just entered; at ``ON_ADMISSION`` only.
    """

    step_count: int = 0
    converged_mask: torch.Tensor | None = None
    active_graph_mask: torch.Tensor | None = None
    graduated_mask: torch.Tensor | None = None
    admitted_mask: torch.Tensor | None = None


@dataclass(kw_only=True)
class TrainContext(HookContext):
    """Snapshot of a training strategy.

    Attributes
    ----------
    step_count : int
        Optimizer steps made.
    global_step_count : int
        Optimizer steps summed over ranks.
    batch_count : int
        Batches seen.
    epoch_step_count : int
        Optimizer steps made in this epoch.
    epoch : int
        Number of the epoch, from 0.
    is_last_batch : bool
        Whether this is the last batch of the epoch.
    predictions : Mapping or None
        What the model returned, from ``AFTER_FORWARD`` on.
    loss : Tensor or None
        Total loss, from ``AFTER_LOSS`` on.
    losses : Mapping or None
        Its terms by name.
    unweighted_losses : Mapping or None
        The same before weighting; ``None`` with a loss function that has no weights.
    loss_output : LossOutput or None
        What a loss of :mod:`nvalchemi.training.losses` returned; ``None`` for a function that gives a tensor.
    raw_loss : Tensor or None
        From ``DO_BACKWARD`` on, the loss as it was before update hooks scaled or weighted it.
    step_made : bool or None
        From ``AFTER_OPTIMIZER_STEP`` on, whether an optimizer really stepped in this batch; ``None``: not known.
    gradient_norm : float or None
        Norm of all gradients before a step, as a hook found it that then changed them (clipping).
    models : Mapping or None
        All models of the strategy by name.
    optimizers, lr_schedulers : sequence
        Optimizers and learning-rate schedulers.
    gradients : Mapping or None
        From ``AFTER_BACKWARD`` on, gradients by name of the parameter (of several models ``"<model>.<parameter>"``),
        as they stand when they are read: with a gradient scaler, scaled until just before the step.
    grad_scaler : torch.amp.GradScaler or None
        Loss scaler of mixed precision.
    validation : Mapping or None
        Result of the last validation.
    """

    step_count: int = 0
    global_step_count: int = 0
    batch_count: int = 0
    epoch_step_count: int = 0
    epoch: int = 0
    is_last_batch: bool = False
    predictions: Mapping[str, torch.Tensor] | None = None
    loss: torch.Tensor | None = None
    losses: Mapping[str, torch.Tensor] | None = None
    unweighted_losses: Mapping[str, torch.Tensor] | None = None
    loss_output: Any = None
    raw_loss: torch.Tensor | None = None
    step_made: bool | None = None
    gradient_norm: float | None = None
    models: Mapping[str, Any] | None = None
    optimizers: Sequence[Any] = field(default_factory=list)
    lr_schedulers: Sequence[Any] = field(default_factory=list)
    gradients: Mapping[str, torch.Tensor] | None = None
    grad_scaler: Any = None
    validation: Mapping[str, Any] | None = None


def active_graphs(ctx: HookContext) -> torch.Tensor | None:
    """Graphs that a hook may touch: bool ``[B]``, or ``None`` for all (also in workflows that have no such mask)."""
    return ctx.active_graph_mask if isinstance(ctx, DynamicsContext) else None
