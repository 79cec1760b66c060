"""Molecular dynamics and relaxation of many structures at once."""

from nvalchemi.dynamics.base import FAILED, BaseDynamics, ConvergenceHook, Criterion, DynamicsStage
from nvalchemi.dynamics.fused import FusedStage
from nvalchemi.dynamics.inflight import SizeAwareSampler
from nvalchemi.dynamics.integrators import NPH, NPT, NVE, DemoDynamics, NVTLangevin, NVTNoseHoover
from nvalchemi.dynamics.optimizers import (
    FIRE,
    FIRE2,
    LBFGS,
    AtomCoordinates,
    CellCoordinates,
    FIRE2VariableCell,
    FIREVariableCell,
    Minimiser,
)
from nvalchemi.dynamics.pipeline import DistributedPipeline, PipelineError
from nvalchemi.dynamics.velocities import initialize_velocities

__all__ = [
    "FAILED",
    "FIRE",
    "FIRE2",
    "LBFGS",
    "NPH",
    "NPT",
    "NVE",
    "AtomCoordinates",
    "BaseDynamics",
    "CellCoordinates",
    "ConvergenceHook",
    "Criterion",
    "DemoDynamics",
    "DistributedPipeline",
    "DynamicsStage",
    "FIRE2VariableCell",
    "FIREVariableCell",
    "FusedStage",
    "Minimiser",
    "NVTLangevin",
    "NVTNoseHoover",
    "PipelineError",
    "SizeAwareSampler",
    "initialize_velocities",
]
