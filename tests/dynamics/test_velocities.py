"""initialize_velocities."""

import pytest
import torch
from ase.build import molecule

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import initialize_velocities
from nvalchemi.dynamics.segments import sum_per_graph
from nvalchemi.dynamics.thermo import kinetic_energy, temperature


@pytest.fixture
def batch():
    names = ["C60", "CH3CH2OH", "CO2", "H2O"]
    return Batch.from_data_list(
        [AtomicData.from_atoms(molecule(name), dtype=torch.float64) for name in names]
    )


def test_temperature_is_exact_and_momentum_zero(batch):
    initialize_velocities(batch, torch.tensor([100.0, 200.0, 300.0, 400.0]))
    torch.testing.assert_close(temperature(batch), torch.tensor([100.0, 200.0, 300.0, 400.0]).double())
    momentum = sum_per_graph(batch.atomic_masses.unsqueeze(1) * batch.velocities, batch.batch_ptr)
    assert float(momentum.abs().max()) < 1e-12


def test_all_degrees_of_freedom_count_when_the_momentum_is_kept(batch):
    initialize_velocities(batch, 300.0, remove_com=False)
    torch.testing.assert_close(temperature(batch, momentum_conserved=False), torch.full((4,), 300.0).double())
    assert float(sum_per_graph(batch.velocities, batch.batch_ptr).abs().max()) > 1e-3


def test_rotation_is_removed_and_its_degrees_of_freedom_do_not_count(batch):
    initialize_velocities(batch, 300.0, remove_rotations=True)
    m, x, ptr = batch.atomic_masses.unsqueeze(1), batch.positions, batch.batch_ptr
    centre = (sum_per_graph(m * x, ptr) / sum_per_graph(m, ptr))[batch.batch_idx]
    angular = sum_per_graph(m * torch.linalg.cross(x - centre, batch.velocities), ptr)
    assert float(angular.abs().max()) < 1e-10
    dof = torch.tensor([3 * 60 - 6, 3 * 9 - 6, 3 * 3 - 5, 3 * 3 - 6]).double()
    torch.testing.assert_close(2 * kinetic_energy(batch) / (dof * units.kB), torch.full((4,), 300.0).double())


def test_velocities_of_a_structure_do_not_depend_on_its_batch(batch):
    batch.system_id = torch.tensor([[5], [6], [7], [8]])
    part = batch[[2, 0]]
    initialize_velocities(batch, 300.0)
    initialize_velocities(part, 300.0)
    assert torch.equal(part[0].velocities, batch[2].velocities)
    assert torch.equal(part[1].velocities, batch[0].velocities)
    other = batch.clone()
    initialize_velocities(other, 300.0, random_seed=1)
    assert not bool((other.velocities == batch.velocities).any())


def test_without_rescaling_the_mean_energy_is_that_of_equipartition():
    # 2000 pairs of atoms: 3 degrees of freedom each, so the mean kinetic energy has a standard error of
    # sqrt(2 / 3 / 2000) = 1.8 %; allowed are three of them.
    pairs = [
        AtomicData(positions=torch.rand(2, 3, dtype=torch.float64), atomic_numbers=torch.tensor([18, 1]))
    ] * 2000
    batch = Batch.from_data_list(pairs)
    initialize_velocities(batch, 300.0, rescale=False)
    assert float(kinetic_energy(batch).mean()) == pytest.approx(1.5 * units.kB * 300.0, rel=0.055)


def test_tensor_form_does_what_the_batch_form_does(batch):
    initialize_velocities(batch, 250.0, random_seed=7)
    velocities = torch.empty_like(batch.velocities)
    initialize_velocities(velocities, batch.atomic_masses, 250.0, batch.batch_idx, random_seed=7)
    torch.testing.assert_close(velocities, batch.velocities, rtol=1e-12, atol=0)


def test_zero_temperature_and_fixed_atoms_are_at_rest(batch):
    batch.atom_categories = torch.zeros(batch.num_nodes, dtype=torch.int64)
    batch.atom_categories[0] = 1
    initialize_velocities(batch, torch.tensor([300.0, 0.0, 0.0, 10.0]))
    assert not bool(batch.velocities[0].any())
    assert not bool(batch.velocities[60:72].any())
    torch.testing.assert_close(temperature(batch), torch.tensor([300.0, 0.0, 0.0, 10.0]).double())


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_bad_temperature_is_an_error(batch, bad):
    with pytest.raises(ValueError, match="temperature must be finite"):
        initialize_velocities(batch, bad)


def test_unsorted_batch_idx_is_an_error():
    with pytest.raises(ValueError, match="ascending"):
        initialize_velocities(torch.zeros(2, 3), torch.ones(2), 300.0, torch.tensor([1, 0]))
