"""Weights of loss terms that change with the step or epoch; each can be written to a file."""

import math
from dataclasses import field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

__all__ = ["ConstantWeight", "CosineWeight", "LinearWeight", "PiecewiseWeight", "Weight"]

_frozen = ConfigDict(extra="forbid")
Unit = Literal["step", "epoch"]


@dataclass(frozen=True, config=_frozen)
class ConstantWeight:
    """The same weight throughout.

    >>> ConstantWeight(10.0)(step=5, epoch=0)
    10.0
    """

    value: FiniteFloat = 1.0
    schedule: Literal["constant"] = field(default="constant", kw_only=True)

    def __call__(self, step: int, epoch: int) -> float:
        """Weight at a step and epoch."""
        return self.value

    def scaled(self, factor: float) -> Self:
        """The schedule times a factor."""
        return replace(self, value=factor * self.value)


@dataclass(frozen=True, config=_frozen)
class _Ramp:
    """From ``start`` to ``end`` over ``length`` steps or epochs, after ``delay`` of them; constant before and after.

    Parameters
    ----------
    start, end : float
        Weight before and after the ramp.
    length : int
        Steps or epochs the ramp takes.
    delay : int, default 0
        Steps or epochs before it begins.
    unit : {"step", "epoch"}, default "step"
        What is counted: optimizer steps or epochs, from 0.
    """

    start: FiniteFloat
    end: FiniteFloat
    length: PositiveInt
    delay: NonNegativeInt = 0
    unit: Unit = "step"

    def scaled(self, factor: float) -> Self:
        """The schedule times a factor."""
        return replace(self, start=factor * self.start, end=factor * self.end)

    def _progress(self, step: int, epoch: int) -> float:
        """Part of the ramp that is behind, 0 to 1."""
        now = step if self.unit == "step" else epoch
        return min(max((now - self.delay) / self.length, 0.0), 1.0)


@dataclass(frozen=True, config=_frozen)
class LinearWeight(_Ramp):
    """A straight ramp.

    >>> weight = LinearWeight(start=1.0, end=2.0, length=100)
    >>> [weight(step, epoch=0) for step in (0, 50, 100, 500)]
    [1.0, 1.5, 2.0, 2.0]
    """

    schedule: Literal["linear"] = field(default="linear", kw_only=True)

    def __call__(self, step: int, epoch: int) -> float:
        """Weight at a step and epoch."""
        x = self._progress(step, epoch)
        return self.start * (1 - x) + self.end * x


@dataclass(frozen=True, config=_frozen)
class CosineWeight(_Ramp):
    """A ramp along half a cosine, flat at both ends.

    >>> weight = CosineWeight(start=1.0, end=0.0, length=4, unit="epoch")
    >>> [round(weight(step=0, epoch=epoch), 3) for epoch in range(5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    schedule: Literal["cosine"] = field(default="cosine", kw_only=True)

    def __call__(self, step: int, epoch: int) -> float:
        """Weight at a step and epoch."""
        x = 0.5 * (1 - math.cos(math.pi * self._progress(step, epoch)))
        return self.start * (1 - x) + self.end * x


@dataclass(frozen=True, config=_frozen)
class PiecewiseWeight:
    """Constant pieces: ``values[k]`` from ``boundaries[k − 1]`` (inclusive) to ``boundaries[k]``.

    Parameters
    ----------
    boundaries : tuple of int
        Steps or epochs at which the weight changes, increasing.
    values : tuple of float
        One more than there are boundaries.
    unit : {"step", "epoch"}, default "step"
        What is counted: optimizer steps or epochs, from 0.

    Examples
    --------
    >>> weight = PiecewiseWeight(boundaries=(10, 20), values=(1.0, 5.0, 50.0), unit="epoch")
    >>> [weight(step=0, epoch=epoch) for epoch in (9, 10, 20)]
    [1.0, 5.0, 50.0]
    """

    boundaries: tuple[int, ...]
    values: tuple[FiniteFloat, ...]
    unit: Unit = "step"
    schedule: Literal["piecewise"] = field(default="piecewise", kw_only=True)

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"{len(self.boundaries)} boundaries need {len(self.boundaries) + 1} values, got {len(self.values)}"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"boundaries must increase, got {self.boundaries}")

    def __call__(self, step: int, epoch: int) -> float:
        """Weight at a step and epoch."""
        now = step if self.unit == "step" else epoch
        return self.values[sum(boundary <= now for boundary in self.boundaries)]

    def scaled(self, factor: float) -> Self:
        """The schedule times a factor."""
        return replace(self, values=tuple(factor * value for value in self.values))


def _number_to_constant(value: Any) -> Any:
    return (
        ConstantWeight(float(value))
        if isinstance(value, int | float) and not isinstance(value, bool)
        else value
    )


Schedule = ConstantWeight | LinearWeight | CosineWeight | PiecewiseWeight
Weight = Annotated[Schedule, Field(discriminator="schedule"), BeforeValidator(_number_to_constant)]
"""A schedule, its dictionary form, or a number."""
