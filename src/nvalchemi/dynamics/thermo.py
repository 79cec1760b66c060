"""Kinetic energy, temperature, pressure and what counts as a degree of freedom: the one rule for all of the package.

**Degrees of freedom.** Each free atom has three. Three fewer count when the total momentum is conserved
*and* taken to be zero: with energy-conserving dynamics (``momentum_conserved=True``, the default), and only
where no atom is held, because a held atom takes up momentum. A stochastic thermostat such as Langevin
exchanges momentum with its bath, and all 3N count: pass ``momentum_conserved=False``, as engines do whose
``conserves_momentum`` is False. A single atom with its momentum removed has no degree of freedom and
temperature 0.

**Fixed atoms** are those of category :data:`nvalchemi.data.FIXED` in ``atom_categories`` and those that a
:class:`~nvalchemi.dynamics.hooks.FreezeAtomsHook` has marked in ``frozen_atoms``. They do not move, carry no
kinetic energy, and count neither in the temperature nor in the largest force.
"""

import torch

from nvalchemi import units
from nvalchemi.data import FIXED, Batch, Field, register_field
from nvalchemi.dynamics.segments import max_per_graph, sum_per_graph
from nvalchemi.typing import Bool, Float, Tensor

FROZEN_ATOMS = register_field(
    Field("frozen_atoms", "node", (), "bool", "", "held for this run by a hook", neutral=0, persistent=False)
)


def free_atom_mask(batch: Batch) -> Bool[Tensor, " N"] | None:
    """Atoms that may move; ``None`` when the batch has neither categories nor frozen atoms, so that all may."""
    categories: Tensor | None = batch.get("atom_categories")
    frozen: Tensor | None = batch.get(FROZEN_ATOMS.name)
    free = None if categories is None else categories != FIXED
    if frozen is None:
        return free
    return ~frozen if free is None else free & ~frozen


def kinetic_energy(batch: Batch) -> Float[Tensor, " B"]:
    """Kinetic energy of each graph, Σ m v² / 2 over its free atoms, eV, summed in float64."""
    # A sum over the last dimension takes four times as long, to the same bits.
    x, y, z = batch.velocities.double().unbind(-1)
    twice = batch.atomic_masses.double() * (x * x + y * y + z * z)
    free = free_atom_mask(batch)
    return 0.5 * sum_per_graph(twice if free is None else torch.where(free, twice, 0.0), batch.batch_ptr)


def degrees_of_freedom(batch: Batch, momentum_conserved: bool = True) -> Float[Tensor, " B"]:
    """Number of degrees of freedom of each graph by the rule of this module.

    Parameters
    ----------
    batch : Batch
        The structures.
    momentum_conserved : bool, default True
        Whether the total momentum is fixed at zero (see the module's docstring).
    """
    free = free_atom_mask(batch)
    atoms = batch.num_nodes_per_graph.double()
    if free is None:
        return (3 * atoms - (3 if momentum_conserved else 0)).clamp(min=0)
    moving = sum_per_graph(free.double(), batch.batch_ptr)
    return torch.where((moving == atoms) & momentum_conserved, 3 * moving - 3, 3 * moving).clamp(min=0)


def temperature(
    batch: Batch, momentum_conserved: bool = True, kinetic: Float[Tensor, " B"] | None = None
) -> Float[Tensor, " B"]:
    """Temperature of each graph from its kinetic energy, K; 0 where there is no degree of freedom.

    Parameters
    ----------
    batch : Batch
        With ``velocities`` and ``atomic_masses``.
    momentum_conserved : bool, default True
        As in :func:`degrees_of_freedom`.
    kinetic : Tensor, [B], optional
        The kinetic energy, where it is known already.
    """
    dof = degrees_of_freedom(batch, momentum_conserved)
    kinetic = kinetic_energy(batch) if kinetic is None else kinetic
    return torch.where(dof > 0, 2 * kinetic / (dof.clamp(min=1) * units.kB), 0.0)


def volume(batch: Batch) -> Float[Tensor, " B"]:
    """Volume of each graph's cell, Å³; NaN where it is not periodic along three axes."""
    if "cell" not in batch or "pbc" not in batch:
        return torch.full((batch.num_graphs,), torch.nan, dtype=torch.float64, device=batch.device)
    return torch.where(batch.pbc.all(-1), torch.linalg.det(batch.cell.double()).abs(), torch.nan)


def pressure(batch: Batch, kinetic: Float[Tensor, " B"] | None = None) -> Float[Tensor, " B"]:
    """Pressure of each graph, −tr σ / 3 plus the kinetic part 2K / 3V, eV/Å³; K is ``kinetic`` where that is given.

    NaN for graphs without a volume, and for all when the batch has no ``stress``.
    """
    box = volume(batch)
    if "stress" not in batch:
        return torch.full_like(box, torch.nan)
    virial_part = -batch.stress.double().diagonal(dim1=-2, dim2=-1).mean(-1)
    if "velocities" not in batch:
        return virial_part + 0.0 * box
    kinetic = kinetic_energy(batch) if kinetic is None else kinetic
    return virial_part + 2 * kinetic / (3 * box)


def max_force(batch: Batch) -> Float[Tensor, " B"]:
    """Norm of the largest force on a free atom of each graph, eV/Å; NaN if a force is NaN, 0 without free atoms."""
    norms = torch.linalg.vector_norm(batch.forces, dim=-1)
    free = free_atom_mask(batch)
    return max_per_graph(norms if free is None else torch.where(free, norms, 0.0), batch.batch_ptr)
