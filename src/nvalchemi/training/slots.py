"""Stages at which a hook takes the place of what the strategy would do: at most one hook each."""

from collections.abc import Iterable
from enum import Enum
from typing import Any

from nvalchemi.hooks import Hook
from nvalchemi.hooks.protocols import MultiStageHook
from nvalchemi.training._stages import REPLACEMENT_SLOTS, TrainingStage


def claims(hook: Any, at: TrainingStage, stage: Enum | None = None) -> bool:
    """Whether a hook stands at a stage (``stage``: where it is about to be registered)."""
    if isinstance(hook, MultiStageHook):
        return hook._runs_on_stage(at)
    return isinstance(hook, Hook) and (hook.stage if stage is None else stage) is at


def check_slots(hook: Any, present: Iterable[Any], stage: Enum | None = None) -> None:
    """Refuse a second claim on a slot.

    Raises
    ------
    ValueError
        Another hook has claimed it (both are named), or the hook would not run at every step.
    """
    for slot in REPLACEMENT_SLOTS:
        if not claims(hook, slot, stage):
            continue
        for other in present:
            if claims(other, slot):
                raise ValueError(
                    f"{type(hook).__name__} cannot claim {slot.name}: {type(other).__name__} has claimed it already"
                )
        if hook.frequency != 1:
            raise ValueError(
                f"{type(hook).__name__} claims {slot.name} with frequency {hook.frequency}; "
                "what replaces a part of the loop must run at every step: frequency 1"
            )
