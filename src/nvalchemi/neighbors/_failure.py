"""Words for structures that cannot be searched."""

from collections.abc import Callable

import torch

from nvalchemi.typing import Bool, Float, Tensor

Describe = Callable[[int], str]


def degenerate_cell(cell: Float[Tensor, "3 3"], pbc: Bool[Tensor, "3"], graph: str) -> ValueError:
    """Error for periodic lattice vectors that are zero, parallel or coplanar."""
    volume = abs(float(torch.linalg.det(cell.detach().double())))
    periodic = ", ".join("T" if axis else "F" for axis in pbc.tolist())
    return ValueError(f"cell of {graph} is degenerate: volume {volume:g} Å³ with pbc ({periodic})")


def bad_position(position: Float[Tensor, "3"], atom: int, graph: str) -> ValueError:
    """Error for an atom that is nowhere, or further from its cell than an integer can count."""
    where = ", ".join(f"{x:g}" for x in position.tolist())
    if bool(torch.isfinite(position).all()):
        return ValueError(f"atom {atom} of {graph} is too many cells away from its own cell, at ({where}) Å")
    return ValueError(f"position of atom {atom} of {graph} is not finite: ({where}) Å")
