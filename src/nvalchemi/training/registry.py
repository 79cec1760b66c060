"""Hooks of a strategy: update hooks are joined in one orchestrator, replacement slots have one claimant."""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, ClassVar

from nvalchemi.data import Batch
from nvalchemi.hooks import Hook, HookRegistryMixin
from nvalchemi.training._stages import REPLACEMENT_SLOTS, UPDATE_STAGES, TrainingStage
from nvalchemi.training.hooks.update import TrainingUpdateHook, TrainingUpdateOrchestrator
from nvalchemi.training.slots import check_slots, claims


def as_hooks(hooks: Any) -> list[Any]:
    """Hooks as a list; a single one may stand for a list of it.

    Raises
    ------
    TypeError
        Neither a hook nor a sequence.
    """
    if hooks is None:
        return []
    # A pydantic hook is iterable itself: over its fields.
    if isinstance(hooks, TrainingUpdateHook | TrainingUpdateOrchestrator | Hook):
        return [hooks]
    if isinstance(hooks, str | type) or not isinstance(hooks, Iterable):
        raise TypeError(f"hooks must be a list of hooks, got {hooks!r}")
    return list(hooks)


class UpdateHookRegistry(HookRegistryMixin):
    """A hook registry that knows update hooks. The host builds a :class:`~nvalchemi.hooks.TrainContext`."""

    _stage_type: ClassVar[type[Enum] | tuple[type[Enum], ...]] = TrainingStage

    # Immutable, so that class attributes are a safe start for every instance.
    _is_set_up: bool = False
    _update: TrainingUpdateOrchestrator | None = None
    _update_given: bool = False
    _unclaimed: frozenset[TrainingStage] = UPDATE_STAGES
    _tolerates_nonfinite: bool = False

    def register_hook(self, hook: Any, stage: Enum | None = None) -> None:
        """Add a hook after those already registered; a bare update hook joins the other update hooks.

        Raises
        ------
        ValueError
            A second orchestrator, a second claim on ``DO_BACKWARD`` or ``DO_OPTIMIZER_STEP``, exclusive
            update hooks, an update hook that is there already or is given a stage; and what
            :meth:`nvalchemi.hooks.HookRegistryMixin.register_hook` raises.
        """
        if isinstance(hook, type):
            raise TypeError(f"{hook.__name__} is a class; register an object of it: {hook.__name__}(…)")
        if isinstance(hook, TrainingUpdateHook):
            self._check_update_hook(hook, stage)
        if isinstance(hook, TrainingUpdateHook) and self._update is not None:
            self._update.extend(hook)
        elif isinstance(hook, TrainingUpdateOrchestrator) and self._update is not None:
            self._take_over(hook, self._update)
        else:
            given = isinstance(hook, TrainingUpdateOrchestrator)
            new: Any = TrainingUpdateOrchestrator(hook) if isinstance(hook, TrainingUpdateHook) else hook
            check_slots(new, self._hooks, stage)
            super().register_hook(new, stage)
            if isinstance(new, TrainingUpdateOrchestrator):
                self._update, self._update_given = new, given
        self._note_claims()
        if self._is_set_up:
            self._call_at_setup(hook)

    def remove_hook(self, hook: Any) -> None:
        """Remove a hook; the orchestrator with all its members."""
        super().remove_hook(hook)
        if hook is self._update:
            self._update, self._update_given = None, False
        self._note_claims()

    def update_hooks(self) -> Iterator[TrainingUpdateHook]:
        """Update hooks in the order in which they are called."""
        return iter(()) if self._update is None else self._update.iter_hooks()

    def _call_hooks_of_every_batch(self, stage: Enum, batch: Batch | None) -> None:
        """Call the hooks of ``stage`` that do not wait for a certain step, after a batch that made none."""
        entry = self._table[stage]
        hooks = () if entry is None else tuple(hook for hook in entry.hooks if hook.frequency == 1)
        if hooks:
            self._dispatch(hooks, stage, batch)

    def _check_update_hook(self, hook: TrainingUpdateHook, stage: Enum | None) -> None:
        if any(hook is other for other in self.update_hooks()):
            raise ValueError(f"{type(hook).__name__} is registered already with this {type(self).__name__}")
        if stage is not None:
            raise ValueError(
                f"{type(hook).__name__} is an update hook, which has stages of its own: give no stage"
            )

    def _take_over(self, given: TrainingUpdateOrchestrator, present: TrainingUpdateOrchestrator) -> None:
        """Have an orchestrator of the user's take the place of the one made for bare hooks, with those hooks."""
        if self._update_given:
            raise ValueError(
                f"{given!r} cannot be registered beside {present!r}: compose them with + into one orchestrator"
            )
        given.extend(present)
        old: Any = present
        new: Any = given
        self._set_hooks(tuple(new if each is old else each for each in self._hooks))
        self._update, self._update_given = given, True

    def _note_claims(self) -> None:
        claimed = {slot for slot in REPLACEMENT_SLOTS if any(claims(hook, slot) for hook in self._hooks)}
        self._unclaimed = frozenset() if self._update is not None else UPDATE_STAGES - claimed
        self._tolerates_nonfinite = any(hook.tolerates_nonfinite_loss for hook in self.update_hooks())

    def _call_at_setup(self, hook: Any) -> None:
        ctx: Any = self._build_context(None)
        if isinstance(hook, TrainingUpdateHook):
            hook(ctx, TrainingStage.SETUP, False)
        elif isinstance(hook, TrainingUpdateOrchestrator) or claims(hook, TrainingStage.SETUP):
            hook(ctx, TrainingStage.SETUP)
