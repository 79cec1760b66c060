"""Hooks shared by every workflow: protocols, contexts, the registry, and hooks that work in any engine."""

from nvalchemi.hooks.bias import BiasedPotentialHook
from nvalchemi.hooks.context import DynamicsContext, HookContext, TrainContext, active_graphs
from nvalchemi.hooks.neighbor_list import NeighborListHook
from nvalchemi.hooks.order import HookOrderWarning
from nvalchemi.hooks.profiler import TorchProfilerHook
from nvalchemi.hooks.protocols import CheckpointableHook, Hook, ResumableHook
from nvalchemi.hooks.registry import HookRegistryMixin
from nvalchemi.hooks.reporting import (
    HTMLReporter,
    Reporter,
    ReportingOrchestrator,
    RichReporter,
    ScalarSnapshot,
    TensorBoardReporter,
    collect_scalars,
)
from nvalchemi.hooks.timing import StageTimingHook
from nvalchemi.hooks.wrap import WrapPeriodicHook

__all__ = [
    "BiasedPotentialHook",
    "CheckpointableHook",
    "DynamicsContext",
    "HTMLReporter",
    "Hook",
    "HookContext",
    "HookOrderWarning",
    "HookRegistryMixin",
    "NeighborListHook",
    "Reporter",
    "ReportingOrchestrator",
    "ResumableHook",
    "RichReporter",
    "ScalarSnapshot",
    "StageTimingHook",
    "TensorBoardReporter",
    "TorchProfilerHook",
    "TrainContext",
    "WrapPeriodicHook",
    "active_graphs",
    "collect_scalars",
]
