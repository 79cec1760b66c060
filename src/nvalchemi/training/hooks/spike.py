"""Leave out steps that a bad batch would make."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor

from nvalchemi.hooks import TrainContext
from nvalchemi.training._ranks import mean_over_ranks
from nvalchemi.training._stages import TrainingStage
from nvalchemi.training._steps import parameters_of, total_norm
from nvalchemi.training.hooks.update import TrainingUpdateHook

_log = logging.getLogger("nvalchemi.training")
_Factor = Annotated[float, Field(gt=1.0)]


class SpikeSkipHook(BaseModel, TrainingUpdateHook):
    """Veto a step whose loss or gradient norm is far above the usual, or not finite.

    Parameters
    ----------
    loss_factor : float, optional
        Veto when the loss exceeds this factor (> 1) times its running median.
    grad_norm_factor : float, optional
        The same for the norm of all gradients; where a :class:`~nvalchemi.training.hooks.GradientClipHook` comes
        before, the norm that it found, before clipping.
    window : int, default 100
        Steps over which the medians are taken. A median ignores the odd outlier that a mean would follow.
    min_history : int, default 10
        Steps to see before judging; until then only losses and norms that are not finite are vetoed.
    max_consecutive : int, default 10
        More vetoes in a row than this are an error: then it is not the batch that is bad.

    Attributes
    ----------
    n_skipped : int
        Steps vetoed so far.

    Raises
    ------
    RuntimeError
        More than ``max_consecutive`` vetoes in a row; the message shows the last values.

    Notes
    -----
    The loss of a step is the one that the loss function gave, its mean over the batches of an accumulation window (a
    window cut short by the end of an epoch is judged like the others). A vetoed step leaves the medians as they were.
    Gradients that overflow under a finite loss are left to the gradient scaler where there is one; they are no spike.
    In a distributed run the decision is made from means over ranks, so all ranks decide alike.

    Examples
    --------
    >>> SpikeSkipHook(loss_factor=5.0).n_skipped
    0
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)
    priority: ClassVar[int] = 40
    state_per_rank: ClassVar[Literal[True]] = True

    loss_factor: _Factor | None = None
    grad_norm_factor: _Factor | None = None
    window: PositiveInt = 100
    min_history: PositiveInt = 10
    max_consecutive: PositiveInt = 10

    @model_validator(mode="after")
    def _enough_history(self) -> Self:
        if self.min_history > self.window:
            raise ValueError(f"min_history ({self.min_history}) exceeds the window ({self.window})")
        return self

    def model_post_init(self, context: Any) -> None:
        """Begin without any state."""
        # Plain attributes: reading one that pydantic keeps as private takes longer than what is done with it.
        self._losses: deque[float] = deque()
        self._norms: deque[float] = deque()
        self._pending: list[Tensor] = []
        self._n_skipped: int = 0
        self._consecutive: int = 0
        self._vetoed: list[tuple[float, float | None]] = []

    @property
    def n_skipped(self) -> int:
        """Steps vetoed so far."""
        return self._n_skipped

    @property
    def tolerates_nonfinite_loss(self) -> bool:
        """True: such a step is vetoed."""
        return True

    def __call__(
        self, ctx: TrainContext, stage: TrainingStage, will_skip: bool
    ) -> tuple[bool, Tensor | None]:
        """Note the loss at the backward pass, judge the step."""
        if stage is TrainingStage.BEFORE_BATCH and not will_skip:
            self._pending = []  # gradients are zeroed: a window begins, whatever became of the one before
        loss = ctx.loss if ctx.raw_loss is None else ctx.raw_loss
        if stage is TrainingStage.DO_BACKWARD and loss is not None:
            self._pending.append(loss.detach())
        if stage is not TrainingStage.DO_OPTIMIZER_STEP or will_skip:
            return True, ctx.loss
        return self._accept(ctx), ctx.loss

    def _accept(self, ctx: TrainContext) -> bool:
        pending, self._pending = self._pending, []
        loss = math.nan if not pending else float(torch.stack(pending).mean(dtype=torch.float64))
        device = pending[0].device if pending else torch.device("cpu")
        loss = mean_over_ranks(loss, device)
        norm: float | None = None
        if self.grad_norm_factor is not None or not math.isfinite(loss) or ctx.grad_scaler is not None:
            norm = _gradient_norm(ctx) if ctx.gradient_norm is None else ctx.gradient_norm
            norm = mean_over_ranks(norm, device)
            if ctx.grad_scaler is not None and math.isfinite(loss) and not math.isfinite(norm):
                return True  # the scaler leaves this step out and lowers its scale
        if self._is_spike(loss, self._losses, self.loss_factor) or (
            norm is not None and self._is_spike(norm, self._norms, self.grad_norm_factor)
        ):
            self._veto(ctx, loss, norm)
            return False
        self._remember(loss, norm)
        return True

    def _is_spike(self, value: float, history: deque[float], factor: float | None) -> bool:
        if not math.isfinite(value):
            return True
        if factor is None or len(history) < self.min_history:
            return False
        return value > factor * median(history) > 0.0

    def _remember(self, loss: float, norm: float | None) -> None:
        self._consecutive = 0
        self._vetoed.clear()
        for history, value in ((self._losses, loss), (self._norms, norm)):
            if value is not None:
                history.append(value)
                while len(history) > self.window:
                    history.popleft()

    def _veto(self, ctx: TrainContext, loss: float, norm: float | None) -> None:
        self._n_skipped += 1
        self._consecutive += 1
        self._vetoed.append((loss, norm))
        medians = ", ".join(
            f"{name} median {median(history):.6g}"
            for name, history in (("loss", self._losses), ("gradient norm", self._norms))
            if history
        )
        found = f"loss {loss:.6g}" + ("" if norm is None else f", gradient norm {norm:.6g}")
        _log.warning(
            "step %d left out (batch %d): %s; %s",
            ctx.step_count,
            ctx.batch_count,
            found,
            medians or "no history",
        )
        if self._consecutive > self.max_consecutive:
            history = "; ".join(
                f"loss {loss:.6g}" + ("" if norm is None else f", gradient norm {norm:.6g}")
                for loss, norm in self._vetoed
            )
            raise RuntimeError(
                f"{self._consecutive} steps in a row were left out as spikes (max_consecutive={self.max_consecutive}): "
                f"{history}; {medians or 'no history'}. Lower the learning rate or look at the data"
            )

    def batch_failed(self) -> None:
        """Forget the losses of an unfinished window."""
        self._pending = []

    def state_dict(self) -> dict[str, Any]:
        """Histories, counts, and the losses of an unfinished window."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "pending": list(self._pending),
            "n_skipped": self._n_skipped,
            "consecutive": self._consecutive,
            "vetoed": list(self._vetoed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that :meth:`state_dict` gave."""
        self._losses, self._norms = deque(state["losses"]), deque(state["norms"])
        self._pending = list(state["pending"])
        self._n_skipped, self._consecutive = state["n_skipped"], state["consecutive"]
        self._vetoed = [tuple(pair) for pair in state["vetoed"]]


def _gradient_norm(ctx: TrainContext) -> float:
    gradients = [p.grad for p in parameters_of(ctx.optimizers) if p.grad is not None]
    return total_norm(gradients).item()
