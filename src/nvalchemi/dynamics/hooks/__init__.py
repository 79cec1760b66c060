"""Hooks for dynamics engines: logs, snapshots, checks and limits."""

from nvalchemi.dynamics.hooks.drift import EnergyDriftMonitorHook
from nvalchemi.dynamics.hooks.force_clamp import MaxForceClampHook
from nvalchemi.dynamics.hooks.logging import LoggingHook
from nvalchemi.dynamics.hooks.nan_detector import NaNDetectorHook
from nvalchemi.dynamics.hooks.snapshot import SnapshotHook

__all__ = ["EnergyDriftMonitorHook", "LoggingHook", "MaxForceClampHook", "NaNDetectorHook", "SnapshotHook"]
