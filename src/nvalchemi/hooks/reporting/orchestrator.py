"""One hook that collects the numbers of a run and hands them to reporters."""

import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.hooks.context import DynamicsContext, HookContext, TrainContext
from nvalchemi.hooks.protocols import (
    ClosableHook,
    ObservableWorkflow,
    Progress,
    ProgressingWorkflow,
    conforms,
)
from nvalchemi.hooks.reporting.rates import Budget, Rates
from nvalchemi.hooks.reporting.reporter import (
    DrawingReporter,
    EventReporter,
    Reporter,
    ResumingReporter,
    SamplingReporter,
    TimedReporter,
    ValidationReporter,
)
from nvalchemi.hooks.reporting.snapshot import ScalarSnapshot, collect_scalars
from nvalchemi.hooks.reporting.structures import StructureLog
from nvalchemi.hooks.reporting.watch import RunWatch, StageClock

logger = logging.getLogger(__name__)

_NOT_COUNTED = {("AFTER_STEP", "step"), ("AFTER_OPTIMIZER_STEP", "batch")}
"""Where the step or batch that was just made is not in the workflow's own count yet."""

DEFAULT_STAGES = frozenset({"AFTER_OPTIMIZER_STEP", "AFTER_STEP"})


class ReportingOrchestrator:
    """Collect scalars once and hand them to every reporter, in simulations and in training alike.

    Parameters
    ----------
    reporters : sequence of Reporter
        Called in this order.
    stages : collection of str or Enum, default {"AFTER_OPTIMIZER_STEP", "AFTER_STEP"}
        Where to report; names that a workflow does not have are passed over.
    frequency : int, default 1
        Report every so many steps; in training these are optimizer steps, of which each is reported once, however many
        batches it takes.
    error_policy : {"raise", "warn", "ignore"}, default "raise"
        What an error of a reporter does: end the run; become a ``UserWarning``; be logged only. It names the
        reporter, and the others are called all the same. What ends the run is never held up by a reporter.
    ranks : {"zero", "mean"}, default "zero"
        In a run of several processes only the first reports: what it sees itself, or the means over all
        processes (the largest ``fmax``; sums of rates, ``active`` and ``failed``). ``"mean"`` needs processes
        that make their steps together, as training with DDP does.
    names : mapping of int to str or sequence of str, optional
        Names of structures by ``system_id``, where ``info`` has none.

    Raises
    ------
    ValueError
        An unknown policy, no stage.
    TypeError
        A reporter without ``report``.

    Notes
    -----
    Registering it registers two small hooks of its own: a :class:`~nvalchemi.hooks.reporting.watch.RunWatch` that sees
    structures come and go, and validations, at any step; and, when a reporter shows times, a
    :class:`~nvalchemi.hooks.reporting.watch.StageClock`. The reporters of this package also show every
    validation, and the state at the end of a run, whatever the frequency.

    Where all reporters are for the eye (:class:`RichReporter`, :class:`HTMLReporter`), only every second, every fourth
    … report is collected as soon as collecting has taken more than 0.5 s and 1 % of the time of the run.

    Examples
    --------
    >>> from nvalchemi.hooks import HTMLReporter
    >>> report = ReportingOrchestrator([HTMLReporter("report.html")], frequency=10)
    >>> report.frequency
    10
    """

    order_role = "record"

    def __init__(
        self,
        reporters: Sequence[Reporter],
        stages: Collection[str | Enum] = DEFAULT_STAGES,
        frequency: int = 1,
        error_policy: str = "raise",
        *,
        ranks: str = "zero",
        names: Mapping[int, str] | Sequence[str] | None = None,
    ) -> None:
        if error_policy not in ("raise", "warn", "ignore"):
            raise ValueError(f"error_policy must be 'raise', 'warn' or 'ignore', got {error_policy!r}")
        if ranks not in ("zero", "mean"):
            raise ValueError(f"ranks must be 'zero' or 'mean', got {ranks!r}")
        for reporter in reporters:
            if not isinstance(reporter, Reporter):
                raise TypeError(
                    f"{type(reporter).__name__} is no reporter: it needs report(ctx, stage, state)"
                )
        if isinstance(stages, str) or not stages:
            raise ValueError(f"stages must be a set of names of stages, got {stages!r}")
        self.reporters = tuple(reporters)
        self.stages = frozenset(stage.name if isinstance(stage, Enum) else stage for stage in stages)
        self.frequency = frequency
        self.stage: Enum | None = None
        self.error_policy = error_policy
        self.ranks = ranks
        known = names if isinstance(names, Mapping) else dict(enumerate(names or ()))
        self.structures = StructureLog(known)
        self._rates, self._budget = Rates(), Budget()
        # Processes that reduce together must not decide by their own clocks.
        self._needs_every_report = ranks == "mean" or not all(_samples(r) for r in self.reporters)
        self._watch = RunWatch(self)
        self._clock = StageClock() if any(isinstance(r, TimedReporter) for r in self.reporters) else None
        self._opened: list[Reporter] | None = None
        self._seen: tuple[HookContext, Enum] | None = None
        self._has_run = False

    # ------------------------------------------------------------------ as a hook
    def _runs_on_stage(self, stage: Enum) -> bool:
        return stage.name in self.stages

    def on_register(self, workflow: Any) -> None:
        """Register the hooks that see what happens between two reports.

        Raises
        ------
        ValueError
            The workflow has none of the stages.
        """
        known = [stage.name for stage in workflow._all_stages()]
        if known and self.stages.isdisjoint(known):
            raise ValueError(
                f"{type(workflow).__name__} has none of the stages {sorted(self.stages)} at which to report; "
                f"give stages={{…}} of {', '.join(known)}"
            )
        for hook in (self._watch, self._clock):
            if hook is not None and not any(hook is other for other in workflow.hooks):
                workflow.register_hook(hook)
        if self._clock is not None:
            self._clock.measure(workflow)

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Collect and report; not after a batch of training that made no step."""
        if stage.name == "AFTER_OPTIMIZER_STEP" and isinstance(ctx, TrainContext) and ctx.step_made is False:
            return
        reporters = self._open_reporters() if ctx.global_rank == 0 else ()
        if self._budget.begin(needed=self._needs_every_report):
            state = self._reduced(self._collect(ctx, stage))
            for reporter in reporters:
                with self._guarded(reporter):
                    reporter.report(ctx, stage, state)
            self._budget.end()
        for reporter in reporters:
            if isinstance(reporter, DrawingReporter):
                with self._guarded(reporter):
                    reporter.refresh()

    def on_resume(self, ctx: HookContext) -> None:
        """Take up the structures that a restart has brought back, and what reporters have kept of the run so far."""
        if isinstance(ctx, DynamicsContext) and ctx.batch is not None and len(self.structures) == 0:
            self.structures.admit(ctx.batch, None)
            self._resume_reporters(ctx, ctx.step_count)

    def _resume_reporters(self, ctx: HookContext, step: int) -> None:
        for reporter in self.reporters if ctx.global_rank == 0 else ():
            if isinstance(reporter, ResumingReporter):
                with self._guarded(reporter):
                    reporter.report_resume(ctx, step, self.structures)

    def __enter__(self) -> Self:
        self._rates.restart()
        self._budget.restart()
        self.structures.resume()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Report the state at the end, and close the reporters whatever happens."""
        try:
            if self._seen is not None:
                self._report_end(*self._seen, error)
        finally:
            self._seen = None
            self._close_reporters(error)

    def close(self) -> None:
        """End the reports of a workflow that does not open its hooks."""
        self.__exit__(None, None, None)

    # ------------------------------------------------------------------ what is seen between reports
    def on_failure(self, batch: Batch, reasons: Mapping[int, str]) -> None:
        """Note structures that were given up."""
        self.structures.fail(batch, reasons)

    def on_validation_batch(self, batch: Batch, labelled: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Show a batch of a validation to the reporters that want to see it."""
        for reporter in self.reporters:
            if isinstance(reporter, ValidationReporter):
                with self._guarded(reporter):
                    reporter.report_validation_batch(batch, labelled)

    @property
    def awaits_first_values(self) -> bool:
        """Whether structures have entered whose first values are to be read."""
        return self.structures.incomplete or len(self.structures) == 0

    def note_event(self, ctx: HookContext, stage: Enum) -> None:
        """Take up what the :class:`~nvalchemi.hooks.reporting.watch.RunWatch` saw."""
        self._see(ctx, stage)
        if isinstance(ctx, TrainContext) and ctx.step_count > 0 and not self._has_run:
            self._resume_reporters(ctx, ctx.step_count)
        self._has_run = True
        if ctx.global_rank == 0:
            self._open_reporters()
        if stage.name == "AFTER_VALIDATION":
            self._report_event(ctx, stage, self._reduced(self._collect(ctx, stage)))
        if not isinstance(ctx, DynamicsContext) or ctx.batch is None:
            return
        match stage.name:
            case "ON_ADMISSION":
                self.structures.admit(ctx.batch, ctx.admitted_mask)
            case "BEFORE_STEP":
                self._collect(ctx, stage)
            case "ON_CONVERGE" if ctx.converged_mask is not None:
                self.structures.converge(ctx.batch, ctx.converged_mask)
            case "ON_GRADUATE" if ctx.graduated_mask is not None:
                graphs = collect_scalars(ctx, stage).graphs
                self.structures.graduate(ctx.batch, ctx.graduated_mask, graphs, seeking=bool(_targets(ctx)))
            case _:
                pass

    def _see(self, ctx: HookContext, stage: Enum) -> None:
        """Remember the context for the end of the run; not that of training, which holds predictions and losses."""
        if not isinstance(ctx, DynamicsContext):
            ctx = HookContext(batch=None, model=ctx.model, global_rank=ctx.global_rank, workflow=ctx.workflow)
        self._seen = (ctx, stage)

    # ------------------------------------------------------------------ collecting
    def _collect(self, ctx: HookContext, stage: Enum, *, counted: bool = False) -> ScalarSnapshot:
        """``counted``: the step is over, and in the workflow's count."""
        self._see(ctx, stage)
        snapshot = collect_scalars(ctx, stage)
        if counted and isinstance(ctx, DynamicsContext):
            snapshot = replace(snapshot, step=ctx.step_count)
        if ctx.batch is not None and snapshot.graphs:
            self.structures.admit_unknown(ctx.batch, snapshot.graphs)
            self.structures.observe(snapshot.graphs)
        progress = _progress(ctx, None if counted else stage)
        scalars = dict(snapshot.scalars)
        scalars |= self._rates.update(ctx, snapshot, progress)
        if progress is not None and progress.unit == "structure" and progress.total:
            counts = self.structures.counts
            # Those that are out of the batch count, too.
            scalars["converged_fraction"] = (counts["converged"] + counts["done"]) / progress.total
            scalars["failed"] = float(counts["failed"])
        return replace(snapshot, scalars=scalars, structures=self.structures, progress=progress)

    def _reduced(self, state: ScalarSnapshot) -> ScalarSnapshot:
        """The numbers of all processes, where that is wanted; not at the end, which after an error only some reach."""
        return replace(state, scalars=_over_ranks(state.scalars)) if self.ranks == "mean" else state

    def _report_event(self, ctx: HookContext, stage: Enum, state: ScalarSnapshot) -> None:
        for reporter in self._open_reporters() if ctx.global_rank == 0 else ():
            if isinstance(reporter, EventReporter):
                with self._guarded(reporter):
                    reporter.report_event(ctx, stage, state)

    def _report_end(self, ctx: HookContext, stage: Enum, error: BaseException | None) -> None:
        """Report a batch as the run left it: the last step need not be one that is reported."""
        progress = _progress(ctx, None)
        if isinstance(ctx, DynamicsContext) and ctx.batch is not None and ctx.workflow is not None:
            state = None
            if progress is None or progress.unit != "structure":
                # Where structures come and go, the batch that was seen last is one no more.
                ctx = ctx.workflow._build_context(ctx.batch)
                state = self._collect(ctx, stage, counted=True)
            cut_short = error is not None or (progress is not None and progress.note)
            self.structures.finish("stopped" if cut_short else "not converged" if _targets(ctx) else "done")
            if state is not None:
                self._report_event(ctx, stage, state)

    # ------------------------------------------------------------------ reporters
    def _open_reporters(self) -> Sequence[Reporter]:
        if self._opened is None:
            self._opened = []
            for reporter in self.reporters:
                with self._guarded(reporter):
                    if isinstance(reporter, AbstractContextManager):
                        reporter.__enter__()
                    if self._clock is not None and isinstance(reporter, TimedReporter):
                        reporter.take_clock(self._clock)
                    self._opened.append(reporter)
        return self._opened

    def _close_reporters(self, error: BaseException | None) -> None:
        opened, self._opened = self._opened or [], None
        first: Exception | None = None
        for reporter in reversed(opened):
            try:
                with self._guarded(reporter):
                    if isinstance(reporter, AbstractContextManager):
                        reporter.__exit__(
                            type(error) if error else None, error, error.__traceback__ if error else None
                        )
                    elif isinstance(reporter, ClosableHook):
                        reporter.close()
            except Exception as failure:  # raised below once the others are closed
                first = first or failure
        if first is not None:
            raise first

    @contextmanager
    def _guarded(self, reporter: Reporter) -> Iterator[None]:
        """Do with an error of a reporter as the policy says."""
        try:
            yield
        except Exception as error:
            name = type(reporter).__name__
            if self.error_policy == "raise":
                error.add_note(f"raised by reporter {name}")
                raise
            if self.error_policy == "warn":
                warnings.warn(f"reporter {name} failed: {error!r}", UserWarning, stacklevel=4)
            else:
                logger.info("reporter %s failed: %r", name, error)


def _samples(reporter: Reporter) -> bool:
    return isinstance(reporter, SamplingReporter) and reporter.samples


def _targets(ctx: HookContext) -> Mapping[str, float]:
    return ctx.workflow.targets() if conforms(type(ctx.workflow), ObservableWorkflow) else {}


def _progress(ctx: HookContext, stage: Enum | None) -> Progress | None:
    """How far the workflow has come, with the step that is being made where it is over but not counted yet."""
    if not conforms(type(ctx.workflow), ProgressingWorkflow):
        return None
    progress = ctx.workflow.progress()
    if stage is not None and (stage.name, progress.unit) in _NOT_COUNTED:
        return progress._replace(done=progress.done + 1)
    return progress


def _over_ranks(scalars: Mapping[str, float]) -> dict[str, float]:
    """Means over all processes that have a scalar; of some the largest or the sum."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return dict(scalars)
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, dict(scalars))
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for own in gathered for name in own):
        values: list[float] = [own[name] for own in gathered if name in own]
        if name == "fmax" or name.endswith("/eta_s"):
            combined[name] = max(values)
        elif name in ("active", "failed") or name.endswith(("/atom_steps_per_s", "/structures_per_s")):
            combined[name] = sum(values)
        else:
            combined[name] = sum(values) / len(values)
    return combined
