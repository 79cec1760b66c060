"""Variable cell as a coordinate transform, for every minimiser."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nvalchemi.data import Batch, Field, register_field
from nvalchemi.dynamics.admission import require_periodic_cells
from nvalchemi.dynamics.optimizers.coordinates import Vector, forces_on_free_atoms, on_free_atoms

REFERENCE_CELL = register_field(
    Field(
        "reference_cell",
        "system",
        (3, 3),
        "float",
        "Å",
        "cell that deformations are counted from",
        neutral=0,
        persistent=False,
    )
)
LOG_DEFORMATION = register_field(
    Field(
        "log_deformation",
        "system",
        (3, 3),
        "float",
        "",
        "logarithm of the deformation gradient",
        neutral=0,
        persistent=False,
    )
)

_VOIGT = ((0, 5, 4), (5, 1, 3), (4, 3, 2))


class CellCoordinates:
    """Positions in the undeformed cell and the logarithm of its deformation: ASE's ``FrechetCellFilter``, batched.

    With the reference cell h₀ (rows are lattice vectors) and the deformation gradient F = exp(L)

    ============================== ===========================================================
    cell, positions                h = h₀ Fᵀ,  x = z Fᵀ
    coordinates                    z (atoms) and n L (cell), n the number of atoms
    force on z                     f F
    force on n L                   (1/n) D, with D = Dexp(Lᵀ)[ W F⁻ᵀ ] and W = −V (σ + P·1)
    ============================== ===========================================================

    Dexp(A)[E] is the Fréchet derivative of the matrix exponential (its adjoint is taken at Aᵀ), read from
    the exponential of the block matrix [[A, E], [0, A]] (Al-Mohy and Higham 2009, eq. 2.2). The stress is
    symmetrised first, so that a model whose stress is not quite symmetric does not rotate the cell. Steps
    in L keep the volume positive, and the factor n balances cell and atoms.

    Parameters
    ----------
    pressure : float, default 0.0
        Applied pressure P, eV/Å³ (``units.GPa`` converts).
    hydrostatic : bool, default False
        Let only the volume change, not the shape.
    constant_volume : bool, default False
        Let only the shape change, not the volume.
    mask : sequence of 6, or of 3 × 3, optional
        Components of the strain L that relax (1) or not (0); six in the order xx, yy, zz, yz, xz, xy.

    Raises
    ------
    ValueError
        A mask of another shape, options that leave nothing to relax, and, at admission, a graph whose cell
        is not periodic in three directions or has no volume.
    """

    needs = frozenset({"stress"})
    has_cell = True

    def __init__(
        self,
        pressure: float = 0.0,
        *,
        hydrostatic: bool = False,
        constant_volume: bool = False,
        mask: Sequence[float] | Sequence[Sequence[float]] | Tensor | None = None,
    ) -> None:
        if not abs(pressure) < float("inf"):
            raise ValueError(f"pressure must be finite, got {pressure}")
        if hydrostatic and constant_volume:
            raise ValueError("hydrostatic=True and constant_volume=True together leave nothing to relax")
        self.pressure = float(pressure)
        self.hydrostatic = hydrostatic
        self.constant_volume = constant_volume
        self.mask = None if mask is None else _full_mask(mask)

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Take the present cell as the reference of graphs that entered, or whose cell was changed from outside."""
        require_periodic_cells(batch, "a variable cell")
        if REFERENCE_CELL.name not in batch or LOG_DEFORMATION.name not in batch:
            batch.reference_cell = batch.cell.clone()
            batch.log_deformation = torch.zeros_like(batch.cell)
            return
        expected = batch.reference_cell @ _exponential(batch.log_deformation).transpose(-1, -2)
        moved = (expected - batch.cell).abs().amax((-2, -1)) > 1e-5 * batch.cell.abs().amax((-2, -1))
        anew = (admitted | moved)[:, None, None]
        torch.where(anew, batch.cell, batch.reference_cell, out=batch.reference_cell)
        torch.where(anew, torch.zeros_like(batch.cell), batch.log_deformation, out=batch.log_deformation)

    def forces(self, batch: Batch) -> Vector:
        """Generalised forces: f F on the atoms, D / n on the cell."""
        deformation = _exponential(batch.log_deformation)
        atoms = (forces_on_free_atoms(batch).unsqueeze(-2) @ deformation[batch.batch_idx]).squeeze(-2)
        eye = torch.eye(3, dtype=batch.dtype, device=batch.device)
        stress = 0.5 * (batch.stress + batch.stress.transpose(-1, -2)) + self.pressure * eye
        virial = -torch.linalg.det(batch.cell).abs()[:, None, None] * stress
        if self.hydrostatic:
            virial = _trace(virial) / 3 * eye
        inverse = _exponential(-batch.log_deformation)
        force = _frechet(batch.log_deformation.transpose(-1, -2), virial @ inverse.transpose(-1, -2))
        if self.mask is not None:
            # On L itself, not on the virial: components that are held stay zero and do not depend on the path.
            force = force * self.mask.to(force)
        if self.constant_volume:
            force = force - _trace(force) / 3 * eye
        return Vector(atoms, force / _balance(batch))

    def displace(self, batch: Batch, step: Vector, active: Tensor | None) -> None:
        """Move z and n L by the step; then cell and positions from them."""
        if step.cell is None:
            raise ValueError("a step of CellCoordinates needs a cell part")
        graph = batch.batch_idx
        log = batch.log_deformation + step.cell / _balance(batch)
        inverse = _exponential(-batch.log_deformation).transpose(-1, -2)
        new = _exponential(log).transpose(-1, -2)
        z = (batch.positions.unsqueeze(-2) @ inverse[graph]).squeeze(-2)
        z = z + on_free_atoms(batch, step.atoms)
        positions = (z.unsqueeze(-2) @ new[graph]).squeeze(-2)
        changes = (
            (batch.log_deformation, log),
            (batch.cell, batch.reference_cell @ new),
            (batch.positions, positions),
        )
        for target, value in changes:
            if active is None:
                target.copy_(value)
            else:
                rows = active[:, None, None] if target.ndim == 3 else active[graph].unsqueeze(-1)
                torch.where(rows, value, target, out=target)


def _balance(batch: Batch) -> Tensor:
    """The factor n between L and the coordinates of the cell, [B, 1, 1]; 1 where there are no atoms."""
    return batch.num_nodes_per_graph.clamp(min=1)[:, None, None]


def _trace(matrices: Tensor) -> Tensor:
    """Traces, [B, 1, 1]."""
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]


def _exponential(matrices: Tensor) -> Tensor:
    """Matrix exponentials, [B, n, n], to the bit the same for every B: torch rounds one matrix differently."""
    one_more = torch.cat([matrices, torch.zeros_like(matrices[:1])])
    return torch.matrix_exp(one_more)[:-1]


def _frechet(a: Tensor, direction: Tensor) -> Tensor:
    """Fréchet derivative of the matrix exponential at ``a`` in a direction, both [B, 3, 3]."""
    block = a.new_zeros(a.shape[0], 6, 6)
    block[:, :3, :3] = a
    block[:, 3:, 3:] = a
    block[:, :3, 3:] = direction
    return _exponential(block)[:, :3, 3:]


def _full_mask(mask: Sequence[float] | Sequence[Sequence[float]] | Tensor) -> Tensor:
    full = torch.as_tensor(mask, dtype=torch.float64)
    if full.shape == (6,):
        full = full[torch.tensor(_VOIGT)]
    if full.shape != (3, 3):
        raise ValueError(f"mask of the strain must have 6 or 3 × 3 components, got shape {list(full.shape)}")
    return full
