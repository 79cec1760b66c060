"""Minimisers and the coordinates they work in."""

from nvalchemi.dynamics.optimizers.cell import CellCoordinates
from nvalchemi.dynamics.optimizers.coordinates import AtomCoordinates, Coordinates
from nvalchemi.dynamics.optimizers.fire import FIRE, FIREVariableCell
from nvalchemi.dynamics.optimizers.fire2 import FIRE2, FIRE2VariableCell
from nvalchemi.dynamics.optimizers.lbfgs import LBFGS
from nvalchemi.dynamics.optimizers.minimiser import Minimiser

__all__ = [
    "FIRE",
    "FIRE2",
    "LBFGS",
    "AtomCoordinates",
    "CellCoordinates",
    "Coordinates",
    "FIRE2VariableCell",
    "FIREVariableCell",
    "Minimiser",
]
