"""Minimisers and the coordinates they work in."""

from nvalchemi.dynamics.optimizers.cell import CellCoordinates
from nvalchemi.dynamics.optimizers.coordinates import AtomCoordinates, Coordinates
from nvalchemi.dynamics.optimizers.fire import FIRE, FIREVariableCell

__all__ = ["FIRE", "AtomCoordinates", "CellCoordinates", "Coordinates", "FIREVariableCell"]
