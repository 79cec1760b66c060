"""Constant-energy dynamics against ASE and against what velocity Verlet promises."""

import numpy as np
import pytest
import torch
from ase import units as ase_units
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.md.verlet import VelocityVerlet

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE, DemoDynamics
from nvalchemi.dynamics.thermo import kinetic_energy
from nvalchemi.models.lj import LennardJonesModelWrapper


def _argon(repeat=(3, 3, 3), seed=0, speed=0.02):
    atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat(repeat)
    rng = np.random.default_rng(seed)
    atoms.positions += rng.normal(0, 0.05, atoms.positions.shape)
    velocities = rng.normal(0, speed, atoms.positions.shape)
    atoms.set_velocities(velocities - velocities.mean(0))
    return atoms


def _batch(*atoms):
    return Batch.from_data_list([AtomicData.from_atoms(a, dtype=torch.float64) for a in atoms])


def _model(**options):
    return LennardJonesModelWrapper(0.0104, 3.40, 8.5, **options)


def test_trajectory_is_that_of_ase_velocity_verlet():
    structures = [_argon((2, 2, 2), seed=0), _argon((2, 1, 1), seed=1)]
    batch = _batch(*structures)
    NVE(_model(), dt=2.0).run(batch, 20)
    for i, atoms in enumerate(structures):
        atoms.calc = LennardJones(epsilon=0.0104, sigma=3.40, rc=8.5)
        VelocityVerlet(atoms, 2.0 * ase_units.fs).run(20)
        np.testing.assert_allclose(batch[i].positions.numpy(), atoms.positions, rtol=0, atol=1e-7)
        np.testing.assert_allclose(batch[i].velocities.numpy(), atoms.get_velocities(), rtol=0, atol=1e-7)


def test_demo_dynamics_is_velocity_verlet_too():
    one, two = _batch(_argon()), _batch(_argon())
    NVE(_model(), dt=2.0).run(one, 20)
    DemoDynamics(_model(), 20, dt=2.0).run(two)
    torch.testing.assert_close(one.positions, two.positions, rtol=0, atol=1e-12)


def test_each_graph_has_its_own_time_step():
    structures = [_argon(seed=0), _argon((2, 3, 3), seed=1)]
    together = _batch(*structures)
    NVE(_model(), dt=torch.tensor([1.0, 3.0])).run(together, 20)
    for i, dt in enumerate((1.0, 3.0)):
        alone = _batch(structures[i])
        NVE(_model(), dt=dt).run(alone, 20)
        torch.testing.assert_close(together[i].positions, alone.positions, rtol=0, atol=1e-10)


def test_energy_error_falls_as_the_square_of_the_time_step():
    # A smooth cutoff, so that no jump at the cutoff hides the error of the integrator.
    errors = []
    for dt in (8.0, 4.0, 2.0):
        batch = _batch(_argon())
        engine = NVE(_model(switch_width=2.0), dt=dt)
        energies = []
        for _ in range(int(400 / dt)):
            engine.step(batch)
            energies.append(float(batch.energy + kinetic_energy(batch)))
        errors.append(np.std(energies))
    # Exactly 4 in the limit of small steps.
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4.0, rel=0.1)


def test_reversed_velocities_lead_back():
    start = _batch(_argon())
    batch = start.clone()
    engine = NVE(_model(), dt=4.0)
    engine.run(batch, 100)
    assert float((batch.positions - start.positions).abs().max()) > 0.5
    batch.velocities.neg_()
    engine.run(batch, 100)
    torch.testing.assert_close(batch.positions, start.positions, rtol=0, atol=1e-9)
    torch.testing.assert_close(-batch.velocities, start.velocities, rtol=0, atol=1e-9)


def test_momentum_is_conserved():
    batch = _batch(_argon())
    NVE(_model(), dt=4.0).run(batch, 200)
    momentum = (batch.atomic_masses.unsqueeze(1) * batch.velocities).sum(0)
    assert float(momentum.abs().max()) < 1e-11
