"""Integrators of the equations of motion."""

from nvalchemi.dynamics.integrators.demo import DemoDynamics
from nvalchemi.dynamics.integrators.langevin import NVTLangevin
from nvalchemi.dynamics.integrators.nose_hoover import NVTNoseHoover
from nvalchemi.dynamics.integrators.npt import NPH, NPT
from nvalchemi.dynamics.integrators.nve import NVE

__all__ = ["NPH", "NPT", "NVE", "DemoDynamics", "NVTLangevin", "NVTNoseHoover"]
