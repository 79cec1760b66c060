"""Langevin dynamics: the distributions it must sample, and paths that do not depend on the batch."""

import numpy as np
import pytest
import torch
from ase.build import bulk
from torch import nn

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVTLangevin
from nvalchemi.dynamics.thermo import temperature
from nvalchemi.models.base import BaseModelMixin, ModelConfig
from nvalchemi.models.derivatives import sum_per_graph
from nvalchemi.models.lj import LennardJonesModelWrapper


class Well(nn.Module, BaseModelMixin):
    """k x²/2, k = 1 eV/Å², for each atom."""

    def __init__(self):
        super().__init__()
        self.model_config = ModelConfig(outputs={"energy", "forces"}, supports_pbc=True)

    def forward(self, data):
        """Energy and forces."""
        energy = sum_per_graph(0.5 * data.positions.square().sum(-1), data.batch_idx, data.num_graphs)
        return {"energy": energy.reshape(-1, 1), "forces": -data.positions}


def _wells(*sizes, mass=39.95):
    return Batch.from_data_list(
        [
            AtomicData(
                positions=torch.zeros(n, 3, dtype=torch.float64),
                atomic_numbers=torch.full((n,), 18),
                atomic_masses=torch.full((n,), mass, dtype=torch.float64),
            )
            for n in sizes
        ]
    )


@pytest.mark.parametrize("dt", [0.5, 2.0])
def test_one_atom_in_a_harmonic_well_has_the_canonical_width(dt):
    # ⟨x²⟩ = kT/k = 0.025852 Å². The period of a hydrogen in this well is 64 fs; with friction 1/(20 fs) x²
    # forgets itself in about 20 fs. 3000 wells × 3 axes × 25 samples 40 fs apart: about 2e5 independent
    # ones, standard error sqrt(2/2e5) = 0.3 %. Demanded: 3 %.
    batch = _wells(*[1] * 3000, mass=1.008)
    engine = NVTLangevin(Well(), dt=dt, temperature=300.0, friction=0.05, random_seed=1)
    engine.run(batch, int(200 / dt))
    total = 0.0
    for _ in range(25):
        engine.run(batch, int(40 / dt))
        total += float(batch.positions.square().mean())
    assert total / 25 == pytest.approx(0.025852, rel=0.03)


@pytest.mark.parametrize("dt", [0.5, 2.0])
def test_velocities_in_the_well_are_canonical(dt):
    # BAOAB's kinetic energy has an error of order dt²: (ω dt)²/4 = 1 % at 2 fs for ω = 0.098/fs.
    # Statistical error 0.5 %.
    batch = _wells(*[1] * 3000, mass=1.008)
    engine = NVTLangevin(Well(), dt=dt, temperature=300.0, friction=0.05, random_seed=2)
    engine.run(batch, int(200 / dt))
    total = 0.0
    for _ in range(10):
        engine.run(batch, int(40 / dt))
        total += float(temperature(batch, momentum_conserved=False).mean())
    assert total / 10 == pytest.approx(300.0, rel=0.03)


@pytest.mark.slow
def test_three_systems_in_one_batch_have_their_own_mean_temperatures():
    # 20, 50 and 200 atoms at 100, 300 and 600 K, starting cold. Mean over 3.2 ps, in which the kinetic
    # energy forgets itself every 1/(2γ) = 5 fs: about 600 independent samples of 60 degrees of freedom for
    # the smallest, standard error sqrt(2/60/600) = 0.7 %.
    targets = torch.tensor([100.0, 300.0, 600.0])
    structures = []
    for seed, (n, repeat) in enumerate([(20, (5, 1, 1)), (50, (13, 1, 1)), (200, (5, 5, 2))]):
        atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat(repeat)[:n]
        atoms.rattle(0.05, seed=seed)
        structures.append(AtomicData.from_atoms(atoms, dtype=torch.float64))
    batch = Batch.from_data_list(structures)
    model = LennardJonesModelWrapper(0.0104, 3.40, 8.5, switch_width=1.0)
    engine = NVTLangevin(model, dt=4.0, temperature=targets, friction=0.1)
    engine.run(batch, 100)
    total = torch.zeros(3, dtype=torch.float64)
    for _ in range(800):
        engine.step(batch)
        total += temperature(batch, momentum_conserved=False)
    np.testing.assert_allclose(total / 800, targets, rtol=0.05)


def test_noise_has_no_momentum_bias():
    # Free particles: every component of the total momentum of a graph is normal with variance N m kT.
    batch = _wells(*[50] * 400)
    NVTLangevin(Well(), dt=2.0, temperature=300.0, friction=0.05).run(batch, 100)
    momentum = (39.95 * batch.velocities).reshape(400, 50, 3).sum(1)
    expected = 50 * 39.95 * units.kB * 300.0
    # 1200 numbers: standard error of the mean sqrt(expected/1200), of the variance 4 %.
    assert float(momentum.mean().abs()) < 4 * (expected / 1200) ** 0.5
    assert float(momentum.var()) == pytest.approx(expected, rel=0.16)


def test_path_is_the_same_to_the_bit_alone_in_a_batch_and_reordered():
    batch = _wells(3, 1, 4)
    batch.system_id = torch.tensor([[10], [20], [30]])
    reordered = batch[[2, 0, 1]]
    alone = batch[[1]]
    for b in (batch, reordered, alone):
        NVTLangevin(Well(), dt=1.0, temperature=300.0, friction=0.02).run(b, 50)
    for i, j in ((0, 1), (1, 2), (2, 0)):
        assert torch.equal(batch[i].positions, reordered[j].positions)
        assert torch.equal(batch[i].velocities, reordered[j].velocities)
    assert torch.equal(alone.positions, batch[1].positions)


def test_path_of_a_crystal_is_the_same_alone_and_in_a_batch():
    # The kernel sums the pairs of an atom in the order of its list, whose rebuilds in a batch follow the
    # fastest graph; so equal to round-off, which has no time to grow in 50 steps.
    crystals = []
    for seed in range(3):
        atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat(2)
        atoms.rattle(0.05, seed=seed)
        crystals.append(AtomicData.from_atoms(atoms, dtype=torch.float64))
    together = Batch.from_data_list(crystals)
    alone = together[[1]]
    together.system_id = torch.tensor([[0], [1], [2]])
    alone.system_id = torch.tensor([[1]])
    for b in (together, alone):
        NVTLangevin(LennardJonesModelWrapper(0.0104, 3.40, 8.5), dt=2.0, temperature=60.0, friction=0.01).run(
            b, 50
        )
    torch.testing.assert_close(together[1].positions, alone.positions, rtol=0, atol=1e-10)


def test_different_seeds_give_different_paths():
    batches = [_wells(5) for _ in range(2)]
    for seed, b in enumerate(batches):
        NVTLangevin(Well(), dt=1.0, temperature=300.0, friction=0.02, random_seed=seed).run(b, 5)
    assert not bool((batches[0].positions == batches[1].positions).any())


def test_without_friction_energy_is_conserved():
    batch = _wells(2)
    batch.positions[:] = 0.1
    NVTLangevin(Well(), dt=0.5, temperature=300.0, friction=0.0).run(batch, 200)
    total = batch.energy + 0.5 * 39.95 * batch.velocities.square().sum()
    assert float(total) == pytest.approx(0.03, rel=1e-4)
