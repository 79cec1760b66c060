"""End training when validation no longer gets better."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt, PrivateAttr
from torch import Tensor

from nvalchemi.hooks import TrainContext
from nvalchemi.training._stages import TrainingStage


def monitored(validation: Mapping[str, Any], name: str) -> float:
    """Look up one number in a validation summary, among the loss components too.

    Raises
    ------
    ValueError
        There is none of that name.

    Examples
    --------
    >>> monitored({"loss": 1.0, "components": {"energy_mse": 0.5}}, "energy_mse")
    0.5
    """
    numbers = {
        **validation["components"],
        **{k: v for k, v in validation.items() if isinstance(v, int | float)},
    }
    if name not in numbers:
        raise ValueError(f"validation gives no {name!r}; it gives {', '.join(sorted(numbers))}")
    return float(numbers[name])


class EarlyStoppingHook(BaseModel):
    """Stop training after a number of validations without progress.

    Parameters
    ----------
    monitor : str, default "loss"
        Number of the validation summary to watch; smaller is better.
    patience : int, default 10
        Validations in a row without progress after which training ends.
    min_delta : float, default 0
        Progress is a decrease by more than this.
    restore_best : bool, default False
        Give the models the weights of the best validation when training ends. They are those of training, not
        averaged ones.

    Examples
    --------
    >>> EarlyStoppingHook(monitor="forces_mae", patience=5).patience
    5
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    frequency: ClassVar[int] = 1
    stage: ClassVar[None] = None

    monitor: str = "loss"
    patience: PositiveInt = 10
    min_delta: NonNegativeFloat = 0.0
    restore_best: bool = False

    _best: float = PrivateAttr(default=math.inf)
    _waited: int = PrivateAttr(default=0)
    _weights: dict[str, dict[str, Tensor]] | None = PrivateAttr(default=None)

    @property
    def best(self) -> float:
        """Best value so far."""
        return self._best

    def _runs_on_stage(self, stage: Any) -> bool:
        return stage is TrainingStage.AFTER_VALIDATION or (
            self.restore_best and stage is TrainingStage.AFTER_TRAINING
        )

    def __call__(self, ctx: TrainContext, stage: Any) -> None:
        """Judge a validation; at the end, bring the best weights back."""
        strategy = ctx.workflow
        if stage is TrainingStage.AFTER_TRAINING:
            for key, weights in (self._weights or {}).items():
                strategy.model_dict[key].load_state_dict(weights)
            return
        value = monitored(ctx.validation or {"components": {}}, self.monitor)
        if value < self._best - self.min_delta or (self._best == math.inf and math.isfinite(value)):
            self._best, self._waited = value, 0
            if self.restore_best:
                self._weights = {
                    key: {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
                    for key, model in strategy.model_dict.items()
                }
            return
        self._waited += 1
        if self._waited >= self.patience:
            strategy.request_stop(
                f"{self.monitor} has not fallen below {self._best:.6g} in {self._waited} validations (now {value:.6g})"
            )

    def state_dict(self) -> dict[str, Any]:
        """Best value, validations since, and the best weights if they are to come back."""
        return {"best": self._best, "waited": self._waited, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that :meth:`state_dict` gave."""
        self._best, self._waited = state["best"], state["waited"]
        weights: Mapping[str, Mapping[str, torch.Tensor]] | None = state["weights"]
        self._weights = None if weights is None else {key: dict(value) for key, value in weights.items()}
