"""Registration and dispatch of hooks: which hook fires where, compiled into a table."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from time import perf_counter
from typing import Any, ClassVar

from nvalchemi.data import Batch
from nvalchemi.hooks.context import HookContext
from nvalchemi.hooks.order import check_order
from nvalchemi.hooks.protocols import (
    ClosableHook,
    DefaultStageHook,
    EvaluationHook,
    Hook,
    MultiStageHook,
    RegistrationHook,
)


class _StageEntry:
    """Hooks of one stage in registration order, grouped by frequency.

    The number of tests per step is the number of distinct frequencies, not the number of hooks; the
    selection of due hooks is made once for each combination of due frequencies that occurs.
    """

    __slots__ = ("_cache", "frequencies", "hooks", "schedule_free")

    def __init__(self, hooks: tuple[Hook, ...], schedule_free: bool) -> None:
        self.hooks = hooks
        self.frequencies = tuple(sorted({hook.frequency for hook in hooks}))
        self.schedule_free = schedule_free or self.frequencies == (1,)
        self._cache: dict[tuple[int, ...], tuple[Hook, ...]] = {}

    def due(self, step: int) -> tuple[Hook, ...]:
        frequencies = tuple([f for f in self.frequencies if step % f == 0])
        if not frequencies:
            return ()
        hooks = self._cache.get(frequencies)
        if hooks is None:
            hooks = tuple(hook for hook in self.hooks if hook.frequency in frequencies)
            self._cache[frequencies] = hooks
        return hooks


class _DispatchTable(dict[Enum, _StageEntry | None]):
    """Stage → entry, filled the first time a stage is dispatched; thrown away when a registration changes."""

    def __init__(self, hooks: tuple[Hook, ...], unscheduled: frozenset[Enum]) -> None:
        super().__init__()
        self._hooks = hooks
        self._unscheduled = unscheduled

    def __missing__(self, stage: Enum) -> _StageEntry | None:
        hooks = tuple(hook for hook in self._hooks if _claims(hook, stage))
        entry = self[stage] = _StageEntry(hooks, stage in self._unscheduled) if hooks else None
        return entry


class HookRegistryMixin:
    """Gives a workflow hooks. The host provides ``step_count`` and calls :meth:`_call_hooks` at its stages.

    Class attributes
    ----------------
    _stage_type : type of Enum or tuple of such
        Stages that the engine accepts; any ``Enum`` by default.
    _unscheduled_stages : frozenset of Enum
        Stages at which frequencies are ignored.

    Examples
    --------
    >>> from enum import Enum
    >>> class Tick(Enum):
    ...     NOW = 0
    >>> class Clock(HookRegistryMixin):
    ...     _stage_type, step_count = Tick, 0
    >>> class Print:
    ...     frequency, stage = 1, Tick.NOW
    ...
    ...     def __call__(self, ctx, stage):
    ...         print(ctx.workflow.step_count, stage.name)
    >>> clock = Clock()
    >>> clock.register_hook(Print())
    >>> clock._call_hooks(Tick.NOW, None)
    0 NOW
    """

    _stage_type: ClassVar[type[Enum] | tuple[type[Enum], ...]] = Enum
    _unscheduled_stages: ClassVar[frozenset[Enum]] = frozenset()

    step_count: int

    # Immutable, so that the class attribute is a safe start for every instance.
    _hooks: tuple[Hook, ...] = ()
    _table: _DispatchTable = _DispatchTable((), frozenset())
    _open_hooks: list[Hook] | None = None
    # Host time in hooks by class, s; measured when somebody has put a dictionary here.
    _hook_seconds: dict[str, float] | None = None

    # ------------------------------------------------------------------ registration
    @property
    def hooks(self) -> Sequence[Hook]:
        """Registered hooks in the order of registration (read-only)."""
        return self._hooks

    def register_hook(self, hook: Hook, stage: Enum | None = None) -> None:
        """Add a hook after those already registered.

        Parameters
        ----------
        hook : Hook
            The hook. Its ``frequency`` and ``stage`` are read here; to change them later, remove and
            register it again.
        stage : Enum, optional
            Assigned to ``hook.stage`` first.

        Raises
        ------
        ValueError
            ``frequency`` is not an int of 1 or more, or the hook is registered already.
        TypeError
            The object is no hook, has neither a stage nor ``_runs_on_stage``, or its stage is of a type
            that this engine does not accept. A refused registration leaves the hook as it was.
        """
        new_stage = self._checked_stage(hook, stage)
        for other_stage in self._stages_of(hook, new_stage):
            check_order(hook, [h for h in self._hooks if _claims(h, other_stage)], other_stage.name)
        old_stage = hook.stage
        if new_stage is not old_stage:
            hook.stage = new_stage
        try:
            if isinstance(hook, RegistrationHook):
                hook.on_register(self)
            if self._open_hooks is not None:
                self._open(hook)
        except BaseException:
            if new_stage is not old_stage:
                hook.stage = old_stage
            raise
        self._set_hooks((*self._hooks, hook))

    def remove_hook(self, hook: Hook) -> None:
        """Remove a hook, closing it when a run has opened it; ``ValueError`` when it is not registered."""
        if not any(h is hook for h in self._hooks):
            raise ValueError(f"{_name(hook)} is not registered with this {type(self).__name__}")
        self._set_hooks(tuple(h for h in self._hooks if h is not hook))
        if self._open_hooks is not None and any(h is hook for h in self._open_hooks):
            self._open_hooks = [h for h in self._open_hooks if h is not hook]
            _close(hook, None)

    def _set_hooks(self, hooks: tuple[Hook, ...]) -> None:
        self._hooks = hooks
        self._table = _DispatchTable(hooks, self._unscheduled_stages)

    def _checked_stage(self, hook: Hook, stage: Enum | None) -> Enum | None:
        """Stage the hook will have; raises when it cannot be registered."""
        name = _name(hook)
        if not isinstance(hook, Hook):
            raise TypeError(f"{name} is no hook: it needs frequency, stage and __call__(ctx, stage)")
        if any(h is hook for h in self._hooks):
            raise ValueError(f"{name} is registered already with this {type(self).__name__}")
        frequency: Any = hook.frequency
        if not isinstance(frequency, int) or isinstance(frequency, bool) or frequency < 1:
            raise ValueError(f"frequency of {name} must be an int ≥ 1, got {frequency!r}")
        new_stage = hook.stage if stage is None else stage
        if isinstance(hook, MultiStageHook):
            return new_stage
        if new_stage is None and isinstance(hook, DefaultStageHook):
            by_name = {member.name: member for member in self._all_stages()}
            new_stage = next((by_name[s] for s in hook.default_stages if s in by_name), None)
        accepted = " or ".join(t.__name__ for t in self._stage_types())
        if new_stage is None:
            raise TypeError(
                f"{name} has neither a stage nor _runs_on_stage; {type(self).__name__} accepts stages of {accepted}: "
                "set hook.stage or use register_hook(hook, stage=…)"
            )
        if not isinstance(new_stage, self._stage_types()):
            raise TypeError(
                f"stage {new_stage!r} of {name} is a {type(new_stage).__name__}; "
                f"{type(self).__name__} accepts stages of {accepted}"
            )
        return new_stage

    def _stage_types(self) -> tuple[type[Enum], ...]:
        return self._stage_type if isinstance(self._stage_type, tuple) else (self._stage_type,)

    def _all_stages(self) -> list[Enum]:
        """Stages of the engine; where it accepts any Enum, those that its hooks name."""
        members = [member for stage_type in self._stage_types() for member in stage_type]
        return members or list(dict.fromkeys(h.stage for h in self._hooks if h.stage is not None))

    def _stages_of(self, hook: Hook, stage: Enum | None) -> list[Enum]:
        if isinstance(hook, MultiStageHook):
            return [s for s in self._all_stages() if hook._runs_on_stage(s)]
        return [] if stage is None else [stage]

    # ------------------------------------------------------------------ dispatch
    def _build_context(self, batch: Batch | None) -> HookContext:
        """Snapshot that hooks get; engines return their own kind of context."""
        return HookContext(batch=batch, workflow=self)

    def _call_hooks(self, stage: Enum, batch: Batch | None) -> None:
        """Call the hooks that are due at ``stage``, in registration order."""
        entry = self._table[stage]
        if entry is not None:
            hooks = entry.hooks if entry.schedule_free else entry.due(self.step_count)
            if hooks:
                self._dispatch(hooks, stage, batch)

    def _call_evaluation_hooks(self, stage: Enum, batch: Batch | None) -> None:
        """Call those hooks of ``stage`` that belong to the evaluation of forces, whatever their frequency."""
        entry = self._table[stage]
        if entry is not None:
            hooks = tuple(h for h in entry.hooks if isinstance(h, EvaluationHook) and h.part_of_evaluation)
            if hooks:
                self._dispatch(hooks, stage, batch)

    def _dispatch(self, hooks: Iterable[Hook], stage: Enum, batch: Batch | None) -> None:
        ctx = self._build_context(batch)
        registered = self._hooks
        for hook in hooks:
            # A hook that an earlier one removed is closed by now.
            if self._hooks is not registered and not any(h is hook for h in self._hooks):
                continue
            start = perf_counter()
            try:
                hook(ctx, stage)
            except BaseException as error:
                error.add_note(f"raised by hook {_name(hook)} at stage {stage.name}, step {self.step_count}")
                raise
            if self._hook_seconds is not None:
                name = _name(hook)
                self._hook_seconds[name] = self._hook_seconds.get(name, 0.0) + perf_counter() - start

    # ------------------------------------------------------------------ opening and closing
    @contextmanager
    def _hooks_opened(self) -> Iterator[None]:
        """Open all hooks, and close them in reverse order at the end, also after an error. Nested uses do nothing."""
        if self._open_hooks is not None:
            yield
            return
        self._open_hooks = []
        failure: BaseException | None = None
        try:
            for hook in self._hooks:
                self._open(hook)
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            opened, self._open_hooks = self._open_hooks, None
            self._close_all(opened, failure)

    def _open(self, hook: Hook) -> None:
        if isinstance(hook, AbstractContextManager):
            try:
                hook.__enter__()
            except BaseException as error:
                error.add_note(f"raised while opening hook {_name(hook)}")
                raise
        if self._open_hooks is not None:
            self._open_hooks.append(hook)

    @staticmethod
    def _close_all(hooks: Sequence[Hook], failure: BaseException | None) -> None:
        """Close every hook whatever the others do; the first error is the one that is seen."""
        first = failure
        for hook in reversed(hooks):
            try:
                _close(hook, failure)
            except BaseException as error:  # raised below once the others are closed
                error.add_note(f"raised while closing hook {_name(hook)}")
                if first is None:
                    first = error
                else:
                    first.add_note(f"closing hook {_name(hook)} failed too: {error!r}")
        if failure is None and first is not None:
            raise first

    # ------------------------------------------------------------------ description
    def describe_hooks(self) -> str:
        """Table of what fires where: stage, order, hook, frequency.

        Returns
        -------
        str
            One line per hook and stage, stages in their own order.
        """
        rows = [("stage", "order", "hook", "frequency")]
        for stage in self._all_stages():
            entry = self._table[stage]
            for order, hook in enumerate(entry.hooks if entry is not None else (), start=1):
                frequency = "-" if stage in self._unscheduled_stages else str(hook.frequency)
                rows.append((stage.name, str(order), _name(hook), frequency))
        if len(rows) == 1:
            return "no hooks"
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def _hooks_summary(self) -> str:
        """Registered hooks in a few words, for ``repr``."""
        return "[" + ", ".join(_name(hook) for hook in self._hooks) + "]"


def _name(hook: object) -> str:
    return type(hook).__name__


def _claims(hook: Hook, stage: Enum) -> bool:
    if isinstance(hook, MultiStageHook):
        return hook._runs_on_stage(stage)
    return hook.stage is stage


def _close(hook: Hook, failure: BaseException | None) -> None:
    if isinstance(hook, AbstractContextManager):
        hook.__exit__(
            type(failure) if failure is not None else None,
            failure,
            failure.__traceback__ if failure else None,
        )
    elif isinstance(hook, ClosableHook):
        hook.close()
