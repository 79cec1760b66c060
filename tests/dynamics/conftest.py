"""Structures and models that the tests of the engine share."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models.base import BaseModelMixin, ModelConfig
from nvalchemi.models.derivatives import sum_per_graph
from nvalchemi.models.lj import LennardJonesModelWrapper


@pytest.fixture
def argon():
    """LJ argon of ``cases``: ε 0.0104 eV, σ 3.40 Å, cutoff 8.5 Å."""
    return LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)


@pytest.fixture
def crystal():
    """Function: a rattled fcc argon crystal as AtomicData, float64, with velocities."""

    def make(repeat=(1, 1, 1), a=5.4, seed=0, rattle=0.05, speed=0.0) -> AtomicData:
        atoms = bulk("Ar", "fcc", a, cubic=True).repeat(repeat)
        rng = np.random.default_rng(seed)
        atoms.positions += rng.normal(0, rattle, atoms.positions.shape)
        data = AtomicData.from_atoms(atoms, dtype=torch.float64)
        velocities = torch.as_tensor(
            rng.normal(0, speed, atoms.positions.shape) if speed else 0 * atoms.positions
        )
        data.add_node_property("velocities", velocities)
        return data

    return make


@pytest.fixture
def cluster():
    """Function: a random argon cluster without cell as AtomicData, float64."""

    def make(n=5, seed=0) -> AtomicData:
        rng = np.random.default_rng(seed)
        placed: list[np.ndarray] = []
        while len(placed) < n:
            x = rng.uniform(-4, 4, 3)
            if all(np.linalg.norm(x - y) > 3.2 for y in placed):
                placed.append(x)
        return AtomicData.from_atoms(Atoms(f"Ar{n}", positions=placed), dtype=torch.float64)

    return make


class HarmonicWell(nn.Module, BaseModelMixin):
    """k x²/2 for each atom on its own; counts the graphs it evaluates."""

    def __init__(self, k: float = 1.0) -> None:
        super().__init__()
        self.k = k
        self.model_config = ModelConfig(outputs={"energy", "forces"}, supports_pbc=True)
        self.graphs_seen: list[list[int]] = []

    def forward(self, data: Batch) -> dict[str, torch.Tensor]:
        """Energy and forces."""
        self.graphs_seen.append(data.system_id[:, 0].tolist() if "system_id" in data else [])
        x = data.positions
        energy = sum_per_graph(0.5 * self.k * x.square().sum(-1), data.batch_idx, data.num_graphs)
        return {"energy": energy.reshape(-1, 1), "forces": -self.k * x}


@pytest.fixture
def well():
    """Harmonic well with k = 1 eV/Å²."""
    return HarmonicWell()


@pytest.fixture
def atoms_in_wells():
    """Function: B graphs of ``size`` atoms of 39.95 amu around the origin."""

    def make(count=3, size=1, displacement=0.1, seed=0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return Batch.from_data_list(
            [
                AtomicData(
                    positions=displacement * torch.randn(size, 3, generator=generator, dtype=torch.float64),
                    atomic_numbers=torch.full((size,), 18),
                    atomic_masses=torch.full((size,), 39.95, dtype=torch.float64),
                )
                for _ in range(count)
            ]
        )

    return make
