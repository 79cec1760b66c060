"""From configurations to optimizers."""

import fnmatch
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nvalchemi.models.base import BaseModelMixin, NeighborConfig, NeighborListFormat
from nvalchemi.training.losses import ComposedLoss, LossTerm
from nvalchemi.training.optimizer_config import OptimizerConfig


def check_config_type(configs: Any) -> Any:
    """Say what is wanted where an optimizer, its class or its name is given instead of a configuration."""
    for config in configs if isinstance(configs, list | tuple) else [configs]:
        if isinstance(config, Optimizer):
            raise ValueError(
                f"give OptimizerConfig({type(config).__name__}, {{…}}), not the optimizer: the strategy builds it "
                "when hooks have frozen or replaced what they are to"
            )
        if isinstance(config, str | type):
            name = config if isinstance(config, str) else config.__name__
            raise ValueError(
                f"give OptimizerConfig({name}, {{…}}) with the arguments of the optimizer, not {name}"
            )
    return configs


def configs_by_model(configs: Any, models: Mapping[str, nn.Module]) -> dict[str, list[OptimizerConfig]]:
    """Bring every accepted form of ``optimizer_configs`` into one: a list for each trained model.

    Raises
    ------
    ValueError
        A key that is no model, or no keys for several models.
    """
    if not isinstance(configs, Mapping):
        if len(models) > 1:
            raise ValueError(
                f"say which of the models {sorted(models)} each optimizer is for: optimizer_configs={{key: config}}"
            )
        configs = {next(iter(models)): configs}
    unknown = sorted(set(configs) - set(models))
    if unknown:
        raise ValueError(f"optimizer_configs name {unknown}; the models are {sorted(models)}")
    lists = {key: list(value) if isinstance(value, list) else [value] for key, value in configs.items()}
    if not any(lists.values()):
        raise ValueError("there is no optimizer")
    return {key: value for key, value in lists.items() if value}


def check_models(models: Mapping[str, nn.Module]) -> None:
    """Refuse what cannot be trained here."""
    if not models:
        raise ValueError("there is no model")
    for key, model in models.items():
        if not key or not key.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"{key!r} cannot name a model: use letters, digits, - and _")
        if is_sharded(model):
            raise ValueError(
                f"model {key!r} is sharded (FSDP): its parameters are DTensors, which are not supported; use DDPHook"
            )


def check_loss_fn(loss_fn: Any) -> None:
    """Refuse what cannot be called with predictions and a batch, as far as that can be seen."""
    if isinstance(loss_fn, type):
        raise ValueError(f"loss_fn is a class; give an object of it: {loss_fn.__name__}()")
    if type(loss_fn).__module__.startswith("torch.nn."):
        raise ValueError(
            f"loss_fn is torch's {type(loss_fn).__name__}, which compares two tensors; it is called as "
            "loss_fn(predictions, batch): use the losses of this package, such as EnergyMSELoss() + 10.0 * "
            "ForceMSELoss(), or a function of predictions and batch that returns a scalar"
        )


def shared_neighbor_lists(models: Iterable[nn.Module]) -> list[NeighborConfig]:
    """Neighbour lists that serve all models: one of each format, with the largest cutoff asked for.

    Models pass over pairs beyond their own cutoff. There is no skin: every batch holds other structures.

    Raises
    ------
    ValueError
        Half and full lists are asked for in one format; a batch holds one of them.
    """
    lists: dict[NeighborListFormat, NeighborConfig] = {}
    for model in models:
        own = model.model_config.neighbor_config if isinstance(model, BaseModelMixin) else None
        if own is None:
            continue
        other = lists.setdefault(own.format, own)
        if other.half_list != own.half_list:
            raise ValueError(
                f"one model needs a half, another a full neighbour list in the format {own.format.value!r}, and a "
                "batch holds one: build the lists in training_fn and pass auto_neighbors=False"
            )
        lists[own.format] = other if other.cutoff >= own.cutoff else own
    return [config.model_copy(update={"skin": 0.0}) for config in lists.values()]


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are spread over ranks (``fully_shard``)."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there can be no such parameter
    return module is not None and any(isinstance(p, module.DTensor) for p in model.parameters())


def build_optimizers(
    configs: Mapping[str, list[OptimizerConfig]], models: Mapping[str, nn.Module]
) -> tuple[list[OptimizerConfig], list[Optimizer], list[LRScheduler | None]]:
    """Build all optimizers for the parameters that require a gradient.

    Raises
    ------
    ValueError
        An optimizer without such parameters, a parameter that two optimizers would change.
    """
    used: list[OptimizerConfig] = []
    optimizers: list[Optimizer] = []
    schedulers: list[LRScheduler | None] = []
    owners: dict[int, str] = {}
    for key, model_configs in configs.items():
        trainable = {name: p for name, p in models[key].named_parameters() if p.requires_grad}
        for config in model_configs:
            chosen = _choose(trainable, config, key)
            for name, parameter in chosen.items():
                if id(parameter) in owners:
                    raise ValueError(
                        f"parameter {name!r} of model {key!r} is given to two optimizers ({owners[id(parameter)]} and "
                        f"{config.optimizer_cls.__name__}): divide them by parameter_patterns"
                    )
                owners[id(parameter)] = config.optimizer_cls.__name__
            optimizer, scheduler = config.build(chosen.values())
            used.append(config)
            optimizers.append(optimizer)
            schedulers.append(scheduler)
    return used, optimizers, schedulers


def _choose(trainable: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, key: str) -> dict[str, Any]:
    chosen = dict(trainable)
    if config.parameter_patterns is not None:
        chosen = matching(trainable, config.parameter_patterns, f"trainable parameter of model {key!r}")
    if not chosen:
        raise ValueError(
            f"{config.optimizer_cls.__name__} has nothing to train: no parameter of model {key!r} requires a gradient"
        )
    return chosen


def matching(named: Mapping[str, Any], patterns: tuple[str, ...], what: str) -> dict[str, Any]:
    """Entries whose name matches one of the patterns (``*`` and ``?`` are wildcards).

    Raises
    ------
    ValueError
        A pattern matches nothing.

    Examples
    --------
    >>> matching({"embedding.weight": 1, "readout.weight": 2}, ("embedding*",), "parameter")
    {'embedding.weight': 1}
    """
    found: dict[str, Any] = {}
    for pattern in patterns:
        matches = fnmatch.filter(named, pattern)
        if not matches:
            examples = ", ".join(list(named)[:8])
            raise ValueError(f"pattern {pattern!r} matches no {what}; there are {examples or 'none'}")
        found.update((name, named[name]) for name in matches)
    return found


def as_composed(loss: Any) -> ComposedLoss | None:
    """The loss as a :class:`ComposedLoss`; ``None`` for a function of the user's."""
    if isinstance(loss, LossTerm):
        return ComposedLoss(terms=(loss,))
    return loss if isinstance(loss, ComposedLoss) else None
