"""Integrators of the equations of motion."""

from nvalchemi.dynamics.integrators.demo import DemoDynamics
from nvalchemi.dynamics.integrators.langevin import NVTLangevin
from nvalchemi.dynamics.integrators.nve import NVE

__all__ = ["NVE", "DemoDynamics", "NVTLangevin"]
