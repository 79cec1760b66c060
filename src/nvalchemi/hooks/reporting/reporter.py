"""What an object must look like to be given the numbers of a run."""

from collections.abc import Mapping
from enum import Enum
from typing import Protocol, runtime_checkable

from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.hooks.context import HookContext
from nvalchemi.hooks.reporting.snapshot import ScalarSnapshot
from nvalchemi.hooks.reporting.structures import StructureLog
from nvalchemi.hooks.reporting.watch import StageClock


@runtime_checkable
class Reporter(Protocol):
    """Shows the numbers that a :class:`~nvalchemi.hooks.ReportingOrchestrator` collects. No base class is needed.

    One with ``__enter__`` and ``__exit__`` is opened before its first report and closed when the run ends, also after
    an error, which ``__exit__`` gets; one with ``close()`` only is closed.

    Examples
    --------
    >>> class PrintEnergy:
    ...     def report(self, ctx, stage, state):
    ...         print(f"{state.step}: {state['energy']:.3f} eV")
    >>> isinstance(PrintEnergy(), Reporter)
    True
    """

    def report(self, ctx: HookContext, stage: Enum, state: ScalarSnapshot) -> None:
        """Show ``state``; ``ctx`` is what the hook was called with."""
        ...


@runtime_checkable
class SamplingReporter(Protocol):
    """A reporter that can do without some of the reports, as the eye can. Where all are, long runs save the time."""

    samples: bool
    """Whether it can."""


@runtime_checkable
class DrawingReporter(Protocol):
    """A reporter that takes up numbers at once and draws them now and then: the drawing is not part of a report."""

    def refresh(self) -> None:
        """Draw what was reported, if that is due; called more often than ``report``."""
        ...


@runtime_checkable
class ResumingReporter(Protocol):
    """A reporter that goes on with what it wrote when the run that a restart takes up was made."""

    def report_resume(self, ctx: HookContext, step: int, structures: StructureLog) -> None:
        """The run goes on after ``step``; what is known of its structures can be put back into ``structures``."""
        ...


@runtime_checkable
class EventReporter(Protocol):
    """A reporter that also wants to know the result of each validation, and how structures were at the end."""

    def report_event(self, ctx: HookContext, stage: Enum, state: ScalarSnapshot) -> None:
        """Show ``state``: at ``AFTER_VALIDATION``, or once more when the run is over, between two reports."""
        ...


@runtime_checkable
class ValidationReporter(Protocol):
    """A reporter that also wants to see what was predicted in a validation."""

    def report_validation_batch(self, batch: Batch, labelled: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Label and prediction of ``energy [B, 1]``, ``forces [N, 3]``, ``stress [B, 3, 3]``, where there are both."""
        ...


@runtime_checkable
class TimedReporter(Protocol):
    """A reporter that wants to know what the time is spent on."""

    def take_clock(self, clock: StageClock) -> None:
        """Called when it is opened; the clock may be asked at any time."""
        ...
