"""Words for structures that cannot be searched."""

from collections.abc import Callable

import torch

from nvalchemi.typing import Bool, Float, Tensor

Describe = Callable[[int], str]


class UnsearchableStructureError(ValueError):
    """A structure that has no neighbour list.

    Attributes
    ----------
    graph : int
        Its number in the batch.
    """

    def __init__(self, message: str, graph: int) -> None:
        super().__init__(message)
        self.graph = graph


def degenerate_cell(
    cell: Float[Tensor, "3 3"], pbc: Bool[Tensor, "3"], graph: int, describe: Describe
) -> UnsearchableStructureError:
    """Error for periodic lattice vectors that are zero, parallel or coplanar."""
    volume = abs(float(torch.linalg.det(cell.detach().double())))
    periodic = ", ".join("T" if axis else "F" for axis in pbc.tolist())
    return UnsearchableStructureError(
        f"cell of {describe(graph)} is degenerate: volume {volume:g} Å³ with pbc ({periodic})", graph
    )


def bad_position(
    position: Float[Tensor, "3"], atom: int, graph: int, describe: Describe
) -> UnsearchableStructureError:
    """Error for an atom that is nowhere, or further from its cell than an integer can count."""
    where = ", ".join(f"{x:g}" for x in position.tolist())
    if bool(torch.isfinite(position).all()):
        problem = f"atom {atom} of {describe(graph)} is too many cells away from its own cell, at ({where}) Å"
    else:
        problem = f"position of atom {atom} of {describe(graph)} is not finite: ({where}) Å"
    return UnsearchableStructureError(problem, graph)
