"""Training that starts from a trained model."""

from collections.abc import Mapping, Sequence
from typing import Any

from nvalchemi.training.hooks.finetune import ModulePatchHook, TrainableParameterHook
from nvalchemi.training.registry import as_hooks
from nvalchemi.training.strategy import TrainingStrategy


class FineTuningStrategy(TrainingStrategy):
    """A :class:`TrainingStrategy` that first replaces modules and freezes parameters.

    Parameters
    ----------
    models, optimizer_configs, loss_fn, **options
        As in :class:`TrainingStrategy`.
    freeze_patterns, trainable_patterns : sequence of str, default ()
        As in :class:`~nvalchemi.training.hooks.TrainableParameterHook`.
    patches : mapping, default {}
        As in :class:`~nvalchemi.training.hooks.ModulePatchHook`; done before freezing.

    Examples
    --------
    >>> import torch
    >>> from nvalchemi.models.demo import DemoModelWrapper
    >>> from nvalchemi.training import EnergyMSELoss, OptimizerConfig
    >>> strategy = FineTuningStrategy(
    ...     DemoModelWrapper(),
    ...     OptimizerConfig(torch.optim.Adam, {"lr": 1e-4}),
    ...     EnergyMSELoss(),
    ...     num_epochs=1,
    ...     trainable_patterns=["model.readout.*"],
    ... )
    >>> strategy.setup()
    >>> len(strategy.optimizers[0].param_groups[0]["params"])
    4
    """

    def __init__(
        self,
        models: Any,
        optimizer_configs: Any,
        loss_fn: Any,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        *,
        freeze_patterns: Sequence[str] = (),
        trainable_patterns: Sequence[str] = (),
        patches: Mapping[str, Any] | None = None,
        hooks: Any = (),
        **options: Any,
    ) -> None:
        first: list[Any] = []
        if patches:
            first.append(ModulePatchHook(patches))
        if freeze_patterns or trainable_patterns:
            first.append(
                TrainableParameterHook(
                    freeze_patterns=tuple(freeze_patterns), trainable_patterns=tuple(trainable_patterns)
                )
            )
        super().__init__(
            models,
            optimizer_configs,
            loss_fn,
            num_epochs,
            num_steps,
            hooks=[*first, *as_hooks(hooks)],
            **options,
        )
