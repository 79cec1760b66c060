"""Orders of registration that cannot be meant.

Hooks at one stage fire in the order they were registered. A hook that declares ``order_role`` (one of the
words below) is checked against those registered before it at the same stage; hooks without a role are never
questioned.

========= ==========================================================
role      hooks
========= ==========================================================
bias      adds to energies and forces
clamp     limits forces
check     looks for values that are not finite
record    writes what it sees to a log, a file or a screen
wrap      moves atoms back into the cell
align     turns structures
neighbors builds the neighbour list
========= ==========================================================
"""

import warnings
from collections.abc import Iterable

from nvalchemi.hooks.protocols import OrderedHook


class HookOrderWarning(UserWarning):
    """Two hooks at one stage are registered in an order that cannot be meant."""


_CLASHES: dict[tuple[str, str], str] = {
    ("clamp", "bias"): "the bias is added after the forces were limited",
    ("check", "bias"): "what the bias adds is never checked",
    ("record", "bias"): "what is recorded lacks the bias",
    ("record", "clamp"): "what is recorded is not what the integrator uses",
    ("record", "wrap"): "positions are recorded before they are wrapped",
    ("record", "align"): "structures are recorded before they are turned",
    ("neighbors", "wrap"): "atoms move after the neighbour list was built for them",
}
"""(role of the earlier hook, role of the later hook) → what goes wrong."""


def check_order(new: object, earlier: Iterable[object], stage_name: str) -> None:
    """Warn when ``new`` comes after a hook of ``earlier`` at the same stage although it must come before.

    Parameters
    ----------
    new : object
        Hook about to be registered.
    earlier : iterable of object
        Hooks that already fire at that stage.
    stage_name : str
        Name of the stage, for the message.

    Warns
    -----
    HookOrderWarning
        Names both hooks and the fix.
    """
    if not isinstance(new, OrderedHook):
        return
    for hook in earlier:
        problem = _CLASHES.get((hook.order_role, new.order_role)) if isinstance(hook, OrderedHook) else None
        if problem is not None:
            first, second = type(hook).__name__, type(new).__name__
            warnings.warn(
                f"{first} is registered before {second} at {stage_name}: {problem}. "
                f"Register {second} before {first}, or give one of them another stage.",
                HookOrderWarning,
                stacklevel=4,
            )
