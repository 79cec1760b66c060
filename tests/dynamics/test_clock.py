"""Physical time over engines with different time steps, and over minimisers, which have none."""

import pytest
import torch
from ase.build import bulk

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import FIRE, NVE, ConvergenceHook, FusedStage
from nvalchemi.models.lj import LennardJonesModelWrapper


@pytest.fixture
def batch():
    crystals = [bulk("Ar", "fcc", a=5.3, cubic=True), bulk("Ar", "fcc", a=5.4, cubic=True).repeat((2, 1, 1))]
    for seed, atoms in enumerate(crystals):
        atoms.rattle(0.1, seed=seed)
    return Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64) for atoms in crystals])


@pytest.fixture
def model():
    return LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)


def test_steps_of_a_minimiser_take_no_time(batch, model):
    FIRE(model, dt=1.0).run(batch, n_steps=7)
    engine = NVE(model, dt=2.0)
    engine.run(batch, n_steps=3)
    assert engine.elapsed_time(batch).tolist() == [6.0, 6.0]
    assert batch.system_step.tolist() == [[10], [10]]


def test_time_goes_on_under_another_time_step(batch, model):
    NVE(model, dt=2.0).run(batch, n_steps=5)
    engine = NVE(model, dt=0.5)
    engine.run(batch, n_steps=4)
    engine.run(batch, n_steps=2)
    assert engine.elapsed_time(batch).tolist() == [13.0, 13.0]


def test_fused_stages_count_the_time_of_each_structure(batch, model):
    relax = FIRE(model, dt=1.0, convergence_hook=ConvergenceHook.from_fmax(0.01))
    first, second = NVE(model, dt=1.0, n_steps=4), NVE(model, dt=0.25, n_steps=8)
    stages = FusedStage([relax, first, second])
    stages.run(batch)
    assert stages.elapsed_time(batch).isnan().all()  # no engine owns them any more
    assert batch.clock_time.tolist() == [[6.0], [6.0]]
    assert batch.system_step[0] != batch.system_step[1]
