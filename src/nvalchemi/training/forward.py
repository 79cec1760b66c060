"""From a batch to predictions and a loss, with errors that say what is wrong."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.hooks import TrainContext
from nvalchemi.training.losses import ComposedLoss, LossOutput


def predict(
    training_fn: Callable[..., Any] | None, subject: Any, batch: Batch, models: Mapping[str, nn.Module]
) -> Mapping[str, Tensor]:
    """Forward pass: ``training_fn(subject, batch)``, or ``subject(batch)``.

    Raises
    ------
    TypeError
        The result is no mapping; weights and batch differ in dtype.
    """
    try:
        predictions: Any = subject(batch) if training_fn is None else training_fn(subject, batch)
    except RuntimeError as error:
        _explain_dtypes(models, batch, error)
        raise
    if not isinstance(predictions, Mapping):
        raise TypeError(
            f"the forward pass must give a mapping of names to tensors, got {type(predictions).__name__}"
        )
    return predictions


def _explain_dtypes(models: Mapping[str, nn.Module], batch: Batch, error: RuntimeError) -> None:
    """Models may cast by themselves, so different dtypes are an error only when the forward pass has failed."""
    for key, model in models.items():
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if dtypes and batch.dtype not in dtypes and "dtype" in str(error):
            raise TypeError(
                f"model {key!r} has weights of {', '.join(sorted(map(str, dtypes)))} and the batch is {batch.dtype}: "
                "use batch.to(dtype=…) or model.to(…)"
            ) from error


def on_device(batch: Any, device: torch.device) -> Batch:
    """The batch on a device.

    Raises
    ------
    TypeError
        It is no batch.
    """
    if not isinstance(batch, Batch):
        hint = ": nvalchemi.data.DataLoader makes them of a dataset" if isinstance(batch, AtomicData) else ""
        raise TypeError(f"the dataloader must give Batch, got {type(batch).__name__}{hint}")
    return batch if batch.device == device else batch.to(device)


def evaluate_function(
    loss_fn: Callable[..., Any], predictions: Mapping[str, Tensor], batch: Batch
) -> tuple[Tensor, Mapping[str, Tensor], LossOutput | None]:
    """Loss of a function of the user's, which gives a scalar or a :class:`~nvalchemi.training.losses.LossOutput`."""
    total = loss_fn(predictions, batch)
    if isinstance(total, LossOutput):
        return total.total, total.components, total
    if not isinstance(total, Tensor) or total.numel() != 1:
        found = f"shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise TypeError(f"loss_fn must give a scalar tensor, got {found}")
    total = total.reshape(())
    return total, {"loss": total}, None


def why_not_finite(loss: ComposedLoss | None, ctx: TrainContext) -> str:
    """Components and graphs that are not finite; for a function of the user's, just its values."""
    reason = None
    if loss is not None and ctx.predictions is not None and ctx.batch is not None:
        reason = loss.explain(ctx.predictions, ctx.batch)
    return reason or str({name: value.item() for name, value in (ctx.losses or {}).items()})
