"""Hooks for dynamics engines: logs, snapshots, checks, limits and constraints."""

from nvalchemi.dynamics.hooks.align_cell import AlignCellHook
from nvalchemi.dynamics.hooks.converged_snapshot import ConvergedSnapshotHook
from nvalchemi.dynamics.hooks.drift import EnergyDriftMonitorHook
from nvalchemi.dynamics.hooks.force_clamp import MaxForceClampHook
from nvalchemi.dynamics.hooks.freeze import FreezeAtomsHook
from nvalchemi.dynamics.hooks.initialize import InitializeVelocitiesHook
from nvalchemi.dynamics.hooks.logging import LoggingHook
from nvalchemi.dynamics.hooks.nan_detector import NaNDetectorHook
from nvalchemi.dynamics.hooks.safety import SafetyHook
from nvalchemi.dynamics.hooks.snapshot import SnapshotHook
from nvalchemi.hooks import StageTimingHook, TorchProfilerHook

__all__ = [
    "AlignCellHook",
    "ConvergedSnapshotHook",
    "EnergyDriftMonitorHook",
    "FreezeAtomsHook",
    "InitializeVelocitiesHook",
    "LoggingHook",
    "MaxForceClampHook",
    "NaNDetectorHook",
    "SafetyHook",
    "SnapshotHook",
    "StageTimingHook",
    "TorchProfilerHook",
]
