"""Exponential moving average of a model's weights."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nvalchemi.hooks import TrainContext
from nvalchemi.training._ranks import unwrap
from nvalchemi.training._stages import TrainingStage
from nvalchemi.training._steps import steps_made
from nvalchemi.training.hooks.update import TrainingUpdateHook


class _Pairs(NamedTuple):
    """Tensors of the average beside those of the model; the objects live as long as both."""

    model: nn.Module
    averages: list[Tensor]
    weights: list[Tensor]
    copies: list[Tensor]
    originals: list[Tensor]


class EMAHook(BaseModel, TrainingUpdateHook):
    """Keep an averaged copy of a model: w̄ ← decay · w̄ + (1 − decay) · w after each real step.

    Parameters
    ----------
    model_key : str, default "main"
        Which model.
    decay : float, default 0.999
        Weight of the past, in [0, 1).
    update_every : int, default 1
        Average at steps whose number is a multiple of it.
    start_step : int, default 0
        First step to average; the first update copies the weights.
    use_buffers : bool, default True
        Copy the model's buffers (running statistics, reference energies) at every update; otherwise they stay as they
        were at the first.

    Attributes
    ----------
    num_updates : int
        Updates made so far.

    Notes
    -----
    A step that was vetoed, or left out by a gradient scaler, does not count. A strategy validates with the
    averaged model once there is one, and saves it with its checkpoints. Weights in half precision are averaged in
    float32: steps as small as 1 − decay would vanish in their own precision. Like an optimizer, the hook keeps to the
    parameters that the model has when averaging begins.

    Examples
    --------
    >>> EMAHook(decay=0.99).num_updates
    0
    """

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(), frozen=True
    )
    priority: ClassVar[int] = 50

    model_key: str = "main"
    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    update_every: PositiveInt = 1
    start_step: NonNegativeInt = 0
    use_buffers: bool = True

    def __init__(
        self,
        model_key: str = "main",
        decay: float = 0.999,
        update_every: int = 1,
        start_step: int = 0,
        use_buffers: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            model_key=model_key,
            decay=decay,
            update_every=update_every,
            start_step=start_step,
            use_buffers=use_buffers,
            **options,
        )

    def model_post_init(self, context: Any) -> None:
        """Begin without any state."""
        # Plain attributes: reading one that pydantic keeps as private takes longer than what is done with it.
        self._averaged: AveragedModel | None = None
        self._num_updates: int = 0
        self._names: frozenset[str] = frozenset()  # of the model's own state
        self._restored: dict[str, Tensor] | None = None
        self._exact: dict[str, Tensor] = {}  # averages of half-precision weights, float32
        self._pairs: _Pairs | None = None
        self._source: nn.Module | None = None
        self._optimizers: list[Optimizer] = []
        self._before: list[int] | None = None

    @property
    def _exclusive_update_key(self) -> str | None:  # pyright: ignore
        return f"average of model {self.model_key!r}"

    @property
    def num_updates(self) -> int:
        """Updates made so far."""
        return self._num_updates

    def get_averaged_model(self) -> nn.Module:
        """Return the averaged model.

        Raises
        ------
        RuntimeError
            No step has been averaged yet.
        """
        if self._restored is not None and self._source is not None:
            self._restore(self._source)
        if self._averaged is None:
            raise RuntimeError(
                f"there is no average of model {self.model_key!r} yet: no optimizer step has run"
                + (f" since start_step={self.start_step}" if self.start_step else "")
            )
        return self._averaged.module

    def __call__(
        self, ctx: TrainContext, stage: TrainingStage, will_skip: bool
    ) -> tuple[bool, Tensor | None]:
        """Average after a step that really ran."""
        match stage:
            case TrainingStage.SETUP:
                self._source = self._model(ctx)
            case TrainingStage.BEFORE_BATCH if self._restored is not None:
                self._restore(self._model(ctx))
            case TrainingStage.DO_OPTIMIZER_STEP:
                if not self._optimizers:
                    self._optimizers = _optimizers_of(self._model(ctx), ctx)
                self._before = [steps_made(optimizer) for optimizer in self._optimizers]
            case TrainingStage.AFTER_OPTIMIZER_STEP:
                # Called by hand at this stage alone, the caller says that a step was made.
                before, self._before = self._before, None
                stepped = before is None or before != [
                    steps_made(optimizer) for optimizer in self._optimizers
                ]
                if stepped and ctx.step_count >= self.start_step and ctx.step_count % self.update_every == 0:
                    self._update(self._model(ctx))
        return True, ctx.loss

    def _model(self, ctx: TrainContext) -> nn.Module:
        models = ctx.models or ({} if ctx.model is None else {self.model_key: ctx.model})
        if self.model_key not in models:
            raise ValueError(f"EMAHook averages model {self.model_key!r}; the models are {sorted(models)}")
        return unwrap(models[self.model_key])

    def _update(self, model: nn.Module) -> None:
        if self._averaged is None:
            self._averaged = self._copy_of(model)
            self._averaged.n_averaged.fill_(1)
        else:
            self._average(self._averaged, model)
        self._average_half_precision(self._averaged.module, model)
        self._num_updates += 1

    def _average(self, averaged: AveragedModel, model: nn.Module) -> None:
        """Do what ``AveragedModel.update_parameters`` does, to the bit, without collecting the tensors every time."""
        pairs = self._pairs
        if pairs is None or pairs.model is not model:
            pairs = self._pairs = self._pair(averaged.module, model)
        with torch.no_grad():
            torch._foreach_lerp_(pairs.averages, pairs.weights, 1.0 - self.decay)  # pyright: ignore[reportPrivateImportUsage]
            if pairs.copies:
                torch._foreach_copy_(pairs.copies, pairs.originals)  # pyright: ignore[reportPrivateImportUsage]
            averaged.n_averaged.add_(1)

    def _pair(self, averaged: nn.Module, model: nn.Module) -> _Pairs:
        weights: list[tuple[Tensor, Tensor]] = list(
            zip(averaged.parameters(), model.parameters(), strict=True)
        )
        mean = [pair for pair in weights if pair[0].is_floating_point() or pair[0].is_complex()]
        copied = [pair for pair in weights if not (pair[0].is_floating_point() or pair[0].is_complex())]
        if self.use_buffers:
            originals = dict(model.named_buffers())
            copied += [(copy, originals[n]) for n, copy in averaged.named_buffers() if n in originals]
        return _Pairs(
            model, [a for a, _ in mean], [w for _, w in mean], [c for c, _ in copied], [o for _, o in copied]
        )

    def _average_half_precision(self, averaged: nn.Module, model: nn.Module) -> None:
        if self._num_updates and not self._exact:
            return
        weights = dict(model.named_parameters())
        for name, average in averaged.named_parameters():
            if average.dtype not in (torch.float16, torch.bfloat16):
                continue
            weight = weights[name].detach().float()
            if self._num_updates == 0:
                self._exact[name] = weight.clone()
            else:
                average.copy_(self._exact[name].lerp_(weight, 1.0 - self.decay))

    def _copy_of(self, model: nn.Module) -> AveragedModel:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))
        # A copy of a scripted module has further buffers, its constants.
        self._names = frozenset(model.state_dict())
        averaged.eval().requires_grad_(False)
        return averaged

    def _restore(self, model: nn.Module) -> None:
        if self._restored is not None:
            self._averaged, self._pairs = self._copy_of(model), None
            constants = self._averaged.module.state_dict()
            self._averaged.module.load_state_dict({**constants, **self._restored})
            self._averaged.n_averaged.fill_(self._num_updates)
            weights = dict(model.named_parameters())
            self._exact = {
                name: average.to(weights[name].device, copy=True) for name, average in self._exact.items()
            }
            self._restored = None

    def state_dict(self) -> dict[str, Any]:
        """Averaged weights and the number of updates."""
        weights = self._restored
        if self._averaged is not None:
            averages = self._averaged.module.state_dict()
            weights = {name: average for name, average in averages.items() if name in self._names}
        return {"num_updates": self._num_updates, "weights": weights, "exact": dict(self._exact)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up averaged weights; they are put into a copy of the model when one is at hand."""
        self._num_updates, self._averaged, self._pairs = state["num_updates"], None, None
        self._restored = None if state["weights"] is None else dict(state["weights"])
        self._exact = dict(state["exact"])


def _optimizers_of(model: nn.Module, ctx: TrainContext) -> list[Optimizer]:
    own = {id(p) for p in model.parameters()}
    return [
        o for o in ctx.optimizers if any(id(p) in own for group in o.param_groups for p in group["params"])
    ]
