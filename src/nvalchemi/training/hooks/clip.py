"""Gradient clipping."""

import logging
import math
from typing import Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, model_validator
from torch import Tensor

from nvalchemi.hooks import TrainContext
from nvalchemi.training._ranks import unwrap
from nvalchemi.training._stages import TrainingStage
from nvalchemi.training._steps import parameters_of, scale_to_norm, total_norm
from nvalchemi.training.hooks.update import TrainingUpdateHook

_log = logging.getLogger("nvalchemi.training")


class GradientClipHook(BaseModel, TrainingUpdateHook):
    """Limit the gradients just before a step.

    Parameters
    ----------
    max_norm : float, optional
        Largest norm of all gradients together; larger ones are scaled down.
    max_value : float, optional
        Largest absolute value of a gradient's element; larger ones are cut. Exactly one of the two is given.
    norm_type : float, default 2.0
        Which p-norm; ``inf`` for the largest element.
    error_if_nonfinite : bool, default False
        Raise when the norm is infinite or NaN. Otherwise the step is left out and a warning logged.
    per_model : bool, default False
        Clip each model by its own norm rather than all by their common one.

    Attributes
    ----------
    last_total_norm : float, dict of str to float or None
        Norm before clipping at the last step; by name of model with ``per_model``.

    Notes
    -----
    With a gradient scaler, gradients that are not finite are left as they are: the scaler leaves out that
    step and lowers its scale.

    Examples
    --------
    >>> GradientClipHook(10.0).model_dump()["max_norm"]
    10.0
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, ser_json_inf_nan="constants")
    priority: ClassVar[int] = 30

    max_norm: PositiveFloat | None = None
    max_value: PositiveFloat | None = None
    norm_type: PositiveFloat = 2.0
    error_if_nonfinite: bool = False
    per_model: bool = False

    def __init__(self, max_norm: float | None = None, **options: Any) -> None:
        super().__init__(max_norm=max_norm, **options)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if (self.max_norm is None) == (self.max_value is None):
            raise ValueError(
                f"give exactly one of max_norm and max_value, got {self.max_norm} and {self.max_value}"
            )
        return self

    def model_post_init(self, context: Any) -> None:
        """Begin without any state."""
        # Plain attributes: reading one that pydantic keeps as private takes longer than what is done with it.
        self._last: float | dict[str, float] | None = None

    @property
    def last_total_norm(self) -> float | dict[str, float] | None:
        """Norm before clipping at the last step."""
        return self._last

    def __call__(
        self, ctx: TrainContext, stage: TrainingStage, will_skip: bool
    ) -> tuple[bool, Tensor | None]:
        """Clip before a step that will run; veto one whose gradients are not finite."""
        if stage is not TrainingStage.DO_OPTIMIZER_STEP or will_skip:
            return True, ctx.loss
        norms = {name: self._clip(parameters) for name, parameters in self._groups(ctx).items()}
        self._last = norms if self.per_model else norms[""]
        ctx.gradient_norm = _joint_norm(list(norms.values()), self.norm_type)
        bad = sorted(name for name, norm in norms.items() if not math.isfinite(norm))
        if not bad or ctx.grad_scaler is not None:
            return True, ctx.loss
        whose = f" of {bad}" if self.per_model else ""
        where = f"the gradients{whose} at step {ctx.step_count} (batch {ctx.batch_count})"
        if self.error_if_nonfinite:
            raise RuntimeError(f"the norm of {where} is not finite: {self._last}")
        _log.warning("step left out: the norm of %s is not finite: %s", where, self._last)
        return False, ctx.loss

    def _groups(self, ctx: TrainContext) -> dict[str, list[Tensor]]:
        """Parameters with gradients that are clipped together."""
        trained = [p for p in parameters_of(ctx.optimizers) if p.grad is not None]
        if not self.per_model:
            return {"": trained}
        if ctx.models is None:
            raise ValueError("per_model=True needs ctx.models")
        ids = {id(p) for p in trained}
        return {
            name: [p for p in unwrap(model).parameters() if id(p) in ids]
            for name, model in ctx.models.items()
        }

    @torch.no_grad()
    def _clip(self, parameters: list[Tensor]) -> float:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(gradients, self.norm_type)
        value = norm.item()
        if math.isfinite(value):
            # Well below the limit, torch would multiply by exactly 1.
            if self.max_norm is not None and value > 0.99 * self.max_norm:
                scale_to_norm(parameters, self.max_norm, norm)
            elif self.max_value is not None:
                torch.nn.utils.clip_grad_value_(parameters, self.max_value)
        return value


def _joint_norm(norms: list[float], norm_type: float) -> float:
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.tensor(norms), norm_type).item()
