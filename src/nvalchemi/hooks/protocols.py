"""What an object must look like to be a hook: structural types, no base class."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol, runtime_checkable

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
    ``state_dict``, ``load_state_dict`` saved and restored by restarts (:class:`CheckpointableHook`)
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
