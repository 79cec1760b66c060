"""What watches a training that the command line runs."""

import csv
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from nvalchemi.cli.evaluation import Quantity
from nvalchemi.cli.progress import ProgressBar, ProgressHook
from nvalchemi.dynamics.restart import cut_back, position_to_resume
from nvalchemi.hooks import TrainContext
from nvalchemi.models.painn import PaiNN
from nvalchemi.training import TrainingStage

MODEL_FILES = ("model.safetensors", "model.pth")
LOG_HEAD = ("epoch", "step", "seconds", "learning_rate", "loss", "validation_loss")


def validated_now(ctx: TrainContext) -> Mapping[str, Any] | None:
    """Validation of the present step, if there was one."""
    validation = ctx.validation
    return validation if validation is not None and validation["step_count"] == ctx.step_count else None


def errors_in_words(quantities: Sequence[Quantity], validation: Mapping[str, Any]) -> str:
    """Mean absolute errors of a validation."""
    return "MAE " + ", ".join(f"{q.heading} {_mae(q, validation):.4g} {q.unit}" for q in quantities)


def _mae(quantity: Quantity, validation: Mapping[str, Any]) -> float:
    return quantity.factor * validation.get(f"{quantity.metric}_mae", float("nan"))


class TrainingLog:
    """A row of a CSV file at the end of every epoch.

    Parameters
    ----------
    path : Path
        The file; one that is there is replaced, after a resume continued.
    quantities : sequence of Quantity
        Whose validation errors have a column.
    describe : callable
        Called with the words of a line about every validation.
    """

    frequency = 1
    stage = None

    def __init__(self, path: Path, quantities: Sequence[Quantity], describe: Callable[[str], None]) -> None:
        self.path = path
        self.quantities = quantities
        self.describe = describe
        self._position = 0
        self._loss: Tensor | float = 0.0
        self._count = 0
        self._seconds_before, self._started = 0.0, time.monotonic()

    def _runs_on_stage(self, stage: Any) -> bool:
        return stage in (TrainingStage.AFTER_BATCH, TrainingStage.AFTER_EPOCH)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._position:
            cut_back(self.path, self._position)
        else:
            errors = [f"{q.metric}_mae ({q.unit})" for q in self.quantities]
            self._write("w", [*LOG_HEAD, *errors])
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __call__(self, ctx: TrainContext, stage: Any) -> None:
        """Add up the loss of a batch; write the row of an epoch."""
        if stage is TrainingStage.AFTER_BATCH:
            assert ctx.loss is not None  # as always, at this stage
            assert ctx.batch is not None
            self._loss = self._loss + ctx.loss.detach().double() * ctx.batch.num_graphs
            self._count += ctx.batch.num_graphs
            return
        loss = float(self._loss) / max(self._count, 1)
        self._loss, self._count = 0.0, 0
        validation = validated_now(ctx)
        errors = [None if validation is None else _mae(q, validation) for q in self.quantities]
        rate = ctx.optimizers[0].param_groups[0]["lr"]
        score = None if validation is None else validation["loss"]
        numbers = [self._seconds, rate, loss, score, *errors]
        self._write("a", [ctx.epoch + 1, ctx.step_count, *("" if x is None else f"{x:.6g}" for x in numbers)])
        if validation is not None:
            words = errors_in_words(self.quantities, validation)
            self.describe(f"epoch {ctx.epoch + 1}: loss {loss:.4g}, validation {score:.4g}; {words}")

    def _write(self, mode: str, row: Sequence[Any]) -> None:
        with self.path.open(mode, newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def state_dict(self) -> dict[str, Any]:
        """Length of the file, time so far, and the loss of the epoch under way."""
        return {
            "position": position_to_resume(self.path, keep=True),
            "seconds": self._seconds,
            "loss": float(self._loss),
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state; rows written since are removed when the training starts."""
        self._position, self._seconds_before = state["position"], state["seconds"]
        self._loss, self._count = state["loss"], state["count"]


class BestModel:
    """Keep a model file with the weights of the best validation so far, averaged ones where there are any.

    Parameters
    ----------
    folder : Path
        Where the file is, whose name depends on the model: ``model.safetensors`` or ``model.pth``.
    """

    frequency = 1
    stage = TrainingStage.AFTER_VALIDATION

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best = float("inf")

    def __call__(self, ctx: TrainContext, stage: Any) -> None:
        """Write the model if it is the best."""
        score = ctx.validation["loss"] if ctx.validation is not None else float("nan")
        if not score < self.best:
            return
        self.best = score
        model = ctx.workflow.inference_models()["main"]
        path = self.folder / model_file_name(model)
        temporary = path.with_name(f".{path.name}")
        model.export_model(temporary)
        temporary.chmod(0o666 & ~_umask())  # safetensors leaves it to the owner alone
        os.replace(temporary, path)

    def state_dict(self) -> dict[str, float]:
        """Validation loss of the model that is written."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take up a state."""
        self.best = state["best"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def model_file_name(model: nn.Module) -> str:
    """Name of the file that ``export_model`` writes: safetensors, or the checkpoint of the model's own package."""
    return MODEL_FILES[0] if isinstance(model, PaiNN) else MODEL_FILES[1]


def progress_hook(num_batches: int, num_epochs: int, *, quiet: bool) -> ProgressHook:
    """The progress bar of a training of so many epochs of so many batches."""

    def show(bar: ProgressBar, ctx: TrainContext) -> None:
        loss = "" if ctx.loss is None else f"loss {float(ctx.loss):.4g}"
        bar.show(ctx.batch_count, heading=f"epoch {ctx.epoch + 1}/{num_epochs}, batch", description=loss)

    return ProgressHook(
        ProgressBar(num_batches * num_epochs, "batch", quiet=quiet), TrainingStage.AFTER_BATCH, show
    )


class StopTraining:
    """End training when asked to, behind the batch under way and with a checkpoint of that very state.

    Register it last. A request during the last batch of an epoch is met at the end of the epoch, validation included.

    Parameters
    ----------
    save : callable
        Writes the checkpoint of a name and says where it is.

    Attributes
    ----------
    saved : Path or None
        The checkpoint, once training was stopped.
    """

    frequency = 1
    stage = None

    def __init__(self, save: Callable[[str], Path]) -> None:
        self._save = save
        self.saved: Path | None = None
        self.requested = False

    def request(self) -> None:
        """Ask for the end; may be called from a signal handler."""
        self.requested = True

    def _runs_on_stage(self, stage: Any) -> bool:
        return stage in (TrainingStage.AFTER_BATCH, TrainingStage.AFTER_EPOCH)

    def __call__(self, ctx: TrainContext, stage: Any) -> None:
        """Save and stop."""
        if not self.requested or (stage is TrainingStage.AFTER_BATCH and ctx.is_last_batch):
            return
        # In this order: a stop that is part of a checkpoint would end the resumed training, too.
        self.saved = self._save(f"step-{ctx.step_count}")
        ctx.workflow.request_stop("interrupted")
