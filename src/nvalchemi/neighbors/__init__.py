"""Neighbour search for a whole batch, and the test that says when a list with a skin is out of date.

Everywhere here a pair (i, j, S) stands for the vector ``x_j + S · cell − x_i`` from atom i to an image of atom j; S
is a row of three integers, zero along axes that are not periodic, and refers to the positions as given, wrapped or
not.
"""

from nvalchemi.neighbors._failure import UnsearchableStructureError
from nvalchemi.neighbors.config import NeighborConfig, NeighborListFormat
from nvalchemi.neighbors.displacement import max_displacement_exceeds
from nvalchemi.neighbors.search import compute_neighbors, neighbor_list, neighbor_matrix

__all__ = [
    "NeighborConfig",
    "NeighborListFormat",
    "UnsearchableStructureError",
    "compute_neighbors",
    "max_displacement_exceeds",
    "neighbor_list",
    "neighbor_matrix",
]
