"""Which optimizer and scheduler to build."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nvalchemi.training.spec import name_of, resolve


def _named(value: Any, module: str) -> Any:
    """Class or function of a dotted name, or of a bare one in ``module``."""
    if not isinstance(value, str):
        return value
    return resolve(value if "." in value else f"{module}.{value}")


_OptimizerClass = Annotated[
    type[Optimizer], BeforeValidator(lambda v: _named(v, "torch.optim")), PlainSerializer(name_of)
]
_SchedulerClass = Annotated[
    type[LRScheduler],
    BeforeValidator(lambda v: _named(v, "torch.optim.lr_scheduler")),
    PlainSerializer(name_of),
]
_Adapter = Annotated[
    Callable[..., float],
    BeforeValidator(lambda v: resolve(v) if isinstance(v, str) else v),
    PlainSerializer(name_of),
]


class OptimizerConfig(BaseModel):
    """Optimizer, and scheduler of its learning rate, to be built for a model's parameters.

    Parameters
    ----------
    optimizer_cls : type of torch.optim.Optimizer
        Class of the optimizer, its name in ``torch.optim`` (``"AdamW"``) or any dotted name.
    optimizer_kwargs : dict, default {}
        Its arguments besides the parameters.
    scheduler_cls : type of torch.optim.lr_scheduler.LRScheduler, optional
        Class of the scheduler, or its name likewise. It advances with every optimizer step that really ran;
        :class:`~torch.optim.lr_scheduler.ReduceLROnPlateau` advances at validation.
    scheduler_kwargs : dict, default {}
        Its arguments besides the optimizer.
    scheduler_metric_adapter : callable, optional
        Takes the summary of a validation and returns the number that ``ReduceLROnPlateau`` watches; by default the
        validation loss.
    parameter_patterns : tuple of str, optional
        Names of the parameters to optimize, with ``*`` and ``?`` as wildcards; all by default. Lets several
        optimizers share a model.

    Raises
    ------
    pydantic.ValidationError
        An argument that the class does not take, or one it needs and does not get.

    Examples
    --------
    >>> OptimizerConfig(torch.optim.SGD, {"lr": 0.1}).optimizer_kwargs
    {'lr': 0.1}
    >>> OptimizerConfig(torch.optim.SGD, {"learning_rate": 0.1})
    Traceback (most recent call last):
    pydantic_core._pydantic_core.ValidationError: ... SGD takes no argument 'learning_rate'...
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    optimizer_cls: _OptimizerClass
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    scheduler_cls: _SchedulerClass | None = None
    scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    scheduler_metric_adapter: _Adapter | None = None
    parameter_patterns: tuple[str, ...] | None = None

    def __init__(
        self,
        optimizer_cls: Any = torch.optim.AdamW,
        optimizer_kwargs: Any = None,
        scheduler_cls: Any = None,
        scheduler_kwargs: Any = None,
        scheduler_metric_adapter: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            optimizer_cls=optimizer_cls,
            optimizer_kwargs=optimizer_kwargs or {},
            scheduler_cls=scheduler_cls,
            scheduler_kwargs=scheduler_kwargs or {},
            scheduler_metric_adapter=scheduler_metric_adapter,
            **options,
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if issubclass(self.optimizer_cls, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS needs a closure that evaluates the loss again and again; it cannot be used here"
            )
        _check_arguments(self.optimizer_cls, self.optimizer_kwargs)
        if self.scheduler_cls is not None:
            _check_arguments(self.scheduler_cls, self.scheduler_kwargs)
        elif self.scheduler_kwargs:
            raise ValueError(
                f"scheduler_kwargs {sorted(self.scheduler_kwargs)} are given without a scheduler_cls"
            )
        if self.scheduler_metric_adapter is not None and not self.follows_metric:
            raise ValueError("scheduler_metric_adapter is for ReduceLROnPlateau")
        return self

    @property
    def follows_metric(self) -> bool:
        """Whether the scheduler is driven by a validation metric."""
        return self.scheduler_cls is not None and issubclass(self.scheduler_cls, ReduceLROnPlateau)

    def build(self, params: Iterable[Any]) -> tuple[Optimizer, LRScheduler | None]:
        """Build for parameters (or parameter groups).

        Raises
        ------
        ValueError
            There are no parameters.
        """
        params = list(params)
        if not params:
            raise ValueError(f"{self.optimizer_cls.__name__} has no trainable parameters")
        optimizer = self.optimizer_cls(params, **self.optimizer_kwargs)
        if self.scheduler_cls is None:
            return optimizer, None
        return optimizer, self.scheduler_cls(optimizer, **self.scheduler_kwargs)

    def metric(self, validation: Mapping[str, Any]) -> float:
        """Number that the scheduler watches.

        Raises
        ------
        ValueError
            The adapter asks for something that the validation does not give.
        """
        if self.scheduler_metric_adapter is None:
            return float(validation["loss"])
        try:
            return float(self.scheduler_metric_adapter(validation))
        except KeyError as error:
            raise ValueError(
                f"scheduler_metric_adapter asks for {error}; validation gives {', '.join(sorted(validation))}, and as "
                f"components {', '.join(sorted(validation.get('components', ())))}"
            ) from error


def _check_arguments(cls: type, kwargs: Mapping[str, Any]) -> None:
    """Bind to the signature, the first argument (parameters, optimizer) being given."""
    signature = inspect.signature(cls)
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        known = list(signature.parameters)[1:]
        for name in kwargs:
            if name not in known:
                raise ValueError(
                    f"{cls.__name__} takes no argument {name!r}; it takes {', '.join(known)}"
                ) from error
        raise ValueError(f"{cls.__name__}: {error}; given are {', '.join(kwargs) or 'none'}") from error
