"""Cases from the field: molecular dynamics."""

import pytest
import torch

from nvalchemi.data import FIXED, AtomicData
from nvalchemi.dynamics import (
    FAILED,
    NVE,
    DynamicsStage,
    NVTLangevin,
    NVTNoseHoover,
    initialize_velocities,
)
from nvalchemi.dynamics.thermo import temperature


@pytest.mark.parametrize("beside", [False, True])
def test_stress_of_a_molecule_is_refused_by_name_before_anything_moves(argon, chain, crystal, join, beside):
    argon.set_config("active_outputs", {"energy", "forces", "stress"})
    batch = join(crystal(), chain(3)) if beside else join(chain(3))
    before = batch.positions.clone()
    with pytest.raises(ValueError, match=f"the stress of graph {int(beside)} .* is undefined"):
        NVE(argon, 1.0).run(batch, 3)
    assert torch.equal(batch.positions, before)


def test_molecule_beside_a_crystal_has_no_stress_when_none_was_asked_for(argon, chain, crystal, join):
    batch = NVE(argon, 1.0).run(join(crystal(), chain(3)), 3)
    assert "stress" not in batch
    assert bool(batch.energy.isfinite().all())


def test_fixed_half_stays_to_the_bit_and_the_mobile_half_has_the_temperature_of_the_bath(
    argon, crystal, join
):
    data = crystal(repeat=2)
    data.add_node_property("atom_categories", FIXED * (torch.arange(32) % 2))
    batch = join(data)
    before = batch.positions.clone()
    initialize_velocities(batch, 60.0)
    assert temperature(batch, momentum_conserved=False).item() == pytest.approx(60.0)
    kelvin = []

    class Thermometer:
        frequency, stage = 1, DynamicsStage.AFTER_STEP

        def __call__(self, ctx, stage):
            kelvin.append(temperature(ctx.batch, momentum_conserved=False).item())

    NVTLangevin(argon, 4.0, 60.0, 0.05, hooks=[Thermometer()]).run(batch, 1200)
    assert torch.equal(batch.positions[1::2], before[1::2])
    assert not bool(batch.velocities[1::2].any())
    # 48 degrees of freedom, some 200 independent samples: standard error 1.4 %.
    assert sum(kelvin[200:]) / len(kelvin[200:]) == pytest.approx(60.0, rel=0.06)


def test_chain_of_one_thermostat_leaves_velocities_near_300_kelvin_after_a_step(argon, crystal, join):
    batch = join(crystal(repeat=2))
    initialize_velocities(batch, 300.0)
    NVTNoseHoover(argon, 1.0, 300.0, 100.0, chain_length=1).run(batch, 1)
    # Forces near the minimum and a thermostat at rest change the kinetic energy in second order of the step only.
    assert temperature(batch).item() == pytest.approx(300.0, rel=0.02)


def test_speed_of_1e6_under_a_thermostat_beside_structures_of_no_and_one_atom(argon, chain, crystal, join):
    empty = AtomicData(positions=torch.zeros(0, 3, dtype=torch.float64), atomic_numbers=[])
    structures = [crystal(), crystal(seed=1), empty, chain(1), chain(4)]
    for data in structures:
        data.velocities = torch.zeros_like(data.positions)
    structures[1].velocities[2, 1] = 1e6

    def engine():
        return NVTLangevin(argon, 2.0, 40.0, 0.01)

    batch = join(*structures)
    batch.system_id = torch.arange(5).unsqueeze(-1)
    others = batch[[4, 3, 0]]
    engine().run(batch, 60)
    engine().run(others, 60)
    assert batch.status[:, 0].tolist() == [0, FAILED, 0, 0, 0]
    for k, i in enumerate((4, 3, 0)):
        torch.testing.assert_close(others[k].positions, batch[i].positions, rtol=0, atol=1e-12)


def test_velocities_of_an_atom_without_mass_are_refused_by_name(crystal, join):
    data = crystal()
    data.atomic_masses[2] = 0.0
    with pytest.raises(ValueError, match=r"atom 2 of graph 1 has 0\.0"):
        initialize_velocities(join(crystal(), data), 300.0)


@pytest.mark.parametrize(
    ("masses", "batch_idx", "message"),
    [
        (torch.ones(2), torch.tensor([-1, 0]), "not negative"),
        (torch.ones(3), torch.tensor([0, 0]), "got 3 and 2"),
        (torch.ones(2), torch.tensor([0]), "got 2 and 1"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_velocities_are_drawn(masses, batch_idx, message):
    velocities = torch.full((2, 3), 7.0)
    with pytest.raises(ValueError, match=message):
        initialize_velocities(velocities, masses, 300.0, batch_idx)
    assert bool((velocities == 7.0).all())
