"""Update hooks: how a loss becomes a change of weights, one concern per hook."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from torch import Tensor

from nvalchemi.hooks import CheckpointableHook, TrainContext
from nvalchemi.hooks.protocols import ClosableHook
from nvalchemi.training._stages import UPDATE_STAGES, TrainingStage
from nvalchemi.training._steps import step_optimizers, zero_gradients

_GATED = frozenset({TrainingStage.BEFORE_BATCH, TrainingStage.DO_OPTIMIZER_STEP})


@runtime_checkable
class PerRankHook(Protocol):
    """A hook with state that differs between the ranks of a distributed run: a checkpoint holds that of each."""

    state_per_rank: ClassVar[Literal[True]]


class TrainingUpdateHook:
    """One concern of the update of weights, such as accumulation, precision or clipping.

    A subclass overrides :meth:`__call__` and acts at one or more of the stages ``BEFORE_BATCH``, ``DO_BACKWARD``,
    ``DO_OPTIMIZER_STEP`` and ``AFTER_OPTIMIZER_STEP``. ``a + b`` composes hooks into a
    :class:`TrainingUpdateOrchestrator`; a strategy wraps bare ones by itself.

    Attributes
    ----------
    priority : int
        Order within an orchestrator, low first. 10: gradient accumulation, 20: mixed precision, 30: gradient
        clipping, 40: spike skipping; default 50.
    _exclusive_update_key : str or None
        Hooks with the same key exclude each other; ``None`` (default): any number may be combined.
    tolerates_nonfinite_loss : bool
        Whether a batch whose loss is not finite is dealt with by this hook; a strategy without such a hook raises.

    Examples
    --------
    >>> import torch
    >>> class ClipGrads(TrainingUpdateHook):
    ...     priority = 30
    ...
    ...     def __init__(self, max_norm):
    ...         self.max_norm = max_norm
    ...
    ...     def __call__(self, ctx, stage, will_skip):
    ...         if stage is TrainingStage.DO_OPTIMIZER_STEP and not will_skip:
    ...             for optimizer in ctx.optimizers:
    ...                 params = (p for group in optimizer.param_groups for p in group["params"])
    ...                 torch.nn.utils.clip_grad_norm_(params, self.max_norm)
    ...         return True, ctx.loss
    >>> [type(hook).__name__ for hook in (ClipGrads(1.0) + ClipGrads(2.0)).iter_hooks()]
    ['ClipGrads', 'ClipGrads']
    """

    priority: ClassVar[int] = 50
    _exclusive_update_key: ClassVar[str | None] = None

    @property
    def tolerates_nonfinite_loss(self) -> bool:
        """Whether this hook deals with a loss that is not finite."""
        return False

    def __call__(
        self, ctx: TrainContext, stage: TrainingStage, will_skip: bool
    ) -> tuple[bool, Tensor | None]:
        """Act at a stage.

        Parameters
        ----------
        ctx : TrainContext
            State of the batch.
        stage : TrainingStage
            Where the loop is.
        will_skip : bool
            Whether a hook before this one has already vetoed what this stage gates. Counts for this stage only.

        Returns
        -------
        proceed : bool
            ``False`` at ``BEFORE_BATCH`` keeps the gradients, at ``DO_OPTIMIZER_STEP`` leaves the step out. Without
            meaning at other stages.
        loss : Tensor or None
            At ``DO_BACKWARD`` the loss to go on with; ``ctx.loss`` to leave it as it is. Elsewhere ignored.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__(ctx, stage, will_skip)")

    def batch_failed(self) -> None:
        """Put right what a batch that raised has left half done."""

    def __add__(
        self, other: "TrainingUpdateHook | TrainingUpdateOrchestrator"
    ) -> "TrainingUpdateOrchestrator":
        if not isinstance(other, TrainingUpdateHook | TrainingUpdateOrchestrator):
            return NotImplemented
        return TrainingUpdateOrchestrator(self, other)


