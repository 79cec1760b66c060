"""Validation: what to evaluate and when, and the pass itself."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, StrictBool, model_validator
from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.hooks.protocols import ValidationHook
from nvalchemi.models.base import BaseModelMixin
from nvalchemi.training import _ranks
from nvalchemi.training.building import as_composed
from nvalchemi.training.forward import on_device
from nvalchemi.training.hooks.ema import EMAHook
from nvalchemi.training.hooks.precision import MixedPrecisionHook
from nvalchemi.training.losses import ComposedLoss
from nvalchemi.training.metrics import ErrorMetrics

if TYPE_CHECKING:
    from nvalchemi.training.strategy import TrainingStrategy


class ValidationConfig(BaseModel):
    """What to validate on and when.

    Parameters
    ----------
    validation_data : iterable of Batch
        Gone through once per validation, so no generator.
    every_n_epochs : int, optional
        Validate at the end of every n-th epoch; 1 when neither interval is given.
    every_n_steps : int, optional
        Validate after every n-th optimizer step instead.
    grad_mode : {"auto", "enabled", "disabled"}, default "auto"
        Whether autograd is on. ``"auto"``: off when every model says that it gives all outputs without it.
    use_ema : bool or "auto", default "auto"
        Validate with the averaged weights of an :class:`~nvalchemi.training.hooks.EMAHook`. ``"auto"``: as
        soon as there are any; ``True``: it is an error when there are none.
    use_mixed_precision : bool or "auto", default "auto"
        Validate in the precision of a registered :class:`~nvalchemi.training.hooks.MixedPrecisionHook`.
        ``True``: it is an error when none is registered.
    batch_callback : callable, optional
        Called as ``batch_callback(batch, predictions)`` after each batch.
    per_element : bool, default False
        Force errors by element too.
    group_by : str, optional
        Errors by this entry of ``batch.info`` too, for example ``"config_type"``.

    Raises
    ------
    pydantic.ValidationError
        Both intervals are given, or the data can be gone through only once.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    validation_data: Any
    every_n_epochs: PositiveInt | None = None
    every_n_steps: PositiveInt | None = None
    grad_mode: Literal["auto", "enabled", "disabled"] = "auto"
    use_ema: StrictBool | Literal["auto"] = "auto"
    use_mixed_precision: StrictBool | Literal["auto"] = "auto"
    batch_callback: Callable[[Batch, Mapping[str, Tensor]], Any] | None = None
    per_element: bool = False
    group_by: str | None = None

    def __init__(self, validation_data: Any = None, **options: Any) -> None:
        super().__init__(validation_data=validation_data, **options)

    @model_validator(mode="before")
    @classmethod
    def _check(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = dict(values)
        data = given.get("validation_data")
        if not isinstance(data, Iterable) or isinstance(data, Batch):
            raise ValueError(f"validation_data must be an iterable of Batch, got {type(data).__name__}")
        if isinstance(data, Iterator):
            raise ValueError(
                "validation_data is gone through at every validation: give a list or a loader, no iterator"
            )
        if given.get("every_n_steps") is None:
            given["every_n_epochs"] = 1 if given.get("every_n_epochs") is None else given["every_n_epochs"]
        return given

    @model_validator(mode="after")
    def _one_interval(self) -> Self:
        if self.every_n_epochs is not None and self.every_n_steps is not None:
            raise ValueError("give either every_n_epochs or every_n_steps")
        return self

    def new_metrics(self, loss: ComposedLoss | None = None) -> ErrorMetrics:
        """Empty accumulator of errors with these options, of labels and outputs that go by the names in the loss."""
        known = () if loss is None else loss.terms[::-1]  # of two terms of one quantity the first counts
        terms = [term for term in known if term.quantity in ErrorMetrics.QUANTITIES]
        return ErrorMetrics(
            target_keys={term.quantity: term.target_key for term in terms},
            prediction_keys={term.quantity: term.prediction_key for term in terms},
            per_element=self.per_element,
            group_by=self.group_by,
        )


class RunningLoss:
    """Components of a loss as they would be of all data in one batch, summed in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # of values times counts, and of counts: [2]

    def update(self, values: Mapping[str, Tensor], counts: Mapping[str, int | Tensor]) -> None:
        """Add the losses of a batch, each a mean over so many labels or structures."""
        for name, value in values.items():
            value = value.detach().to(torch.float64)
            count = torch.as_tensor(counts[name], dtype=torch.float64, device=value.device)
            # No label, no value: 0 · NaN is NaN.
            both = torch.stack([torch.where(count > 0, value * count, 0), count])
            self._sums[name] = self._sums[name] + both if name in self._sums else both

    def compute(self, device: torch.device, targets: Mapping[str, str]) -> dict[str, float]:
        """Means over all ranks; ``targets`` has the names of the labels by component, for the error.

        Raises
        ------
        ValueError
            There was no batch, or not one label for a component.
        """
        # A rank may have had no batch at all; the names are those of the ranks that had some.
        names = _names_over_ranks(list(self._sums))
        if not names:
            raise ValueError("validation_data gave no batch")
        zero = torch.zeros(2, dtype=torch.float64, device=device)
        sums: list[list[float]] = _ranks.sum_over_ranks(
            torch.stack([self._sums.get(name, zero).to(device) for name in names])
        ).tolist()
        for name, (_, count) in zip(names, sums, strict=True):
            if count == 0:
                raise ValueError(
                    f"no structure of validation_data has a finite label {targets.get(name, name)!r}, so there is no "
                    f"{name}: label some of them, or leave that term out of the loss"
                )
        return {name: value / count for name, (value, count) in zip(names, sums, strict=True)}


def _names_over_ranks(names: list[str]) -> list[str]:
    gathered = _ranks.gather(names)
    return list(dict.fromkeys(name for own in gathered for name in own))


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put models into evaluation mode; afterwards every module is as it was."""
    modules = [(module, module.training) for model in models for module in model.modules()]
    for module, _ in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in modules:
            module.training = training


def check_validation_data(strategy: "TrainingStrategy", config: ValidationConfig) -> None:
    """Look at the first batch, so that what is wrong with the data is known before any weight changes.

    Raises
    ------
    TypeError
        It is no batch.
    ValueError
        There is none, or it lacks a label that the loss needs.
    """
    device = strategy.devices[0]
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        batch = next(iter(config.validation_data), None)
    if all(_ranks.gather(batch is None)):  # one rank may have no share
        raise ValueError("validation_data gave no batch")
    if batch is None:
        return
    loss, batch = as_composed(strategy.loss_fn), on_device(batch, device)
    if loss is not None:
        try:
            loss.check_labels(batch)
        except ValueError as error:
            raise ValueError(f"validation_data: {error}") from error


def validate(strategy: "TrainingStrategy", config: ValidationConfig) -> dict[str, Any]:
    """Go through the validation data once: mean loss, its components, errors."""
    models = inference_models(strategy, config.use_ema)
    loss = as_composed(strategy.loss_fn)
    running, metrics = RunningLoss(), config.new_metrics(loss)
    device = strategy.devices[0]
    watching = [hook for hook in strategy.hooks if isinstance(hook, ValidationHook)]
    # Validation must not change what training draws: a loader draws a number even when it does not shuffle.
    with torch.random.fork_rng([] if device.type == "cpu" else [device]), evaluating(models.values()):
        for batch in config.validation_data:
            with _modes(strategy, models, config):
                batch = strategy.prepare_validation_batch(batch)
                predictions = strategy.predict(models, batch)
                with torch.no_grad():
                    total, components, output = strategy.evaluate_loss(predictions, batch)
            known = {} if output is None else output.counts
            counts = dict.fromkeys(("", *components), batch.num_graphs) | known
            # What is not in the components: only a function of the user's can add something.
            rest = {} if loss is not None or output is None else {"": total - sum(components.values())}
            running.update({**components, **rest}, counts)
            metrics.update(predictions, batch)
            for hook in watching:
                hook.on_validation_batch(batch, metrics.labelled(predictions, batch))
            if config.batch_callback is not None:
                config.batch_callback(batch, predictions)
    metrics.reduce_across_ranks()
    means = running.compute(device, {} if loss is None else {t.name: t.target_key for t in loss.terms})
    components = {name: mean for name, mean in means.items() if name}
    return {"loss": sum(means.values()), "components": components, **metrics.compute()}


def inference_models(
    strategy: "TrainingStrategy", use_ema: bool | Literal["auto"] = "auto"
) -> dict[str, nn.Module]:
    """Models to evaluate with: averaged ones where there are any, as ``use_ema`` says."""
    models = dict(strategy.model_dict)
    averages = [hook for hook in strategy.update_hooks() if isinstance(hook, EMAHook)]
    if use_ema is True and not averages:
        raise ValueError("use_ema=True needs an EMAHook")
    for hook in averages:
        if use_ema is True or (use_ema == "auto" and hook.num_updates):
            models[hook.model_key] = hook.get_averaged_model()
    return models


@contextmanager
def _modes(
    strategy: "TrainingStrategy", models: Mapping[str, nn.Module], config: ValidationConfig
) -> Iterator[None]:
    """Autograd and precision of a validation."""
    precision = next((hook for hook in strategy.update_hooks() if isinstance(hook, MixedPrecisionHook)), None)
    if config.use_mixed_precision is True and precision is None:
        raise ValueError("use_mixed_precision=True needs a MixedPrecisionHook")
    region = nullcontext()
    if precision is not None and config.use_mixed_precision is not False:
        region = precision.inference_autocast(strategy.devices[0])
    enabled = config.grad_mode == "enabled"
    if config.grad_mode == "auto":
        enabled = strategy.training_fn is not None or any(
            not isinstance(m, BaseModelMixin) or bool(m.model_config.autograd_outputs)
            for m in models.values()
        )
    with torch.set_grad_enabled(enabled), region:
        yield
