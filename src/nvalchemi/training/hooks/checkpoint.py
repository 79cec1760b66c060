"""Checkpoints during training."""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, PrivateAttr, model_validator

from nvalchemi.hooks import TrainContext
from nvalchemi.training import _ranks, archive
from nvalchemi.training._stages import TrainingStage
from nvalchemi.training.hooks.early_stopping import monitored
from nvalchemi.training.state import take_snapshot


class CheckpointHook(BaseModel):
    """Save the whole state of a strategy from time to time. Register it last, so that it saves what the others did.

    Parameters
    ----------
    checkpoint_dir : path
        Directory of the checkpoints, which are called ``epoch-<n>`` and ``step-<n>``.
    step_interval : int, optional
        Save after every n-th optimizer step that really ran.
    epoch_interval : int, optional
        Save after every n-th epoch; 1 when neither interval is given.
    async_save : bool, default True
        Write in a thread of its own. The state is copied first, so training goes on meanwhile; the next save
        waits for it.
    keep_last : int, optional
        Keep this many of the newest and remove the others; all by default.
    keep_best : int, optional
        Keep this many of the best too, judged by a validation at the same step. Without ``keep_last``, the
        newest one is kept besides.
    monitor : str, default "loss"
        Number of the validation summary by which the best are found; smaller is better.

    Notes
    -----
    A checkpoint becomes visible when it is complete; one that is interrupted leaves the earlier ones as they are.

    Examples
    --------
    >>> CheckpointHook("checkpoints", epoch_interval=5, keep_last=3).keep_last
    3
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    frequency: ClassVar[int] = 1
    stage: ClassVar[None] = None

    checkpoint_dir: Path
    step_interval: PositiveInt | None = None
    epoch_interval: PositiveInt | None = None
    async_save: bool = True
    keep_last: PositiveInt | None = None
    keep_best: PositiveInt | None = None
    monitor: str = "loss"

    _scores: dict[str, float] = PrivateAttr(default_factory=dict)
    _saved_step: int = PrivateAttr(default=0)
    _writer: ThreadPoolExecutor | None = PrivateAttr(default=None)
    _pending: Future[None] | None = PrivateAttr(default=None)

    def __init__(
        self,
        checkpoint_dir: Any = None,
        step_interval: int | None = None,
        epoch_interval: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            checkpoint_dir=checkpoint_dir,
            step_interval=step_interval,
            epoch_interval=epoch_interval,
            **options,
        )

    @model_validator(mode="before")
    @classmethod
    def _each_epoch_by_default(cls, values: Any) -> Any:
        if (
            isinstance(values, Mapping)
            and values.get("step_interval") is None
            and values.get("epoch_interval") is None
        ):
            return {**values, "epoch_interval": 1}
        return values

    def _runs_on_stage(self, stage: Any) -> bool:
        return (stage is TrainingStage.AFTER_BATCH and self.step_interval is not None) or (
            stage is TrainingStage.AFTER_EPOCH and self.epoch_interval is not None
        )

    def on_register(self, workflow: Any) -> None:
        """Find out now, not at the first save, that a library is missing."""
        archive.require_safetensors()

    def __call__(self, ctx: TrainContext, stage: Any) -> None:
        """Save when it is time."""
        if stage is TrainingStage.AFTER_EPOCH:
            epochs = ctx.epoch + 1
            if self.epoch_interval is not None and epochs % self.epoch_interval == 0:
                self._save(ctx, f"epoch-{epochs}")
            return
        # Batches inside an accumulation window make no step.
        new_step = ctx.step_count != self._saved_step
        if self.step_interval is not None and new_step and ctx.step_count % self.step_interval == 0:
            self._saved_step = ctx.step_count
            self._save(ctx, f"step-{ctx.step_count}")

    def _save(self, ctx: TrainContext, name: str) -> None:
        self.wait()
        if (
            self.keep_best is not None
            and ctx.validation is not None
            and ctx.validation["step_count"] == ctx.step_count
        ):
            score = monitored(ctx.validation, self.monitor)
            self._scores[name] = math.inf if math.isnan(score) else score  # NaN has no place in an order
        snapshot = take_snapshot(ctx.workflow)
        if _ranks.rank() != 0:
            return
        scores = dict(self._scores)
        self._submit(lambda: self._write(snapshot, name, scores))

    def _submit(self, write: Callable[[], None]) -> None:
        if not self.async_save:
            write()
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = self._writer.submit(write)

    def _write(self, snapshot: archive.Snapshot, name: str, scores: Mapping[str, float]) -> None:
        archive.write_checkpoint(snapshot, self.checkpoint_dir / name)
        if self.keep_last is None and self.keep_best is None:
            return
        paths = [
            path
            for path in archive.newest_first(self.checkpoint_dir)
            if path.name.startswith(("epoch-", "step-"))
        ]
        kept = {path.name for path in paths[: self.keep_last or 1]}
        best = sorted((path.name for path in paths if path.name in scores), key=lambda each: scores[each])
        kept |= {*best[: self.keep_best or 0], name}
        for path in paths:
            if path.name not in kept:
                archive.remove_checkpoint(path)

    @property
    def best_checkpoint(self) -> Path | None:
        """Best checkpoint so far by ``monitor`` (with ``keep_best``); ``None`` before the first validation."""
        if not self._scores:
            return None
        return self.checkpoint_dir / min(self._scores, key=lambda name: self._scores[name])

    def wait(self) -> None:
        """Wait until the last save is on the disk; raises what went wrong there."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def __enter__(self) -> Self:
        """Put in order what an interrupted run has left."""
        if _ranks.rank() == 0:
            archive.remove_remains(self.checkpoint_dir)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            _ranks.barrier()  # so that after a run every rank finds the checkpoints that rank 0 writes

    def close(self) -> None:
        """Finish writing."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """Validation results of the checkpoints, and the last step saved."""
        return {"scores": dict(self._scores), "saved_step": self._saved_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that :meth:`state_dict` gave."""
        self._scores, self._saved_step = dict(state["scores"]), state["saved_step"]