class TrainingUpdateOrchestrator:
    """Compose update hooks and do the update: zero the gradients, backward, step.

    Parameters
    ----------
    *hooks : TrainingUpdateHook or TrainingUpdateOrchestrator
        Members; an orchestrator gives its own members. Sorted by priority, equal ones stay in the order given.

    Raises
    ------
    TypeError
        An argument is neither.
    ValueError
        Two members have the same exclusive key.

    Notes
    -----
    ======================== ===================================================== ==========================
    stage                    done when the members have been called                unless
    ======================== ===================================================== ==========================
    ``BEFORE_BATCH``         gradients set to ``None``                             any member vetoed
    ``DO_BACKWARD``          ``ctx.loss.backward()`` of the loss handed through
    ``DO_OPTIMIZER_STEP``    optimizers step (through ``ctx.grad_scaler`` if set), any member vetoed
                             then the schedulers of those that really stepped
    ``AFTER_OPTIMIZER_STEP`` nothing
    ======================== ===================================================== ==========================

    Without members it is the plain update. It needs no strategy: a loop of one's own may call it at the four stages.

    Examples
    --------
    >>> import torch
    >>> from nvalchemi.training import TrainingStage as Stage
    >>> weight = torch.nn.Parameter(torch.tensor(1.0))
    >>> ctx = TrainContext(batch=None, optimizers=[torch.optim.SGD([weight], lr=0.1)])
    >>> update = TrainingUpdateOrchestrator()
    >>> update(ctx, Stage.BEFORE_BATCH)
    >>> ctx.loss = 2.0 * weight
    >>> update(ctx, Stage.DO_BACKWARD)
    >>> update(ctx, Stage.DO_OPTIMIZER_STEP)
    >>> weight.item()
    0.800000011920929
    """

    frequency = 1
    stage = None

    def __init__(self, *hooks: "TrainingUpdateHook | TrainingUpdateOrchestrator") -> None:
        self._hooks: tuple[TrainingUpdateHook, ...] = ()
        self._skipped = False
        self._open: ExitStack | None = None
        self.extend(*hooks)

    def extend(self, *hooks: "TrainingUpdateHook | TrainingUpdateOrchestrator") -> None:
        """Add members; when one is refused, none is added."""
        members = list(self._hooks)
        added: list[TrainingUpdateHook] = []
        for hook in hooks:
            if isinstance(hook, TrainingUpdateOrchestrator):
                added.extend(hook._hooks)
            elif isinstance(hook, TrainingUpdateHook):
                added.append(hook)
            else:
                raise TypeError(
                    f"{hook!r} is a {type(hook).__name__}; an orchestrator is made of TrainingUpdateHook and "
                    "TrainingUpdateOrchestrator"
                )
        holders: dict[str, TrainingUpdateHook] = {}
        for hook in (*members, *added):
            key = hook._exclusive_update_key
            if key is None:
                continue
            if key not in holders:
                holders[key] = hook
            else:
                raise ValueError(
                    f"{type(hook).__name__} and {type(holders[key]).__name__} cannot be combined: "
                    f"only one update hook of kind {key!r} is possible"
                )
        self._hooks = tuple(sorted((*members, *added), key=lambda hook: hook.priority))
        if self._open is not None:
            for hook in added:
                _enter(self._open, hook)

    def iter_hooks(self) -> Iterator[TrainingUpdateHook]:
        """Members in the order in which they are called."""
        return iter(self._hooks)

    @property
    def optimizer_step_skipped(self) -> bool:
        """Whether the most recent optimizer step was vetoed by a member or the gradient scaler, or had no gradients."""
        return self._skipped

    def __add__(
        self, other: "TrainingUpdateHook | TrainingUpdateOrchestrator"
    ) -> "TrainingUpdateOrchestrator":
        if not isinstance(other, TrainingUpdateHook | TrainingUpdateOrchestrator):
            return NotImplemented
        return TrainingUpdateOrchestrator(self, other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(type(hook).__name__ for hook in self._hooks)})"

    # ------------------------------------------------------------------ the update
    def _runs_on_stage(self, stage: Any) -> bool:
        return stage in UPDATE_STAGES

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        """Call the members, then do what the stage stands for."""
        if stage is TrainingStage.DO_BACKWARD:
            ctx.raw_loss = ctx.loss
        skip = self._call_members(ctx, stage)
        if stage is TrainingStage.BEFORE_BATCH:
            if not skip:
                zero_gradients(ctx.optimizers)
        elif stage is TrainingStage.DO_BACKWARD:
            if ctx.loss is None:
                raise ValueError("there is no loss to differentiate: ctx.loss is None at DO_BACKWARD")
            ctx.loss.backward()
        elif stage is TrainingStage.DO_OPTIMIZER_STEP:
            self._skipped = skip
            if not skip:
                ran = step_optimizers(ctx.optimizers, ctx.lr_schedulers, ctx.grad_scaler)
                self._skipped = bool(ctx.optimizers) and not ran

    def _call_members(self, ctx: TrainContext, stage: TrainingStage) -> bool:
        """Whether any member vetoed; at ``DO_BACKWARD`` the loss goes from one to the next through ``ctx.loss``."""
        skip = False
        for hook in self._hooks:
            answer: Any = hook(ctx, stage, skip)
            proceed, loss = _checked(answer, hook, stage)
            if stage in _GATED:
                skip = skip or not proceed
            elif stage is TrainingStage.DO_BACKWARD:
                ctx.loss = loss
        return skip

    def batch_failed(self) -> None:
        """Tell every member that the batch raised."""
        for hook in self._hooks:
            hook.batch_failed()

    # ------------------------------------------------------------------ opening and closing
    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for hook in self._hooks:
                _enter(stack, hook)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(kind, error, traceback)

    def close(self) -> None:
        """Close the members that have ``close``, the last first; an error in one does not keep the others open."""
        with ExitStack() as stack:
            for hook in self._hooks:
                if isinstance(hook, ClosableHook):
                    stack.callback(hook.close)

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """State of every member that has one, by name of class and number."""
        return {name: hook.state_dict() for name, hook in numbered(self._hooks).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the states that :meth:`state_dict` gave; the members must be the same.

        Raises
        ------
        ValueError
            The members with state are others than those saved.
        """
        members = numbered(self._hooks)
        if set(members) != set(state):
            raise ValueError(
                f"saved update hooks {sorted(state)} do not match the present ones {sorted(members)}"
            )
        for name, hook in members.items():
            hook.load_state_dict(state[name])


def numbered(hooks: Iterable[Any]) -> dict[str, CheckpointableHook]:
    """Hooks with state, by class and number: ``"EMAHook.0"``."""
    names: dict[str, CheckpointableHook] = {}
    for hook in hooks:
        if isinstance(hook, CheckpointableHook):
            kind = type(hook).__name__
            names[f"{kind}.{sum(name.startswith(f'{kind}.') for name in names)}"] = hook
    return names


def _checked(answer: Any, hook: TrainingUpdateHook, stage: TrainingStage) -> tuple[bool, Any]:
    if not isinstance(answer, tuple) or len(answer) != 2:
        problem = f"(proceed, loss), got {answer!r}"
    elif type(answer[0]) is not bool:
        problem = f"a bool to say whether to proceed, got {answer[0]!r} ({type(answer[0]).__name__})"
    elif stage is TrainingStage.DO_BACKWARD and not isinstance(answer[1], Tensor):
        problem = f"the loss, a tensor, got {answer[1]!r}; return ctx.loss to leave it unchanged"
    else:
        return answer
    raise TypeError(f"{type(hook).__name__} at {stage.name} must return {problem}")


def _enter(stack: ExitStack, hook: TrainingUpdateHook) -> None:
    if isinstance(hook, AbstractContextManager):
        stack.enter_context(hook)
    elif isinstance(hook, ClosableHook):
        stack.callback(hook.close)
