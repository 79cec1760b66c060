"""Temperature, pressure, degrees of freedom."""

import numpy as np
import pytest
import torch
from ase.build import bulk

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import initialize_velocities
from nvalchemi.dynamics.thermo import (
    degrees_of_freedom,
    kinetic_energy,
    max_force,
    pressure,
    temperature,
    volume,
)


def _two_atoms(**fields):
    return AtomicData(
        positions=torch.zeros(2, 3, dtype=torch.float64),
        atomic_numbers=torch.tensor([1, 1]),
        atomic_masses=torch.ones(2, dtype=torch.float64),
        velocities=torch.tensor([[0.1**0.5, 0, 0], [-(0.1**0.5), 0, 0]], dtype=torch.float64),
        **fields,
    )


def test_the_case_of_two_atoms_with_a_tenth_of_an_electronvolt():
    batch = Batch.from_data_list([_two_atoms()])
    assert float(kinetic_energy(batch)) == pytest.approx(0.1)
    assert float(temperature(batch, momentum_conserved=False)) == pytest.approx(386.8, abs=0.1)
    assert float(temperature(batch, momentum_conserved=True)) == pytest.approx(773.6, abs=0.1)


def test_single_atom_without_momentum_has_temperature_zero_not_nan(atoms_in_wells):
    batch = atoms_in_wells(count=1)
    initialize_velocities(batch, 300.0)
    assert batch.velocities.tolist() == [[0.0, 0.0, 0.0]]
    assert degrees_of_freedom(batch).tolist() == [0.0]
    assert temperature(batch).tolist() == [0.0]


def test_fixed_atoms_count_for_nothing_and_take_up_momentum():
    batch = Batch.from_data_list(
        [_two_atoms(atom_categories=torch.tensor([1, 0])), _two_atoms(atom_categories=torch.tensor([0, 0]))]
    )
    assert degrees_of_freedom(batch).tolist() == [3.0, 3.0]
    assert degrees_of_freedom(batch, momentum_conserved=False).tolist() == [3.0, 6.0]
    assert kinetic_energy(batch).tolist() == pytest.approx([0.05, 0.1])
    batch.forces = torch.tensor([[3.0, 0, 0], [0, 1.0, 0]] * 2, dtype=torch.float64)
    assert max_force(batch).tolist() == [1.0, 3.0]


def test_pressure_and_volume_are_those_of_ase_and_nan_for_a_molecule():
    atoms = bulk("Ar", "fcc", 5.0, cubic=True)
    atoms.set_velocities(np.random.default_rng(0).normal(0, 0.02, (4, 3)))
    from ase.calculators.singlepoint import SinglePointCalculator

    stress = np.array([0.01, 0.02, 0.03, 0.004, 0.005, 0.006])
    atoms.calc = SinglePointCalculator(atoms, stress=stress, energy=0.0, forces=np.zeros((4, 3)))
    crystal = AtomicData.from_atoms(atoms, dtype=torch.float64)
    batch = Batch.from_data_list(
        [
            crystal,
            _two_atoms(
                energy=torch.zeros(1, 1).double(),
                forces=torch.zeros(2, 3).double(),
                stress=torch.zeros(1, 3, 3).double(),
            ),
        ]
    )
    expected = -np.trace(atoms.get_stress(voigt=False, include_ideal_gas=True)) / 3
    assert volume(batch)[0].item() == pytest.approx(125.0)
    assert pressure(batch)[0].item() == pytest.approx(expected, rel=1e-12)
    assert bool(torch.isnan(pressure(batch)[1]) & torch.isnan(volume(batch)[1]))
    batch.remove_key("stress")
    assert bool(torch.isnan(pressure(batch)).all())


def test_kinetic_temperature_of_ase_agrees():
    atoms = bulk("Cu", cubic=True).repeat(2)
    atoms.set_velocities(np.random.default_rng(0).normal(0, 0.02, (32, 3)))
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64)])
    assert float(temperature(batch, momentum_conserved=False)) == pytest.approx(
        atoms.get_temperature(), rel=1e-9
    )
    assert atoms.get_kinetic_energy() == pytest.approx(float(kinetic_energy(batch)))
    assert units.kB == pytest.approx(8.617330e-5, rel=1e-6)
