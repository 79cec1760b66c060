"""Molecular dynamics and relaxation of many structures at once."""

from nvalchemi.dynamics.base import FAILED, BaseDynamics, ConvergenceHook, Criterion, DynamicsStage
from nvalchemi.dynamics.integrators import NVE, DemoDynamics, NVTLangevin
from nvalchemi.dynamics.optimizers import FIRE, FIREVariableCell
from nvalchemi.dynamics.velocities import initialize_velocities

__all__ = [
    "FAILED",
    "FIRE",
    "NVE",
    "BaseDynamics",
    "ConvergenceHook",
    "Criterion",
    "DemoDynamics",
    "DynamicsStage",
    "FIREVariableCell",
    "NVTLangevin",
    "initialize_velocities",
]
