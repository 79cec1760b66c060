"""Parameters of integrators: one number, or one for each graph."""

import math

import torch

from nvalchemi.data import Batch
from nvalchemi.typing import Float, Tensor


class GraphParameter:
    """A validated number, or a tensor ``[B]`` with one number for each graph.

    Parameters
    ----------
    name : str
        Name and, in messages, subject of the errors.
    value : float or Tensor
        The number, or one per graph.
    minimum : float, default 0.0
        Smallest value allowed.
    exclusive : bool, default False
        Whether ``minimum`` itself is refused.

    Raises
    ------
    ValueError
        A value that is not finite or too small; a tensor that is not of shape ``[B]``.

    Examples
    --------
    >>> GraphParameter("dt", 2.0, exclusive=True).value
    2.0
    """

    def __init__(
        self, name: str, value: float | Tensor, *, minimum: float = 0.0, exclusive: bool = False
    ) -> None:
        self.name = name
        if isinstance(value, Tensor) and value.ndim > 0:
            if value.ndim != 1:
                raise ValueError(
                    f"{name} must be one number or a tensor of shape [B], got shape {list(value.shape)}"
                )
            self.value: float | Tensor = value.detach().to(torch.float64)
            worst = [float(x) for x in self.value]
        else:
            self.value = float(value)
            worst = [self.value]
        bound = f"> {minimum:g}" if exclusive else f"≥ {minimum:g}"
        for x in worst:
            if not math.isfinite(x) or x < minimum or (exclusive and x == minimum):
                raise ValueError(f"{name} must be finite and {bound}, got {x}")

    def per_graph(self, batch: Batch) -> Float[Tensor, " B"]:
        """One float64 value for each graph of ``batch``."""
        if not isinstance(self.value, Tensor):
            return torch.full((batch.num_graphs,), self.value, dtype=torch.float64, device=batch.device)
        if self.value.shape[0] != batch.num_graphs:
            raise ValueError(
                f"{self.name} has {self.value.shape[0]} values for a batch of {batch.num_graphs} graphs"
            )
        return self.value.to(batch.device)

    def per_atom(self, batch: Batch) -> Float[Tensor, "N 1"]:
        """One float64 value for each atom, as a column."""
        return self.per_graph(batch)[batch.batch_idx].unsqueeze(-1)

    def __repr__(self) -> str:
        return f"{self.value:g}" if not isinstance(self.value, Tensor) else f"{self.value.tolist()}"
