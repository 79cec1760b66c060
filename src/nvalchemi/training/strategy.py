"""The training loop and what it is made of."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Annotated, Any, Self, cast

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nvalchemi.data import Batch
from nvalchemi.hooks import NeighborListHook, TrainContext
from nvalchemi.hooks.protocols import Progress
from nvalchemi.training import _ranks
from nvalchemi.training._stages import AFTER_STEP, TrainingStage
from nvalchemi.training._steps import Gradients, steps_made
from nvalchemi.training.building import (
    as_composed,
    build_optimizers,
    check_config_type,
    check_loss_fn,
    check_models,
    configs_by_model,
    shared_neighbor_lists,
)
from nvalchemi.training.epoch import EpochPosition, batches_per_epoch
from nvalchemi.training.forward import evaluate_function, on_device, predict, why_not_finite
from nvalchemi.training.hooks.update import TrainingUpdateOrchestrator
from nvalchemi.training.losses import LossOutput, loss_from_spec
from nvalchemi.training.optimizer_config import OptimizerConfig
from nvalchemi.training.registry import UpdateHookRegistry, as_hooks
from nvalchemi.training.saved import SavedStrategy
from nvalchemi.training.spec import resolve
from nvalchemi.training.validation import (
    ValidationConfig,
    check_validation_data,
    inference_models,
    validate,
)

# Float16 may overflow at each halving of its scale from 2^16 to 1 before the first step runs.
_MAX_IDLE_EPOCHS = 20

_Models = nn.Module | dict[str, nn.Module]
_Configs = Annotated[
    OptimizerConfig | list[OptimizerConfig] | dict[str, OptimizerConfig | list[OptimizerConfig]],
    BeforeValidator(check_config_type),
]
_Loss = Annotated[Callable[..., Any], BeforeValidator(loss_from_spec)]
_TrainingFn = Annotated[
    Callable[..., Any], BeforeValidator(lambda v: resolve(v) if isinstance(v, str) else v)
]
_Device = Annotated[torch.device, BeforeValidator(torch.device)]


class TrainingStrategy(BaseModel, UpdateHookRegistry, SavedStrategy):
    """Train models: the loop drawn in :class:`~nvalchemi.training.TrainingStage`, with hooks at its stages.

    Parameters
    ----------
    models : nn.Module or dict of str to nn.Module
        The model (its key is ``"main"``), or several by name. Those without an optimizer are not trained and stay in
        evaluation mode.
    optimizer_configs : OptimizerConfig, list of such, or dict of str to either
        Optimizers of the model; by name for several models.
    loss_fn : loss or callable
        A loss of :mod:`nvalchemi.training.losses`, or ``loss_fn(predictions, batch)`` that returns a scalar tensor.
    num_epochs, num_steps : int
        When to end, in passes through the data or in optimizer steps that really ran; exactly one of them.
    hooks : hook or sequence of hooks, default ()
        Bare update hooks are joined in one :class:`~nvalchemi.training.hooks.TrainingUpdateOrchestrator` at
        the place of the first.
    training_fn : callable, optional
        ``training_fn(models, batch)`` returns the predictions, a mapping of names to tensors; it gets the
        model itself, or the dictionary if one was given. By default the model is called with the batch.
    devices : list of torch.device, default [cpu]
        The device to train on, one per process; several processes are joined by
        :class:`~nvalchemi.training.hooks.DDPHook`.
    validation_config : ValidationConfig, optional
        What to validate on and when.
    auto_neighbors : bool, default True
        Build the neighbour list that a model asks for, unless a :class:`~nvalchemi.hooks.NeighborListHook` is
        registered.
    check_finite : bool, default True
        Raise when the loss is not finite, unless an update hook deals with that. Waits for the device at every batch.

    Attributes
    ----------
    step_count : int
        Optimizer steps that really ran.
    global_step_count : int
        The same, summed over ranks.
    batch_count : int
        Batches used.
    epoch_count : int
        Epochs completed.
    epoch_step_count : int
        Steps in the epoch that is under way.
    last_validation : dict or None
        Summary of the last validation.
    stop_reason : str or None
        Why the last run ended early, if it did.

    Examples
    --------
    >>> from nvalchemi.data import AtomicData
    >>> from nvalchemi.models.demo import DemoModelWrapper
    >>> from nvalchemi.training.losses import EnergyMSELoss
    >>> data = AtomicData(positions=torch.eye(3), atomic_numbers=[6, 1, 1], energy=[[-1.0]])
    >>> strategy = TrainingStrategy(
    ...     DemoModelWrapper(), OptimizerConfig(torch.optim.Adam, {"lr": 0.01}), EnergyMSELoss(), num_epochs=3
    ... )
    >>> strategy.run([Batch.from_data_list([data])])
    >>> strategy.step_count, strategy.epoch_count
    (3, 3)
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    models: _Models
    optimizer_configs: _Configs
    loss_fn: _Loss
    num_epochs: PositiveInt | None = None
    num_steps: PositiveInt | None = None
    training_fn: _TrainingFn | None = None
    devices: list[_Device] = Field(default_factory=lambda: [torch.device("cpu")], min_length=1, max_length=1)
    validation_config: ValidationConfig | None = None
    auto_neighbors: bool = True
    check_finite: bool = True

    step_count: int = 0
    global_step_count: int = 0
    batch_count: int = 0
    epoch_count: int = 0
    epoch_step_count: int = 0
    last_validation: dict[str, Any] | None = None
    stop_reason: str | None = None

    # ------------------------------------------------------------------ making
    def __init__(
        self,
        models: Any,
        optimizer_configs: Any,
        loss_fn: Any,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        hooks: Any = (),
        training_fn: Callable[..., Any] | str | None = None,
        devices: Sequence[torch.device | str] | torch.device | str | None = None,
        validation_config: ValidationConfig | None = None,
        **options: Any,
    ) -> None:
        if devices is not None:
            options["devices"] = [devices] if isinstance(devices, str | torch.device) else list(devices)
        super().__init__(
            models=models,
            optimizer_configs=optimizer_configs,
            loss_fn=loss_fn,
            num_epochs=num_epochs,
            num_steps=num_steps,
            training_fn=training_fn,
            validation_config=validation_config,
            **options,
        )
        # Plain attributes: pydantic's private ones cost a microsecond at each of the many times they are read
        # per batch.
        self._called_models: dict[str, nn.Module] = dict(self.model_dict)
        self._loss = as_composed(self.loss_fn)
        self._configs: list[OptimizerConfig] = []
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[LRScheduler | None] = []
        self._plain_update = TrainingUpdateOrchestrator()
        self._ctx: TrainContext | None = None
        self._entered: ExitStack | None = None
        self._dataloader: Iterable[Batch] = ()
        self._position = EpochPosition()
        self._epoch = self.epoch_count
        self._idle_epochs = 0
        self._stop_requested = False  # and not restored
        self._rank, self._world_size = _ranks.rank(), _ranks.world_size()
        for hook in as_hooks(hooks):
            self.register_hook(hook)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.num_epochs is None) == (self.num_steps is None):
            raise ValueError(
                f"give exactly one of num_epochs and num_steps, got {self.num_epochs} and {self.num_steps}"
            )
        check_loss_fn(self.loss_fn)
        check_models(self.model_dict)
        configs_by_model(self.optimizer_configs, self.model_dict)
        if len(self.model_dict) > 1 and self.training_fn is None:
            raise ValueError(
                f"the models {sorted(self.model_dict)} need a training_fn(models, batch) that says how to use them"
            )
        return self

    @property
    def model_dict(self) -> dict[str, nn.Module]:
        """Models by key; a single model has the key ``"main"``."""
        return self.models if isinstance(self.models, dict) else {"main": self.models}

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Optimizers; built by :meth:`setup`."""
        return self._optimizers

    @property
    def lr_schedulers(self) -> Sequence[LRScheduler | None]:
        """Scheduler of each optimizer, or ``None``."""
        return self._schedulers

    @property
    def position(self) -> EpochPosition:
        """Place in the data of the epoch under way."""
        return self._position

    @property
    def dataloader(self) -> Iterable[Batch]:
        """Training data of the current run. A hook may replace it at ``BEFORE_TRAINING``."""
        return self._dataloader

    @dataloader.setter
    def dataloader(self, loader: Iterable[Batch]) -> None:
        self._dataloader = loader

    def wrap_model(self, key: str, wrapped: nn.Module) -> None:
        """Call ``wrapped`` instead of a model in training; checkpoints and validation keep to the model itself."""
        self._called_models[key] = wrapped

    def __repr__(self) -> str:
        models = ", ".join(f"{key}: {type(model).__name__}" for key, model in self.model_dict.items())
        end = f"num_epochs={self.num_epochs}" if self.num_epochs else f"num_steps={self.num_steps}"
        return f"{type(self).__name__}({models}, {end}, step_count={self.step_count}, hooks={self._hooks_summary()})"

    def __str__(self) -> str:
        return repr(self)

    def _build_context(self, batch: Batch | None) -> TrainContext:
        # One context lives through all stages of a batch: hooks hand the loss and the scaler on in it.
        return self._ctx if self._ctx is not None else self._new_context(batch, False)

    def _new_context(self, batch: Batch | None, is_last_batch: bool) -> TrainContext:
        models = self.model_dict
        return TrainContext(
            batch=batch,
            model=models.get("main", next(iter(models.values()))),
            models=self._called_models,
            global_rank=self._rank,
            workflow=self,
            step_count=self.step_count,
            global_step_count=self.global_step_count,
            batch_count=self.batch_count,
            epoch_step_count=self.epoch_step_count,
            epoch=self._epoch,
            is_last_batch=is_last_batch,
            optimizers=self._optimizers,
            lr_schedulers=self._schedulers,
            validation=self.last_validation,
        )

    # ------------------------------------------------------------------ running
    def setup(self) -> None:
        """Move the models to the device, let hooks prepare (``SETUP``), build the optimizers. Done once.

        Raises
        ------
        ValueError
            An optimizer has nothing to train.
        """
        if self._is_set_up:
            return
        for model in self.model_dict.values():
            model.to(self.devices[0])
        self._add_neighbor_hooks()
        self._call_hooks(TrainingStage.SETUP, None)
        self._rank, self._world_size = (
            _ranks.rank(),
            _ranks.world_size(),
        )  # a hook may have joined the processes
        configs = configs_by_model(self.optimizer_configs, self.model_dict)
        self._configs, self._optimizers, self._schedulers = build_optimizers(configs, self.model_dict)
        self._is_set_up = True
        if self._update is not None:
            self._update(self._build_context(None), TrainingStage.SETUP)

    def _add_neighbor_hooks(self) -> None:
        if not self.auto_neighbors or any(isinstance(hook, NeighborListHook) for hook in self._hooks):
            return
        for config in shared_neighbor_lists(self.model_dict.values()):
            self.register_hook(NeighborListHook(config))

    def run(self, dataloader: Iterable[Batch]) -> None:
        """Train until ``num_epochs`` or ``num_steps`` is reached; after a restore, from where it was.

        A further call goes on where a requested stop has ended the last one. Early stopping does not begin anew: it
        stops again at the first validation without progress. A stop that is part of a restored state stays.

        Parameters
        ----------
        dataloader : iterable of Batch
            Gone through once per epoch.

        Raises
        ------
        ValueError
            The loader gives nothing, a batch lacks a label, the loss is not finite; no weight has changed by
            that batch. The validation data give nothing or lack a label; then no weight has changed at all.

        Warns
        -----
        UserWarning
            A scheduler waits for validations that are not configured.
        """
        with self._hooks_opened():
            self._dataloader = dataloader
            if self._stop_requested:
                self.stop_reason, self._stop_requested = None, False
            self.setup()
            self._warn_of_idle_schedulers()
            if self.validation_config is not None:
                check_validation_data(self, self.validation_config)
            self._set_training_mode()
            self._call_hooks(TrainingStage.BEFORE_TRAINING, None)
            while not self.finished:
                self._run_epoch()
            self._call_hooks(TrainingStage.AFTER_TRAINING, None)

    def _warn_of_idle_schedulers(self) -> None:
        if self.validation_config is None and any(config.follows_metric for config in self._configs):
            warnings.warn(
                "ReduceLROnPlateau advances at validation: without validation_config the learning rate stays as it is",
                UserWarning,
                stacklevel=3,
            )

    def progress(self) -> Progress:
        """Optimizer steps made of ``num_steps``, or batches used of those of all epochs."""
        note = self.stop_reason or ""
        if self.num_steps is not None:
            return Progress(self.step_count, self.num_steps, "step", note)
        length = batches_per_epoch(self._dataloader)
        if length is None or self.num_epochs is None:
            return Progress(self.batch_count, None, "batch", note)
        return Progress(self.batch_count, self.num_epochs * length, "batch", note)

    @property
    def finished(self) -> bool:
        """Whether the end is reached or a stop was requested."""
        if self.stop_reason is not None:
            return True
        if self.num_steps is not None:
            return self.step_count >= self.num_steps
        return self.num_epochs is not None and self.epoch_count >= self.num_epochs

    def request_stop(self, reason: str) -> None:
        """End training after the current batch, or after the epoch when called at its end."""
        self.stop_reason, self._stop_requested = reason, True

    def _run_epoch(self) -> None:
        self._epoch = self.epoch_count
        if self._position.batches == 0:
            self.epoch_step_count = 0
            self._apply_random_state()
        self._call_hooks(TrainingStage.BEFORE_EPOCH, None)
        self._apply_random_state()
        complete = True
        for batch, is_last in self._position.iterate(self._dataloader, self._epoch):
            self._train_batch(batch, is_last, in_epoch=True)
            complete = is_last
            # After the last batch the loader runs to its end, to be ready for the next epoch.
            if self.finished and not is_last:
                break
        else:
            complete = True
        if self._position.batches == 0:
            again = " (an iterator can be gone through only once)" if self._epoch else ""
            raise ValueError(f"the dataloader gave no batch in epoch {self._epoch}{again}")
        if complete:
            self._finish_epoch()

    def _finish_epoch(self) -> None:
        self._idle_epochs = 0 if self.epoch_step_count else self._idle_epochs + 1
        if self._idle_epochs > _MAX_IDLE_EPOCHS:
            raise RuntimeError(
                f"no optimizer step ran in {self._idle_epochs} epochs: every one was vetoed, overflowed or had no "
                "gradients"
            )
        self._position.finish()
        interval = None if self.validation_config is None else self.validation_config.every_n_epochs
        if interval is not None and (self.epoch_count + 1) % interval == 0:
            self._validate_and_schedule()
        self.epoch_count += 1
        self._call_hooks(TrainingStage.AFTER_EPOCH, None)

    def train_batch(self, batch: Batch, *, is_last_batch: bool = False) -> Tensor:
        """Use one batch, with all stages from ``BEFORE_BATCH`` to ``AFTER_BATCH``.

        Parameters
        ----------
        batch : Batch
            The structures.
        is_last_batch : bool, default False
            Whether to close an accumulation window that is not full.

        Returns
        -------
        Tensor
            The loss, a scalar without gradient.
        """
        with self._hooks_opened():
            self.setup()
            self._set_training_mode()
            self._apply_random_state()
            return self._train_batch(batch, is_last_batch, in_epoch=False)

    def _train_batch(self, batch: Batch, is_last: bool, *, in_epoch: bool) -> Tensor:
        ctx = self._ctx = self._new_context(on_device(batch, self.devices[0]), is_last)
        try:
            self._stage(TrainingStage.BEFORE_BATCH)
            self._stage(TrainingStage.BEFORE_FORWARD)
            ctx.predictions = self.predict(self._called_models, cast(Batch, ctx.batch))
            self._stage(TrainingStage.AFTER_FORWARD)
            self._stage(TrainingStage.BEFORE_LOSS)
            ctx.loss, ctx.losses, ctx.loss_output = self.evaluate_loss(
                ctx.predictions, cast(Batch, ctx.batch)
            )
            ctx.unweighted_losses = None if ctx.loss_output is None else ctx.loss_output.unweighted
            self._stage(TrainingStage.AFTER_LOSS)
            loss = self._checked_loss(ctx)
            self._stage(TrainingStage.BEFORE_BACKWARD)
            self._stage(TrainingStage.DO_BACKWARD)
            ctx.loss = loss  # hooks have scaled the one that was differentiated
            ctx.gradients = Gradients(self.model_dict)
            self._stage(TrainingStage.AFTER_BACKWARD)
            self._stage(TrainingStage.BEFORE_OPTIMIZER_STEP)
            self._step(ctx)
            self._stage(TrainingStage.AFTER_OPTIMIZER_STEP)
            self._finish_batch(ctx, in_epoch)
            self._stage(TrainingStage.AFTER_BATCH)
        except BaseException:
            if self._update is not None:
                self._update.batch_failed()
            raise
        finally:
            self._ctx = None
        return loss.detach()

    def _stage(self, stage: TrainingStage) -> None:
        """Call the hooks of a stage; where no hook has claimed a part of the update, do that part."""
        ctx = cast(TrainContext, self._ctx)
        if stage in AFTER_STEP and not ctx.step_made:
            self._call_hooks_of_every_batch(stage, ctx.batch)
        else:
            self._call_hooks(stage, ctx.batch)
        if stage in self._unclaimed:
            self._plain_update(ctx, stage)

    def _step(self, ctx: TrainContext) -> None:
        before = [steps_made(optimizer) for optimizer in self._optimizers]
        self._stage(TrainingStage.DO_OPTIMIZER_STEP)
        ctx.step_made = before != [steps_made(optimizer) for optimizer in self._optimizers]
        if ctx.step_made:
            self.step_count += 1
            self.global_step_count += self._world_size
            self.epoch_step_count += 1
            ctx.step_count, ctx.global_step_count = self.step_count, self.global_step_count
            ctx.epoch_step_count = self.epoch_step_count

    def _finish_batch(self, ctx: TrainContext, in_epoch: bool) -> None:
        self.batch_count += 1
        ctx.batch_count = self.batch_count
        self._position.batches += in_epoch
        config = self.validation_config
        if config is None or config.every_n_steps is None or self.step_count == self._validated_at:
            return
        if self.step_count % config.every_n_steps == 0:
            self._validated_at = self.step_count
            self._validate_and_schedule()

    # ------------------------------------------------------------------ forward and loss
    def predict(self, models: Mapping[str, nn.Module], batch: Batch) -> Mapping[str, Tensor]:
        """Forward pass as ``training_fn`` defines it, with models that stand for those of the strategy."""
        subject: Any = dict(models) if isinstance(self.models, dict) else models["main"]
        if self.training_fn is None:
            subject = next(iter(models.values()))
        return predict(self.training_fn, subject, batch, self.model_dict)

    def evaluate_loss(
        self, predictions: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor], LossOutput | None]:
        """Loss and its components with the weights of the present step and epoch, and what else the loss tells."""
        if self._loss is not None:
            output = self._loss(predictions, batch, step=self.step_count, epoch=self._epoch)
            return output.total, output.components, output
        return evaluate_function(self.loss_fn, predictions, batch)

    def _checked_loss(self, ctx: TrainContext) -> Tensor:
        loss = cast(Tensor, ctx.loss)
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on any trainable parameter: are the predictions detached, or all weights of "
                "the loss 0?"
            )
        if self.check_finite and not self._tolerates_nonfinite and not math.isfinite(value := loss.item()):
            raise ValueError(
                f"the loss of batch {self.batch_count} (epoch {self._epoch}) is {value}: "
                f"{why_not_finite(self._loss, ctx)}. Weights are unchanged since the last step"
            )
        return loss

    def _set_training_mode(self) -> None:
        trained = configs_by_model(self.optimizer_configs, self.model_dict)
        for key, model in self._called_models.items():
            model.train(key in trained)

    # ------------------------------------------------------------------ validation
    def validate(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride] - pydantic's is deprecated
        """Evaluate on the validation data.

        Returns
        -------
        dict
            ``loss`` and ``components`` (of all data as one batch; those of a function that gives a tensor are
            averaged over structures), the errors that
            :class:`~nvalchemi.training.metrics.ErrorMetrics` describes (``energy_mae``, ``forces_rmse``, …),
            ``step_count`` and ``epoch``. Also in ``last_validation``, and in ``ctx.validation`` at
            ``AFTER_VALIDATION``.

        Raises
        ------
        ValueError
            There is no ``validation_config``, its data are empty or no structure has a label that the loss needs.
        """
        config = self.validation_config
        if config is None:
            raise ValueError("there is nothing to validate on: give the strategy a validation_config")
        self.setup()
        at = {"step_count": self.step_count, "epoch": self._epoch}
        self.last_validation = {**at, **validate(self, config)}
        if self._ctx is not None:
            self._ctx.validation = self.last_validation
        self._call_hooks(TrainingStage.AFTER_VALIDATION, None if self._ctx is None else self._ctx.batch)
        return self.last_validation

    def inference_models(self) -> dict[str, nn.Module]:
        """Models by key; in place of one with an :class:`~nvalchemi.training.hooks.EMAHook` its average."""
        return inference_models(self)

    def prepare_validation_batch(self, batch: Batch) -> Batch:
        """Bring a batch to the device and have the hooks that belong to an evaluation (neighbour lists) work on it."""
        batch = on_device(batch, self.devices[0])
        under_way, self._ctx = self._ctx, None  # in the midst of training its context shows another batch
        try:
            self._call_evaluation_hooks(TrainingStage.BEFORE_FORWARD, batch)
        finally:
            self._ctx = under_way
        return batch

    def _validate_and_schedule(self) -> None:
        summary = self.validate()
        for config, scheduler in zip(self._configs, self._schedulers, strict=True):
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(config.metric(summary))

    # ------------------------------------------------------------------ context manager
    def __enter__(self) -> Self:
        """Open the hooks, to stay open over several :meth:`train_batch` or :meth:`run`."""
        with ExitStack() as stack:
            stack.enter_context(self._hooks_opened())
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(kind, error, traceback)
