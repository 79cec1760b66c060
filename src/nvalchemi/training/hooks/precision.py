"""Mixed precision: autocast around forward pass and loss, gradient scaling for float16."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema
from torch import Tensor

from nvalchemi.hooks import TrainContext
from nvalchemi.training._stages import TrainingStage
from nvalchemi.training._steps import has_gradients, parameters_of
from nvalchemi.training.hooks.update import TrainingUpdateHook

_NAMES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def _restrict_precision(value: Any) -> torch.dtype:
    precision: Any = _NAMES.get(value) if isinstance(value, str) else value
    if precision not in _NAMES.values():
        raise ValueError(
            f"precision must be one of float32 (fp32), bfloat16 (bf16), float16 (fp16), got {value!r}"
        )
    return precision


def _name_of(precision: torch.dtype) -> str:
    return str(precision).removeprefix("torch.")


Precision = Annotated[
    torch.dtype,
    BeforeValidator(_restrict_precision),
    PlainSerializer(_name_of, return_type=str),
    WithJsonSchema({"type": "string", "enum": list(_NAMES)}),
]


class _StepScaler(torch.amp.GradScaler):
    """Gradient scaler that knows whether gradients were unscaled since its last update."""

    unscaled = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        self.unscaled = True

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        self.unscaled = False


class MixedPrecisionHook(BaseModel, TrainingUpdateHook):
    """Run forward pass and loss under autocast; with float16, scale the loss and unscale the gradients.

    A loss that is not finite is an error as in full precision; only gradients that overflow are left to the scaler.

    Parameters
    ----------
    precision : torch.dtype or str
        ``torch.float32`` (``"float32"``, ``"fp32"``): nothing is done. ``torch.bfloat16`` (``"bfloat16"``,
        ``"bf16"``): autocast; its exponents reach as far as float32's, so that no scaling is needed.
        ``torch.float16`` (``"float16"``, ``"fp16"``): autocast and a :class:`torch.amp.GradScaler`.

    Raises
    ------
    pydantic.ValidationError
        Any other precision.

    Notes
    -----
    The autocast region is entered at ``BEFORE_BATCH`` on the workflow's first device (without a workflow: the
    device of the weights) and left at ``DO_BACKWARD`` before ``backward()``, or when the batch raises. The
    scaler is made at the first batch, published as ``ctx.grad_scaler`` and saved with checkpoints. Gradients
    are unscaled just before a step that nobody vetoed so far, for every optimizer in order; when a later hook
    vetoes the step after that, the scaler is updated as if the step had run, and the next batch unscales
    anew. A hook that vetoes steps in order to accumulate scaled gradients must come first: priority below 20.

    Examples
    --------
    >>> MixedPrecisionHook(precision=torch.bfloat16).precision
    torch.bfloat16
    >>> MixedPrecisionHook("fp16").model_dump()
    {'precision': 'float16'}
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, frozen=True)
    priority: ClassVar[int] = 20
    _exclusive_update_key: ClassVar[str | None] = "mixed precision"

    precision: Precision

    def __init__(self, precision: Any = None, **options: Any) -> None:
        super().__init__(precision=precision, **options)

    def model_post_init(self, context: Any) -> None:
        """Begin without any state."""
        # Plain attributes: reading one that pydantic keeps as private takes longer than what is done with it.
        self._autocast: AbstractContextManager[Any] | None = None
        self._region: AbstractContextManager[Any] | None = None  # the same, while it is entered
        self._device_type: str | None = None
        self._scaler: _StepScaler | None = None
        self._restored: dict[str, Any] | None = None

    def inference_autocast(self, device: torch.device | str) -> AbstractContextManager[Any]:
        """Autocast region for evaluation on a device; does nothing for float32."""
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(torch.device(device).type, dtype=self.precision)

    def __call__(
        self, ctx: TrainContext, stage: TrainingStage, will_skip: bool
    ) -> tuple[bool, Tensor | None]:
        """Enter and leave autocast, scale and unscale."""
        if self.precision == torch.float32:
            return True, ctx.loss
        match stage:
            case TrainingStage.BEFORE_BATCH:
                self._leave_region()
                if self._device_type is None or self._autocast is None:
                    self._device_type = _device_of(ctx).type
                    self._autocast = torch.autocast(self._device_type, dtype=self.precision)
                if self.precision == torch.float16:
                    ctx.grad_scaler = self._ready_scaler(self._device_type)
                self._region = self._autocast
                self._region.__enter__()
            case TrainingStage.DO_BACKWARD:
                self._leave_region()
                if self._scaler is not None and ctx.loss is not None:
                    return True, self._scaler.scale(ctx.loss)
            case TrainingStage.DO_OPTIMIZER_STEP if self._scaler is not None and not will_skip:
                self._finish_vetoed_step()
                for optimizer in ctx.optimizers:
                    if has_gradients(optimizer):
                        self._scaler.unscale_(optimizer)
            case TrainingStage.AFTER_OPTIMIZER_STEP:
                self._finish_vetoed_step()
        return True, ctx.loss

    def _ready_scaler(self, device_type: str) -> _StepScaler:
        if self._scaler is None:
            self._scaler = _StepScaler(device_type)
            if self._restored is not None:
                self._scaler.load_state_dict(self._restored)
                self._restored = None
        self._finish_vetoed_step()
        return self._scaler

    def _finish_vetoed_step(self) -> None:
        """After a veto nobody has updated the scaler, which would refuse to unscale again."""
        if self._scaler is not None and self._scaler.unscaled:
            self._scaler.update()

    def _leave_region(self) -> None:
        if self._region is not None:
            region, self._region = self._region, None
            region.__exit__(None, None, None)

    def batch_failed(self) -> None:
        """Leave the autocast region."""
        self._leave_region()

    def close(self) -> None:
        """Leave the autocast region; the scaler stays."""
        self._leave_region()

    def state_dict(self) -> dict[str, Any]:
        """State of the scaler: scale and growth tracker; empty without one."""
        if self._scaler is not None:
            return {"scaler": self._scaler.state_dict()}
        return {"scaler": self._restored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a scaler's state."""
        saved = state["scaler"]
        if self._scaler is not None and saved is not None:
            self._scaler.load_state_dict(saved)
        else:
            self._restored = saved


def _device_of(ctx: TrainContext) -> torch.device:
    if ctx.workflow is not None:
        return torch.device(ctx.workflow.devices[0])
    for parameter in parameters_of(ctx.optimizers):
        return parameter.device
    return torch.device("cpu")
