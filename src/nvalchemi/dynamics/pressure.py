"""Applied pressure of barostats: one number or tensor, one for each graph, or a schedule."""

from collections.abc import Callable
from typing import Literal, get_args

import torch

from nvalchemi.data import Batch
from nvalchemi.typing import Float, Tensor

PressureCoupling = Literal["isotropic", "anisotropic", "triclinic"]
"""What of a cell may change: its volume; its lengths along x, y and z; everything."""

_DIMENSIONS = {"isotropic": (1,), "anisotropic": (1, 2, 3), "triclinic": (1, 2, 3)}


class AppliedPressure:
    """Pressure (tensor) on each graph, eV/Å³; positive compresses.

    ============ ======================= =====================================================
    shape        allowed with            meaning
    ============ ======================= =====================================================
    a number     every coupling          the same hydrostatic pressure for all graphs
    ``[B]``      every coupling          hydrostatic, one per graph
    ``[B,3]``    anisotropic, triclinic  pressures along x, y and z
    ``[B,3,3]``  anisotropic, triclinic  symmetric tensor, −1 × the applied stress
    ============ ======================= =====================================================

    With anisotropic and triclinic coupling, ``[3]`` and ``[3,3]`` could mean one tensor for all or one row per
    graph, and are refused; ``[B,3,3]`` is never in doubt. With isotropic coupling three numbers are three graphs.

    Parameters
    ----------
    value : float or Tensor or callable
        As above; a callable gets the number of steps each graph has made (int64 ``[B]``) and returns one of them.
    coupling : {"isotropic", "anisotropic", "triclinic"}
        What of the cell may change.

    Raises
    ------
    ValueError
        Another coupling, a shape that is not in the table or could mean two things, a value that is not
        finite, a tensor that is not symmetric.

    Examples
    --------
    >>> AppliedPressure(torch.zeros(3, 3), "anisotropic")
    Traceback (most recent call last):
    ...
    ValueError: pressure of shape [3, 3] could be one tensor or one row for each of 3 graphs: ...
    """

    def __init__(
        self, value: float | Tensor | Callable[[Tensor], float | Tensor], coupling: PressureCoupling
    ) -> None:
        if coupling not in get_args(PressureCoupling):
            raise ValueError(
                f"pressure_coupling must be one of {get_args(PressureCoupling)}, got {coupling!r}"
            )
        self.coupling = coupling
        self.value: Tensor | Callable[[Tensor], float | Tensor] = (
            value if callable(value) else self._checked(value)
        )

    @property
    def is_hydrostatic(self) -> bool:
        """Whether the pressure is known to be the same in all directions."""
        return not callable(self.value) and self.value.ndim < 2

    def per_graph(self, batch: Batch) -> Float[Tensor, "B 3 3"]:
        """Pressure tensor of each graph, float64."""
        value = self._checked(self.value(batch.system_step[:, 0])) if callable(self.value) else self.value
        if value.ndim > 0 and value.shape[0] != batch.num_graphs:
            raise ValueError(f"pressure has {value.shape[0]} rows for a batch of {batch.num_graphs} graphs")
        if value.device != batch.device:
            value = value.to(batch.device)
            if not callable(self.value):
                self.value = value  # once, as the host waits for it
        if value.ndim == 3:
            return value
        rows = value if value.ndim == 2 else value.reshape(-1, 1)
        return torch.diag_embed(rows.expand(batch.num_graphs, 3))

    def _checked(self, value: float | Tensor) -> Tensor:
        """The value as a float64 tensor, or a ``ValueError``."""
        checked = torch.as_tensor(value, dtype=torch.float64).detach()
        shape = list(checked.shape)
        if not bool(checked.isfinite().all()):
            raise ValueError(f"pressure must be finite, got {checked.tolist()}")
        if self.coupling != "isotropic" and shape in ([3], [3, 3]):
            raise ValueError(
                f"pressure of shape {shape} could be one tensor or one row for each of 3 graphs: "
                "give a number or [B, 3, 3] (torch.diag_embed of rows x, y, z)"
            )
        if checked.ndim > 0 and (
            checked.ndim not in _DIMENSIONS[self.coupling] or shape[1:] != [3] * len(shape[1:])
        ):
            allowed = ", ".join(f"[{', '.join(['B', '3', '3'][:n])}]" for n in _DIMENSIONS[self.coupling])
            raise ValueError(
                f"pressure with {self.coupling} coupling must be a number or of shape {allowed}; got shape {shape}"
            )
        if checked.ndim == 3:
            acting = torch.diag_embed(checked.diagonal(dim1=-2, dim2=-1))
            if self.coupling == "triclinic":
                acting = checked.transpose(-1, -2)
            if not torch.allclose(checked, acting, rtol=0, atol=1e-12):
                kind = "symmetric" if self.coupling == "triclinic" else "diagonal with anisotropic coupling"
                raise ValueError(f"pressure tensors must be {kind}, got {checked.tolist()}")
        return checked

    def __repr__(self) -> str:
        return "schedule" if callable(self.value) else f"{self.value.tolist()}"
