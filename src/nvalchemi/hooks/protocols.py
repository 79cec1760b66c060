"""What an object must look like to be a hook: structural types, no base class."""

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.hooks.context import HookContext


@runtime_checkable
class Hook(Protocol):
    """An object called at named stages of a workflow. It observes or changes the batch.

    Attributes
    ----------
    frequency : int
        The hook fires at steps whose number is a multiple of it; 1 means every step. Every hook fires at
        step 0.
    stage : Enum or None
        Where it fires; ``None`` for a hook that decides by itself (:class:`MultiStageHook`) or leaves the
        choice to the engine (:class:`DefaultStageHook`).

    Notes
    -----
    An engine looks for further members, each a protocol of its own in this module:

    ================================ =============================================================================
    member                           meaning
    ================================ =============================================================================
    ``_runs_on_stage(stage)``        replaces the test ``stage == hook.stage``, so that one hook serves many stages
    ``default_stages``               names of stages; the first that the engine knows is used when ``stage`` is None
    ``on_register(workflow)``        called once, when every check has passed and before the hook is stored
    ``__enter__``, ``__exit__``      opened when a run starts, closed when it ends, also after an error
    ``close()``                      closed when a run ends (when there is no ``__exit__``)
    ``part_of_evaluation``           True for hooks that belong to the evaluation of forces, see below
    ``order_role``                   what the order check knows the hook as (``nvalchemi.hooks.order``)
    ``state_dict()``                 saved and restored by restarts, with ``load_state_dict(state)``
                                     (:class:`CheckpointableHook`)
    ``on_resume(ctx)``               called when a restart has brought back the batch (:class:`ResumableHook`)
    ================================ =============================================================================

    The first forces of a structure are computed at its admission, before step 0. Hooks with
    ``part_of_evaluation = True`` (neighbour lists, biases, clamps) act on those too, so that the first half
    kick uses the same forces as every other; hooks without it see ``BEFORE_COMPUTE`` and ``AFTER_COMPUTE``
    once per step, no more.

    Examples
    --------
    >>> class CountSteps:
    ...     frequency, stage, n = 1, None, 0
    ...
    ...     def __call__(self, ctx, stage):
    ...         self.n += 1
    >>> isinstance(CountSteps(), Hook)
    True
    """

    frequency: int
    stage: Enum | None

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Act at ``stage`` on what ``ctx`` shows."""
        ...


@runtime_checkable
class MultiStageHook(Protocol):
    """A hook that fires wherever ``_runs_on_stage`` says so."""

    def _runs_on_stage(self, stage: Enum) -> bool:
        """Whether it fires there."""
        ...


@runtime_checkable
class DefaultStageHook(Protocol):
    """A hook whose stage, when none is given, is the first of ``default_stages`` that the engine has, by name."""

    default_stages: tuple[str, ...]


@runtime_checkable
class RegistrationHook(Protocol):
    """A hook that is told which workflow it joins."""

    def on_register(self, workflow: Any) -> None:
        """Called with the engine before the hook is stored."""
        ...


@runtime_checkable
class EvaluationHook(Protocol):
    """A hook that is part of the evaluation of forces and so also acts on the first ones (see :class:`Hook`)."""

    part_of_evaluation: bool


@runtime_checkable
class OrderedHook(Protocol):
    """A hook whose place among others at one stage is checked (see :mod:`nvalchemi.hooks.order`)."""

    order_role: str


@runtime_checkable
class ClosableHook(Protocol):
    """A hook with something to close at the end of a run."""

    def close(self) -> None:
        """Release what is held; the hook may be used again."""
        ...


@runtime_checkable
class CheckpointableHook(Protocol):
    """A hook with state that a restart must bring back."""

    def state_dict(self) -> Mapping[str, Any]:
        """State as a mapping of plain values and tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that :meth:`state_dict` gave."""
        ...


@runtime_checkable
class ResumableHook(Protocol):
    """A hook that is shown the batch which a restart brought back, after its own state. There is no admission then."""

    def on_resume(self, ctx: HookContext) -> None:
        """Take up the batch of ``ctx`` as one that is known."""
        ...


@runtime_checkable
class IsolatingWorkflow(Protocol):
    """A workflow that goes on without the structures that failed."""

    def retire(self, batch: Batch, reasons: Mapping[int, str]) -> None:
        """Give up graphs of the batch: number of the graph → why."""
        ...


@runtime_checkable
class FailureHook(Protocol):
    """A hook that is told of structures that were given up, whenever that happens."""

    def on_failure(self, batch: Batch, reasons: Mapping[int, str]) -> None:
        """Number of the graph in the batch → why; they may never have been admitted."""
        ...


@runtime_checkable
class ValidationHook(Protocol):
    """A hook that is shown what is predicted in a validation."""

    def on_validation_batch(self, batch: Batch, labelled: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Label and prediction of ``energy [B, 1]``, ``forces [N, 3]``, ``stress [B, 3, 3]``, where there are both."""
        ...


# ---------------------------------------------------------------------- what a workflow may say of itself
class Progress(NamedTuple):
    """How far a workflow has come."""

    done: int
    total: int | None
    """``None``: not known."""
    unit: str
    """What is counted: ``"step"``, ``"batch"`` or ``"structure"``."""
    note: str = ""
    """Why it ended before its end."""


@runtime_checkable
class ProgressingWorkflow(Protocol):
    """A workflow that knows how far it has come."""

    def progress(self) -> Progress:
        """How far the run has come."""
        ...


@runtime_checkable
class ObservableWorkflow(Protocol):
    """A workflow of simulation that says what can be measured, by its own rules."""

    def targets(self) -> Mapping[str, float]:
        """What is driven below which threshold; empty when nothing is."""
        ...

    def observables(self, batch: Batch) -> Mapping[str, Tensor]:
        """Quantities of each graph by name, ``[B]``; NaN where a graph has none."""
        ...


@runtime_checkable
class CompositeWorkflow(Protocol):
    """A workflow made of others."""

    @property
    def parts(self) -> Sequence[Any]:
        """They, in order; itself where it is one."""
        ...


@cache
def conforms(kind: type, protocol: type) -> bool:
    """``issubclass`` with a protocol of methods only, remembered: the question itself takes tens of microseconds."""
    return issubclass(kind, protocol)
