"""Turn structures so that their cell is an upper-triangular matrix."""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.dynamics.updates import assign
from nvalchemi.hooks import HookContext
from nvalchemi.typing import Bool, Float

_VECTORS = (
    "cell",
    "positions",
    "velocities",
    "momenta",
    "forces",
    "dipole",
    "shifts",
    "reference_cell",
    "neighbor_list_reference_cell",
    "neighbor_list_reference_positions",
    "neighbor_matrix_reference_cell",
    "neighbor_matrix_reference_positions",
    "fire_velocities",
    "lbfgs_history",
    "lbfgs_last",
)
"""Fields whose last dimension is a Cartesian vector: v becomes v Q."""

_TENSORS = (
    "stress",
    "virial",
    "log_deformation",
    "barostat_strain_rate",
    "fire_cell_velocities",
    "lbfgs_cell_history",
    "lbfgs_cell_last",
)
"""Fields that hold Cartesian tensors, as 3 × 3 or as 9 numbers: T becomes Qᵀ T Q."""


class AlignCellHook:
    """Rotate structures, cell and all, so that their cell becomes upper-triangular.

    Lattice vectors are the rows: c comes to lie along z, b in the y-z plane. With the cell h = U Qᵀ (RQ
    decomposition, Q a rotation) vectors v become v Q and tensors T become Qᵀ T Q, among them positions,
    velocities, forces, stress and what minimisers remember, so that the run goes on as it would have. Energies
    and scaled positions do not change, and neither does the neighbour list, whose shifts count lattice
    vectors.

    Parameters
    ----------
    frequency : int, default 1
        Every so many steps.
    stage : Enum, optional
        Default ``BEFORE_STEP``.
    vectors, tensors : sequence of str, optional
        Fields of your own that turn along: those that end in a Cartesian vector ``[…, 3]``, and those that
        end in a Cartesian tensor ``[…, 3, 3]`` or ``[…, 9]``.

    Notes
    -----
    The diagonal becomes positive. A left-handed cell stays left-handed, for a mirror image would be another
    molecule: its first diagonal element becomes negative. Left as they are, to the bit: cells that are
    upper-triangular already, structures without a cell of three independent vectors, and those that are not
    being advanced. What is given along fixed axes (a mask of the
    strain, an anisotropic pressure) does not turn.
    """

    default_stages = ("BEFORE_STEP",)
    order_role = "align"

    def __init__(
        self,
        frequency: int = 1,
        stage: Enum | None = None,
        *,
        vectors: Sequence[str] = (),
        tensors: Sequence[str] = (),
    ) -> None:
        self.frequency = frequency
        self.stage = stage
        self.vectors = (*_VECTORS, *vectors)
        self.tensors = (*_TENSORS, *tensors)
        self._aligned: tuple[Tensor | None, int, Tensor | None] = (None, -1, None)

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Align the active structures."""
        dynamics, batch = dynamics_context(self, ctx)
        if "cell" not in batch:
            return
        cell, active = batch.cell, dynamics.active_graph_mask
        known, version, mask = self._aligned
        if known is cell and version == cell._version and mask is active:
            return
        turned = _is_tilted(cell) if active is None else _is_tilted(cell) & active
        if bool(turned.any()):
            self._rotate(batch, turned)
        self._aligned = (cell, cell._version, active)

    def _rotate(self, batch: Batch, turned: Tensor) -> None:
        rotation = _aligning_rotation(batch.cell)
        for name in (*self.vectors, *self.tensors):
            if name not in batch:
                continue
            field: Tensor = batch[name]
            q, rows = rotation, turned
            if batch.level(name) != "system":
                graph = batch.batch_idx
                if batch.level(name) == "edge":
                    graph = graph[batch.neighbor_list[:, 0]]
                q, rows = rotation[graph], turned[graph]
            if name in self.tensors:
                matrices = field.double().unflatten(-1, (3, 3)) if field.shape[-1] == 9 else field.double()
                new = torch.einsum("xki,x...kl,xlj->x...ij", q, matrices, q).reshape(field.shape)
            else:
                new = torch.einsum("x...i,xij->x...j", field.double(), q)
            if name == "cell":
                new = new.triu()
            assign(field, new.to(field.dtype), rows.view(-1, *[1] * (field.ndim - 1)))


def _is_tilted(cell: Float[Tensor, "B 3 3"]) -> Bool[Tensor, " B"]:
    """Which cells are of three independent vectors and not upper-triangular."""
    below = cell.tril(-1).abs().amax((-2, -1)) > 0
    volume = torch.linalg.det(cell.double()).abs()
    edges = torch.linalg.vector_norm(cell.double(), dim=-1).prod(-1)
    return below & (volume > 1e-12 * edges)


def _aligning_rotation(cell: Float[Tensor, "B 3 3"]) -> Float[Tensor, "B 3 3"]:
    """Q with h Q upper-triangular and det Q = 1, float64."""
    # RQ by QR: with the rows in reverse order, (P h)ᵀ = q r gives h = (P rᵀ P)(P qᵀ).
    q, r = torch.linalg.qr(cell.double().flip(-2).mT)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q)
    rotation = (q * signs[:, None, :]).flip(-1)
    handedness = torch.where(torch.linalg.det(rotation) < 0, -1.0, 1.0)
    rotation[:, :, 0] *= handedness[:, None]
    return rotation
