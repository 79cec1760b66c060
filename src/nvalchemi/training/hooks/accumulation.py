"""Gradient accumulation: one step for several batches."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, Strict
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nvalchemi.hooks import TrainContext
from nvalchemi.training._ranks import distributed, sum_over_ranks, world_size
from nvalchemi.training._stages import TrainingStage
from nvalchemi.training._steps import parameters_of
from nvalchemi.training.hooks.update import TrainingUpdateHook


class GradientAccumulationHook(BaseModel, TrainingUpdateHook):
    """Add up the gradients of several batches (a window) and step once.

    Parameters
    ----------
    steps : int
        Batches in a window. The last batch of an epoch (``ctx.is_last_batch``) ends its window early.
    reduction : {"mean", "sum", "graphs"}, default "mean"
        How the losses of a window are combined:

        * ``"mean"``: their mean; in a window cut short, over the batches it has.
        * ``"sum"``: their sum.
        * ``"graphs"``: their mean weighted by the number of structures in each batch. For losses that are means over
          structures this is the gradient of the one big batch, also when the sizes differ. Where the terms of a loss
          leave out labels (``ignore_nonfinite``), only structures with a label count; a function that gives a
          tensor cannot say which these are.

    Warns
    -----
    UserWarning
        With ``"graphs"``, when the terms of the loss have labels in different numbers of structures of a batch. No
        one weight is right for all of them; the largest number is taken.

    Notes
    -----
    Gradients are zeroed before the first batch of a window only, and the step is vetoed except after the last.
    Models wrapped in :class:`~torch.nn.parallel.DistributedDataParallel` exchange gradients at the last batch only.

    A window that is open when the state is saved keeps its gradients in the state, so that it can be continued.

    Examples
    --------
    >>> GradientAccumulationHook(4, reduction="graphs")
    GradientAccumulationHook(steps=4, reduction='graphs')
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)
    priority: ClassVar[int] = 10
    state_per_rank: ClassVar[Literal[True]] = True
    _exclusive_update_key: ClassVar[str | None] = "gradient accumulation"

    steps: Annotated[PositiveInt, Strict()]
    reduction: Literal["mean", "sum", "graphs"] = "mean"

    def __init__(self, steps: Any = None, **options: Any) -> None:
        super().__init__(steps=steps, **options)

    def model_post_init(self, context: Any) -> None:
        """Begin without any state."""
        # Plain attributes: reading one that pydantic keeps as private takes longer than what is done with it.
        self._count = 0
        self._sizes: list[int] = []
        self._warned = False
        self._optimizers: Sequence[Optimizer] = ()
        self._restored: list[Tensor | None] | None = None
        self._unsynchronised: ExitStack = ExitStack()

    def __call__(
        self, ctx: TrainContext, stage: TrainingStage, will_skip: bool
    ) -> tuple[bool, Tensor | None]:
        """Open and close windows, weight the loss, veto the steps inside a window."""
        match stage:
            case TrainingStage.BEFORE_BATCH:
                return self._begin(ctx), ctx.loss
            case TrainingStage.DO_BACKWARD:
                return True, self._weighted(ctx)
            case TrainingStage.DO_OPTIMIZER_STEP:
                self._unsynchronised.close()
                if not self._closes_window(ctx):
                    return False, ctx.loss
                self._count, self._sizes = 0, []
        return True, ctx.loss

    def _closes_window(self, ctx: TrainContext) -> bool:
        return self._count >= self.steps or ctx.is_last_batch

    def _begin(self, ctx: TrainContext) -> bool:
        """Take up the batch; whether it is the first of its window."""
        self._optimizers = ctx.optimizers
        if self._restored is not None:
            for parameter, gradient in zip(parameters_of(ctx.optimizers), self._restored, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
            self._restored = None
        self._count += 1
        self._sizes.append(self._size(ctx))
        self._unsynchronised.close()
        if not self._closes_window(ctx):
            for model in (ctx.models or {}).values():
                if isinstance(model, DistributedDataParallel):
                    self._unsynchronised.enter_context(model.no_sync())
        return self._count == 1

    def _size(self, ctx: TrainContext) -> int:
        if self.reduction != "graphs":
            return 1
        if ctx.batch is None:
            raise ValueError("reduction 'graphs' needs ctx.batch to count its structures")
        return ctx.batch.num_graphs

    def _weighted(self, ctx: TrainContext) -> Tensor:
        """Share of this loss in its window.

        Before the end of the window its total weight is not known; the batches still to come are taken to be
        as large as the first. Where that turns out wrong, the gradients gathered so far are corrected before
        the last ones are added.
        """
        loss = ctx.loss
        if loss is None:
            raise ValueError("there is no loss to accumulate: ctx.loss is None at DO_BACKWARD")
        if self.reduction == "sum":
            return loss
        if self.reduction == "graphs" and ctx.loss_output is not None:
            self._sizes[-1] = self._labelled(ctx.loss_output.labelled_graphs)
        size, expected = self._sizes[-1], float(self.steps * max(self._sizes[0], 1))
        if not self._closes_window(ctx):
            return loss / (expected / size) if size else loss * 0
        total = float(sum(self._sizes))
        if self.reduction == "graphs" and distributed():
            # The exchange takes the mean over ranks, which may hold different numbers of structures.
            total = float(sum_over_ranks(torch.tensor(total, device=loss.device))) / world_size()
        if total == 0:
            return loss * 0
        if total != expected:
            gradients = [p.grad for p in parameters_of(ctx.optimizers) if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, expected / total)  # pyright: ignore[reportPrivateImportUsage]
        return loss / (total / size) if size else loss * 0

    def _labelled(self, graphs: Mapping[str, int]) -> int:
        if len(set(graphs.values())) > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                "the terms of the loss have labels in different numbers of structures of a batch "
                f"({', '.join(f'{name}: {n}' for name, n in graphs.items())}): batches are weighted by the "
                "largest, and a window is not exactly the one big batch",
                UserWarning,
                stacklevel=2,
            )
        return max(graphs.values())

    def batch_failed(self) -> None:
        """Give up the window: the next batch begins a new one."""
        self._unsynchronised.close()
        self._count, self._sizes, self._restored = 0, [], None

    def state_dict(self) -> dict[str, Any]:
        """Place in the window and, inside one, the gradients gathered so far."""
        gradients: list[Tensor | None] | None = self._restored
        if self._count and gradients is None:
            gradients = [p.grad for p in parameters_of(self._optimizers)]
        return {"count": self._count, "sizes": list(self._sizes), "gradients": gradients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a window; its gradients are put in place at the next batch."""
        self._count, self._sizes = state["count"], list(state["sizes"])
        self._restored = state["gradients"]
