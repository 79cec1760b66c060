"""The whole state of a strategy: taken as a snapshot, put back into another."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nvalchemi._tree import flatten
from nvalchemi.hooks import CheckpointableHook
from nvalchemi.training import _ranks
from nvalchemi.training.archive import Snapshot
from nvalchemi.training.hooks.update import PerRankHook, TrainingUpdateOrchestrator, numbered
from nvalchemi.training.rng import random_state

if TYPE_CHECKING:
    from nvalchemi.training.strategy import TrainingStrategy


def take_snapshot(strategy: "TrainingStrategy") -> Snapshot:
    """Copy everything that training depends on. All ranks of a distributed run take part."""
    weights: dict[str, Any] = {
        key: {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in model.state_dict().items()
        }
        for key, model in strategy.model_dict.items()
    }
    counters, hooks = strategy.counters(), named_hooks(strategy)
    state, tensors = flatten(
        {
            "counters": counters,
            "optimizers": [optimizer.state_dict() for optimizer in strategy.optimizers],
            "schedulers": [None if s is None else s.state_dict() for s in strategy.lr_schedulers],
            "hooks": {
                name: hook.state_dict() for name, hook in hooks.items() if not isinstance(hook, PerRankHook)
            },
            "last_validation": strategy.last_validation,
            "stop_reason": strategy.stop_reason,
            "ranks": _ranks.gather(
                {
                    "random": random_state(),
                    "position": strategy.position.state_dict(),
                    "hooks": {
                        name: hook.state_dict()
                        for name, hook in hooks.items()
                        if isinstance(hook, PerRankHook)
                    },
                }
            ),
        }
    )
    try:
        spec = strategy.to_spec_dict()
    except (ValueError, TypeError):
        spec = None  # made of something without a name, such as a lambda; then it has to be given again at loading
    return Snapshot(counters, weights, state, tensors, spec)


def restore_snapshot(strategy: "TrainingStrategy", snapshot: Snapshot, *, strict: bool = True) -> None:
    """Put a snapshot into a strategy that is set up.

    Parameters
    ----------
    strategy : TrainingStrategy
        Made of the same models, optimizers and hooks.
    snapshot : Snapshot
        What to restore.
    strict : bool, default True
        Whether hooks with state must be the same as those saved; otherwise only those that are found again
        are restored.

    Raises
    ------
    ValueError
        Models, optimizers or hooks do not match.
    """
    state: Any = snapshot.tree()
    own: Mapping[str, Any] = state["ranks"][_ranks.rank() % len(state["ranks"])]
    saved_hooks: Mapping[str, Any] = {**state["hooks"], **own["hooks"]}
    hooks = named_hooks(strategy)
    _compare("models", set(snapshot.weights), set(strategy.model_dict))
    if len(state["optimizers"]) != len(strategy.optimizers):
        raise ValueError(
            f"the checkpoint has {len(state['optimizers'])} optimizers, the strategy {len(strategy.optimizers)}"
        )
    if strict:
        _compare("hooks with state", set(saved_hooks), set(hooks))
    for key, model in strategy.model_dict.items():
        model.load_state_dict(snapshot.weights[key])
    for optimizer, saved in zip(strategy.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(strategy.lr_schedulers, state["schedulers"], strict=True):
        if (scheduler is None) != (saved is None):
            raise ValueError("the checkpoint and the strategy differ in which optimizers have a scheduler")
        if scheduler is not None:
            scheduler.load_state_dict(saved)
    for name, hook in hooks.items():
        if name in saved_hooks:
            hook.load_state_dict(saved_hooks[name])
    strategy.set_counters(state["counters"])
    strategy.last_validation = state["last_validation"]
    strategy.stop_reason = state["stop_reason"]
    strategy.position.load_state_dict(own["position"])
    strategy.set_random_state_at_run(own["random"])


def named_hooks(strategy: "TrainingStrategy") -> dict[str, CheckpointableHook]:
    """Hooks with state by class and number, update hooks each by itself."""
    hooks: list[Any] = []
    for hook in strategy.hooks:
        hooks += hook.iter_hooks() if isinstance(hook, TrainingUpdateOrchestrator) else (hook,)
    return numbered(hooks)


def _compare(what: str, saved: set[str], present: set[str]) -> None:
    if saved != present:
        raise ValueError(f"the checkpoint has the {what} {sorted(saved)}, the strategy {sorted(present)}")
