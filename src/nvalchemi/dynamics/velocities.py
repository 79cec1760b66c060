"""Velocities to start from."""

from typing import Any, overload

import torch
from torch import Tensor

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics.parameters import GraphParameter
from nvalchemi.dynamics.random import Stream, check_seed, standard_normals
from nvalchemi.dynamics.segments import sum_per_graph
from nvalchemi.dynamics.thermo import degrees_of_freedom, free_atom_mask, kinetic_energy

_LINEAR = 1e-6
"""Smallest moment of inertia, relative to the largest, of a molecule that is not linear."""


@overload
def initialize_velocities(
    batch: Batch,
    temperature: float | Tensor,
    *,
    random_seed: int = 42,
    remove_com: bool = True,
    remove_rotations: bool = False,
    rescale: bool = True,
) -> None: ...
@overload
def initialize_velocities(
    velocities: Tensor,
    masses: Tensor,
    temperature: float | Tensor,
    batch_idx: Tensor,
    random_seed: int = 42,
    *,
    remove_com: bool = True,
    rescale: bool = True,
) -> None: ...
def initialize_velocities(*args: Any, **kwargs: Any) -> None:
    """Draw velocities from the Maxwell–Boltzmann distribution, in place.

    Called as ``initialize_velocities(batch, temperature, *, …)``, or on plain tensors as
    ``initialize_velocities(velocities, masses, temperature, batch_idx, random_seed=42, …)``.

    Parameters
    ----------
    batch : Batch
        Gets (new) ``velocities``, sqrt(eV/amu).
    temperature : float or Tensor [B]
        K; ≥ 0.
    random_seed : int, default 42
        The velocities of a structure depend on the seed and its ``system_id`` (its place in the batch when
        it has none yet), not on the rest of the batch.
    remove_com : bool, default True
        Make the total momentum zero. Structures with fixed atoms are left out: they conserve none.
    remove_rotations : bool, default False
        Make the angular momentum of structures that are not periodic zero, too. Not for the tensor form,
        which knows no positions.
    rescale : bool, default True
        Scale to exactly the temperature asked for, counting 3N degrees of freedom, 3 fewer without momentum
        and 3 (linear molecule: 2) fewer without rotation. Without, the temperature fluctuates as in the
        canonical ensemble.

    velocities : Tensor [N, 3]
        Overwritten.
    masses : Tensor [N]
        amu.
    batch_idx : Tensor, int64 [N]
        Graph of each atom, ascending.

    Raises
    ------
    ValueError
        A temperature that is negative or not finite, or not one number per graph; a mass that is not finite and
        positive; ``batch_idx`` that is negative or not ascending, or tensors for different numbers of atoms.

    Examples
    --------
    >>> velocities = torch.empty(8, 3, dtype=torch.float64)
    >>> initialize_velocities(velocities, torch.full((8,), 39.95), 300.0, torch.zeros(8, dtype=torch.int64))
    >>> round(float(0.5 * 39.95 * velocities.square().sum() / (1.5 * 7 * units.kB)), 3)
    300.0
    """
    first = args[0] if args else kwargs.get("batch", kwargs.get("velocities"))
    if isinstance(first, Batch):
        _initialize_batch(*args, **kwargs)
    else:
        _initialize_tensors(*args, **kwargs)


def _initialize_tensors(
    velocities: Tensor,
    masses: Tensor,
    temperature: float | Tensor,
    batch_idx: Tensor,
    random_seed: int = 42,
    *,
    remove_com: bool = True,
    rescale: bool = True,
) -> None:
    atoms = velocities.shape[0]
    if masses.numel() != atoms or batch_idx.numel() != atoms:
        raise ValueError(
            f"velocities of {atoms} atoms need as many masses and batch_idx, "
            f"got {masses.numel()} and {batch_idx.numel()}"
        )
    if bool((batch_idx < 0).any()) or bool((batch_idx.diff() < 0).any()):
        raise ValueError("batch_idx must be ascending and not negative")
    sizes: list[int] = torch.bincount(batch_idx.reshape(-1)).tolist()
    graphs = [
        AtomicData(
            positions=torch.zeros_like(v),
            atomic_numbers=torch.zeros(len(v), dtype=torch.int64, device=v.device),
            atomic_masses=m.to(v.dtype),
            velocities=v,
        )
        for v, m in zip(velocities.detach().split(sizes), masses.reshape(-1).split(sizes), strict=True)
    ]
    batch = Batch.from_data_list(graphs)
    _initialize_batch(batch, temperature, random_seed=random_seed, remove_com=remove_com, rescale=rescale)
    with torch.no_grad():
        velocities.copy_(batch.velocities)


