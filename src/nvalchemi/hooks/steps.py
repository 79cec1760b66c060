"""Where one step of a workflow begins and ends."""

from enum import Enum
from functools import lru_cache

_KNOWN_BOUNDS = (("BEFORE_STEP", "AFTER_STEP"), ("BEFORE_BATCH", "AFTER_BATCH"))


@lru_cache
def step_bounds(stage_type: type[Enum]) -> tuple[Enum, Enum]:
    """First and last stage of a step: of dynamics, of training, or the first and last member of any other enum.

    >>> class Stage(Enum):
    ...     PROPOSE, ACCEPT = 0, 1
    >>> [stage.name for stage in step_bounds(Stage)]
    ['PROPOSE', 'ACCEPT']
    """
    members = {member.name: member for member in stage_type}
    for first, last in _KNOWN_BOUNDS:
        if first in members and last in members:
            return members[first], members[last]
    ordered = list(members.values())
    return ordered[0], ordered[-1]
