"""Parameters of integrators: one number, one for each graph, or a schedule."""

import math
from collections.abc import Callable
from typing import SupportsFloat, cast

import numpy as np
import torch

from nvalchemi.data import Batch
from nvalchemi.typing import Float, Tensor

Schedule = Callable[[Tensor], float | Tensor]
"""Function from the steps each graph has made (``system_step``, int64 ``[B]``) to one number, or one per graph.

The steps are those of the graph, not of the engine: a ramp goes on where it was after a restart, and a
structure that enters later begins at its beginning.
"""


class GraphParameter:
    """A validated number, a tensor ``[B]`` with one number for each graph, or a schedule.

    Parameters
    ----------
    name : str
        Name and, in messages, subject of the errors.
    value : float or Tensor or Schedule
        The number, one per graph, or a function that gives them; its values are checked when it is called.
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
    >>> ramp = GraphParameter("temperature", lambda step: 100.0 + 2.0 * step)
    >>> ramp.is_schedule
    True
    """

    def __init__(self, name: str, value: object, *, minimum: float = 0.0, exclusive: bool = False) -> None:
        self.name = name
        self._minimum, self._exclusive = minimum, exclusive
        self.value: float | Tensor | Schedule = (
            cast(Schedule, value) if callable(value) else self._checked(value)
        )

    @property
    def is_schedule(self) -> bool:
        """Whether the value changes with the steps, so that it must be asked for at each of them."""
        return callable(self.value)

    def _checked(self, value: object) -> float | Tensor:
        """The value as a float or a float64 tensor ``[B]``, or a ``ValueError``."""
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, Tensor) and value.ndim > 0:
            if value.ndim != 1:
                raise ValueError(
                    f"{self.name} must be one number or a tensor of shape [B], got shape {list(value.shape)}"
                )
            checked: float | Tensor = value.detach().to(torch.float64)
            worst: list[float] = checked.tolist()
        else:
            if isinstance(value, bool) or not isinstance(value, SupportsFloat):
                raise ValueError(
                    f"{self.name} must be a number, a tensor with one for each graph, or a schedule, got {value!r}"
                )
            checked = float(value)
            worst = [checked]
        bound = f"> {self._minimum:g}" if self._exclusive else f"≥ {self._minimum:g}"
        for x in worst:
            if not math.isfinite(x) or x < self._minimum or (self._exclusive and x == self._minimum):
                raise ValueError(f"{self.name} must be finite and {bound}, got {x}")
        return checked

    def per_graph(self, batch: Batch) -> Float[Tensor, " B"]:
        """One float64 value for each graph of ``batch``; a schedule's for the steps each has made."""
        value = self.value
        if callable(value):
            value = self._checked(value(batch.system_step[:, 0]))
        if not isinstance(value, Tensor):
            return torch.full((batch.num_graphs,), value, dtype=torch.float64, device=batch.device)
        if value.shape[0] != batch.num_graphs:
            raise ValueError(
                f"{self.name} has {value.shape[0]} values for a batch of {batch.num_graphs} graphs"
            )
        if value.device != batch.device:
            value = value.to(batch.device)
            if not self.is_schedule:
                self.value = value  # once, as the host waits for it
        return value

    def per_atom(self, batch: Batch) -> Float[Tensor, "N 1"]:
        """One float64 value for each atom, as a column."""
        return self.per_graph(batch)[batch.batch_idx].unsqueeze(-1)

    def __repr__(self) -> str:
        if callable(self.value):
            return "schedule"
        return f"{self.value:g}" if not isinstance(self.value, Tensor) else f"{self.value.tolist()}"
