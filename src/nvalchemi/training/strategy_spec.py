"""A strategy as plain values, and back."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from nvalchemi.hooks import NeighborListHook
from nvalchemi.training.hooks.update import TrainingUpdateOrchestrator
from nvalchemi.training.losses import ComposedLoss, LossTerm
from nvalchemi.training.spec import describe, name_of, rebuild, resolve
from nvalchemi.training.validation import ValidationConfig

if TYPE_CHECKING:
    from nvalchemi.training.strategy import TrainingStrategy

_PLAIN = ("num_epochs", "num_steps", "auto_neighbors", "check_finite")


def describe_strategy(strategy: "TrainingStrategy") -> dict[str, Any]:
    """Specification of a strategy (see :meth:`TrainingStrategy.to_spec_dict`)."""
    hooks: list[Any] = []
    for hook in strategy.hooks:
        hooks += hook.iter_hooks() if isinstance(hook, TrainingUpdateOrchestrator) else (hook,)
    validation, loss = strategy.validation_config, strategy.loss_fn
    return {
        "type": name_of(type(strategy)),
        "models": {key: name_of(type(model)) for key, model in strategy.model_dict.items()},
        "optimizer_configs": _dump_configs(strategy.optimizer_configs),
        "loss_fn": loss.to_spec() if isinstance(loss, LossTerm | ComposedLoss) else name_of(loss),
        "training_fn": None if strategy.training_fn is None else name_of(strategy.training_fn),
        "devices": [str(device) for device in strategy.devices],
        "validation_config": None
        if validation is None
        else validation.model_dump(mode="json", exclude={"validation_data", "batch_callback"}),
        "hooks": [describe(hook) for hook in hooks if isinstance(hook, BaseModel)],
        # Neighbour lists are added again by themselves.
        "omitted_hooks": [
            type(hook).__name__ for hook in hooks if not isinstance(hook, BaseModel | NeighborListHook)
        ],
        **{name: vars(strategy)[name] for name in _PLAIN},
    }


def _dump_configs(configs: Any) -> Any:
    if isinstance(configs, dict):
        return {key: _dump_configs(value) for key, value in configs.items()}
    if isinstance(configs, list):
        return [_dump_configs(value) for value in configs]
    return configs.model_dump(mode="json")


def arguments_from_spec(
    spec: Mapping[str, Any], validation_data: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a strategy: those of the specification, replaced by ``options`` where given.

    Warns
    -----
    UserWarning
        Validation data or hooks are missing.
    """
    names = ("optimizer_configs", "loss_fn", "training_fn", "devices", "validation_config", *_PLAIN)
    if missing := [name for name in names if name not in spec]:
        raise ValueError(f"this is no specification of a strategy: it lacks {', '.join(missing)}")
    given: dict[str, Any] = {name: spec[name] for name in names}
    if isinstance(given["loss_fn"], str):
        given["loss_fn"] = resolve(given["loss_fn"])
    if options.get("num_epochs") or options.get("num_steps"):
        given["num_epochs"] = given["num_steps"] = None
    if given["validation_config"] is not None and "validation_config" not in options:
        if validation_data is None:
            warnings.warn(
                "the specification validates: give validation_data, or none is done",
                UserWarning,
                stacklevel=3,
            )
            given["validation_config"] = None
        else:
            given["validation_config"] = ValidationConfig(
                validation_data=validation_data, **given["validation_config"]
            )
    if "hooks" not in options:
        given["hooks"] = [rebuild(described) for described in spec["hooks"]]
        if spec["omitted_hooks"]:
            omitted = ", ".join(spec["omitted_hooks"])
            warnings.warn(f"give hooks=…: {omitted} could not be described", UserWarning, stacklevel=3)
    return {**given, **options}
