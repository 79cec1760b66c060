"""When a neighbour list with a skin has to be made again."""

import torch

from nvalchemi import _kernels
from nvalchemi.typing import Bool, Float, Tensor

__all__ = ["max_displacement_exceeds"]


def max_displacement_exceeds(
    positions: Float[Tensor, "N 3"], reference_positions: Float[Tensor, "N 3"], limit: float
) -> bool | Bool[Tensor, ""]:
    """Whether any atom is further than ``limit`` from where it was.

    A list made with a skin is complete while no atom has moved by more than half the skin since it was made.

    Parameters
    ----------
    positions, reference_positions : Tensor, shape [N, 3]
        Positions now and then, Å.
    limit : float
        Distance, Å.

    Returns
    -------
    bool or Tensor
        A ``bool`` from the compiled kernel on the CPU. Elsewhere a 0-dimensional tensor, so that the caller decides
        when to wait for it.
        A position that is not a number has moved.

    Examples
    --------
    >>> x = torch.zeros(2, 3)
    >>> max_displacement_exceeds(x, x + 0.1, limit=0.2)
    False
    """
    if _kernels.serve(positions):
        from nvalchemi._kernels.neighbors import displacement_exceeds

        return displacement_exceeds(
            positions.detach().numpy(), reference_positions.detach().numpy(), limit * limit
        )
    return ~(torch.sum((positions - reference_positions) ** 2, dim=-1) <= limit * limit).all()
