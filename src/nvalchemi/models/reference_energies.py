"""Energies of the elements from labelled structures: what a network need not learn."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from nvalchemi.data import AtomicData, Batch
from nvalchemi.typing import Int

__all__ = ["ReferenceEnergies", "fit_reference_energies"]

SMALLEST_SCALE = 1e-6
"""eV; what reference energies explain to less than this leaves rounding errors and not a scale."""


class ReferenceEnergies(NamedTuple):
    """Result of :func:`fit_reference_energies`."""

    energies: dict[int, float]
    """Energy by atomic number, eV."""
    scale: float
    """Typical size of what is left, eV or eV/Å."""


def fit_reference_energies(dataset: Iterable[AtomicData | Batch]) -> ReferenceEnergies:
    """Energy of each element by least squares.

    Minimises ``Σ_structures (E − Σ_i E_ref(Z_i))²``. Where the compositions leave it undetermined (a single
    molecule), the solution of least norm is taken.

    Parameters
    ----------
    dataset : iterable of AtomicData or Batch
        Gone through once. Structures without ``energy``, or with one that is NaN, are passed over.

    Returns
    -------
    ReferenceEnergies
        The energies, and as scale the root mean square of the force components, or of the remaining energies per atom
        where there are no forces.

    Raises
    ------
    ValueError
        No structure has an energy.

    Examples
    --------
    >>> atoms = [
    ...     AtomicData(positions=torch.zeros(n, 3), atomic_numbers=[18] * n, energy=[[-2.0 * n]])
    ...     for n in (1, 3)
    ... ]
    >>> {z: round(energy, 6) for z, energy in fit_reference_energies(atoms).energies.items()}
    {18: -2.0}
    """
    compositions: list[Tensor] = []
    energies: list[Tensor] = []
    square_sum, num_components = 0.0, 0
    for data in dataset:
        if "energy" not in data:
            continue
        energy = data.energy.reshape(-1).to("cpu", torch.float64)
        compositions.append(composition(data)[energy.isfinite()])
        energies.append(energy[energy.isfinite()])
        if "forces" in data:
            forces = data.forces[data.forces.isfinite()].to(torch.float64)
            square_sum += float(forces.square().sum())
            num_components += forces.numel()
    if not sum(map(len, energies)):
        raise ValueError("the dataset has no energies: there is nothing to fit reference energies to")
    counts, energy = torch.cat(compositions), torch.cat(energies)
    present = counts.any(0).nonzero().squeeze(-1)
    matrix = counts[:, present].to(torch.float64)
    # gelsd: the one LAPACK driver that gives the least-norm solution of a matrix without full rank.
    fitted = torch.linalg.lstsq(matrix, energy.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    residuals = (energy - matrix @ fitted) / matrix.sum(1)
    scale = math.sqrt(square_sum / num_components if num_components else float(residuals.square().mean()))
    by_number = dict(zip(present.tolist(), fitted.tolist(), strict=True))
    return ReferenceEnergies(by_number, scale if scale > SMALLEST_SCALE else 1.0)


def composition(data: AtomicData | Batch) -> Int[Tensor, "B 119"]:
    """Number of atoms of each atomic number, 0 to 118, in each structure; int32 on the CPU."""
    num_graphs = data.num_graphs if isinstance(data, Batch) else 1
    key = data.atomic_numbers + 119 * data.batch_idx if isinstance(data, Batch) else data.atomic_numbers
    return torch.bincount(key.cpu(), minlength=num_graphs * 119).reshape(num_graphs, 119).to(torch.int32)