@torch.no_grad()
def _initialize_batch(
    batch: Batch,
    temperature: float | Tensor,
    *,
    random_seed: int = 42,
    remove_com: bool = True,
    remove_rotations: bool = False,
    rescale: bool = True,
) -> None:
    target = GraphParameter("temperature", temperature).per_graph(batch)
    ids = (
        batch.system_id[:, 0] if "system_id" in batch else torch.arange(batch.num_graphs, device=batch.device)
    )
    usable = batch.atomic_masses.isfinite() & (batch.atomic_masses > 0)
    if not bool(usable.all()):
        atom = int((~usable).nonzero()[0, 0])
        graph = int(batch.batch_idx[atom])
        raise ValueError(
            f"atomic_masses must be finite and positive: atom {atom - int(batch.batch_ptr[graph])} of "
            f"{batch.describe_graph(graph)} has {float(batch.atomic_masses[atom])}"
        )
    v = torch.empty(batch.num_nodes, 3, dtype=torch.float64, device=batch.device)
    standard_normals(
        ids, torch.zeros_like(ids), batch.batch_ptr, check_seed(random_seed), Stream.VELOCITIES, v
    )
    masses = batch.atomic_masses.double().unsqueeze(-1)
    v *= (units.kB * target[batch.batch_idx].unsqueeze(-1) / masses).sqrt()
    free = free_atom_mask(batch)
    held = torch.zeros(batch.num_graphs, dtype=torch.bool, device=batch.device)
    if free is not None:
        v[~free] = 0.0
        held = sum_per_graph((~free).double(), batch.batch_ptr) > 0
    lost = torch.zeros_like(target)
    if remove_com:
        mean = sum_per_graph(masses * v, batch.batch_ptr) / sum_per_graph(masses, batch.batch_ptr)
        v -= torch.where(held.unsqueeze(-1), 0.0, mean)[batch.batch_idx]
    if remove_rotations:
        lost = _remove_rotations(batch, v, masses, held)
    if "velocities" in batch:
        batch.velocities.copy_(v)
    else:
        batch.velocities = v.to(batch.dtype)
    if rescale:
        dof = (degrees_of_freedom(batch, momentum_conserved=remove_com) - lost).clamp(min=0)
        wanted, have = 0.5 * dof * units.kB * target, kinetic_energy(batch)
        scale = torch.where((wanted > 0) & (have > 0), wanted / have, 0.0).sqrt()
        batch.velocities.mul_(scale[batch.batch_idx].unsqueeze(-1))


def _remove_rotations(batch: Batch, v: Tensor, masses: Tensor, held: Tensor) -> Tensor:
    """Take the rigid rotation out of ``v`` where nothing is periodic or held; degrees of freedom lost, [B]."""
    ptr, graph = batch.batch_ptr, batch.batch_idx
    x = batch.positions.double()
    x = x - (sum_per_graph(masses * x, ptr) / sum_per_graph(masses, ptr))[graph]
    momentum = sum_per_graph(masses * torch.linalg.cross(x, v), ptr)
    eye = torch.eye(3, dtype=x.dtype, device=x.device)
    outer = x.unsqueeze(-1) * x.unsqueeze(-2)
    inertia = sum_per_graph(masses.unsqueeze(-1) * (x.square().sum(-1)[:, None, None] * eye - outer), ptr)
    moments, axes = torch.linalg.eigh(inertia)
    turns = moments > _LINEAR * moments[:, -1:].clamp(min=_LINEAR)
    turns &= ~held.unsqueeze(-1)
    if "pbc" in batch:
        turns &= ~batch.pbc.any(-1, keepdim=True)
    along = (axes.transpose(-1, -2) @ momentum.unsqueeze(-1)).squeeze(-1)
    rate = torch.where(turns, along / moments.clamp(min=1e-300), 0.0)
    omega = (axes @ rate.unsqueeze(-1)).squeeze(-1)
    v -= torch.linalg.cross(omega[graph], x)
    return turns.sum(-1).double()
