"""Nosé–Hoover chains: what they conserve, what they sample, and that each structure has its own."""

import numpy as np
import pytest
import torch
from ase.build import bulk
from scipy import stats

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE, ConvergenceHook, NVTLangevin, NVTNoseHoover, initialize_velocities
from nvalchemi.dynamics.integrators.nose_hoover import NoseHooverChains
from nvalchemi.dynamics.thermo import degrees_of_freedom, kinetic_energy, temperature
from nvalchemi.models.lj import LennardJonesModelWrapper


def _model():
    # Smooth at the cutoff, so that no jump there hides the error of the integrator.
    return LennardJonesModelWrapper(0.0104, 3.40, 6.5, switch_width=1.5)


def _argon(repeat=(2, 2, 2), seed=0, a=5.35, rattle=0.05):
    atoms = bulk("Ar", "fcc", a, cubic=True).repeat(repeat)
    atoms.rattle(rattle, seed=seed)
    return AtomicData.from_atoms(atoms, dtype=torch.float64)


def _batch(*structures, temperature=60.0):
    batch = Batch.from_data_list(list(structures))
    initialize_velocities(batch, temperature)
    return batch


def _drift(engine, batch, steps=500, every=5):
    """Slope of a line through the conserved quantity, eV/atom/ps, and largest excursion, eV/atom, of each graph."""
    engine.run(batch, 0)
    values = []
    for _ in range(steps // every):
        engine.run(batch, every)
        values.append(engine.conserved_quantity(batch) / batch.num_nodes_per_graph)
    values = torch.stack(values).numpy()
    times = engine.dt.value * every * np.arange(len(values)) / 1000.0
    return np.polyfit(times, values, 1)[0], np.ptp(values, axis=0)


@pytest.mark.parametrize(("length", "order"), [(1, 1), (1, 3), (3, 3), (5, 5)])
def test_conserved_quantity_is_flat(length, order):
    batch = _batch(_argon((2, 2, 1)), _argon((2, 1, 1), 1))
    engine = NVTNoseHoover(_model(), 4.0, 60.0, 100.0, chain_length=length, yoshida_order=order)
    slope, excursion = _drift(engine, batch)
    # 2 ps, in which the structures take up about 4e-3 eV per atom from the bath.
    assert (abs(slope) < 5e-6).all()
    assert (excursion < 3e-5).all()
    heat = engine.conserved_quantity(batch) - NVE(_model(), 1.0).conserved_quantity(batch)
    assert bool((heat.abs() / batch.num_nodes_per_graph > 1e-3).all())


def test_error_of_the_conserved_quantity_falls_as_the_square_of_the_time_step():
    def excursion(dt):
        return _drift(NVTNoseHoover(_model(), dt, 60.0, 100.0), _batch(_argon((2, 2, 1))), int(600 / dt), 1)[
            1
        ]

    assert excursion(10.0) / excursion(5.0) == pytest.approx(4.0, rel=0.15)


def test_path_can_be_walked_back():
    batch = _batch(_argon())
    start = batch.positions.clone()
    engine = NVTNoseHoover(_model(), 4.0, 60.0, 100.0)
    engine.run(batch, 100)
    assert float((batch.positions - start).abs().max()) > 0.1
    batch.velocities.neg_()
    batch.thermostat_velocities.neg_()
    engine.run(batch, 100)
    torch.testing.assert_close(batch.positions, start, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("length", "order"), [(1, 1), (2, 3), (4, 5)])
def test_compiled_chains_are_those_of_torch_operations(length, order):
    chains = NoseHooverChains(2, length, order)
    generator = torch.Generator().manual_seed(0)
    eta, v = torch.randn(2, 3, 2, length, generator=generator, dtype=torch.float64)
    kinetic = torch.rand(3, 2, generator=generator, dtype=torch.float64)
    dof = torch.tensor([[9.0, 1.0], [0.0, 6.0], [30.0, 3.0]], dtype=torch.float64)
    kT, time, dt = (torch.tensor([[x], [2 * x], [x]], dtype=torch.float64) for x in (0.02, 10.0, 0.5))
    compiled = chains._compiled(eta, v, kinetic, dof, kT, time, dt, None)
    for one, other in zip(compiled, chains._propagated(eta, v, kinetic, dof, kT, time, dt), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    partly = chains._compiled(eta, v, kinetic, dof, kT, time, dt, torch.tensor([True, False, True]))
    assert torch.equal(partly[0][1], eta[1])
    assert torch.equal(partly[0][2], compiled[0][2])


@pytest.mark.slow
def test_kinetic_energy_has_the_canonical_distribution_at_two_temperatures():
    # 2K/kT has a χ² distribution with N_f = 3·8 − 3 degrees of freedom. 64 structures at each temperature, dense
    # enough to collide and loose enough to be fluid (a crystal of few atoms is close to harmonic, where no chain
    # is ergodic), five samples of each 0.75 ps apart. The standard error of the mean is 0.36; a wrong N_f (3N)
    # would shift it by 3. That of the variance is 4; at constant energy it would be less by half.
    batch = _batch(*[_argon((2, 1, 1), seed, a=6.0, rattle=0.2) for seed in range(128)])
    targets = torch.tensor([120.0, 180.0]).repeat(64)
    initialize_velocities(batch, targets)
    engine = NVTNoseHoover(_model(), 5.0, targets, 100.0)
    engine.run(batch, 400)
    samples = []
    for _ in range(5):
        engine.run(batch, 150)
        samples.append(2 * kinetic_energy(batch) / (units.kB * targets))
    reduced = torch.stack(samples)
    for part in (reduced[:, ::2], reduced[:, 1::2]):
        assert stats.kstest(part.flatten().numpy(), stats.chi2(21).cdf).pvalue > 0.01
        assert float(part.mean()) == pytest.approx(21.0, abs=1.2)
        assert float(part.var()) == pytest.approx(42.0, abs=13.0)


def test_one_step_leaves_the_temperature_where_it_is():
    batch = _batch(_argon(), temperature=300.0)
    NVTNoseHoover(_model(), 1.0, 300.0, 100.0).run(batch, 1)
    assert float(temperature(batch)) == pytest.approx(300.0, rel=0.02)


@pytest.mark.slow
def test_frozen_half_does_not_change_the_temperature_of_the_mobile_half():
    batch = _batch(*[_argon(seed=seed) for seed in range(16)])
    batch.atom_categories = (torch.arange(batch.num_nodes) % 2).long()
    initialize_velocities(batch, 300.0)
    before = batch.positions.clone()
    engine = NVTNoseHoover(_model(), 2.0, 300.0, 50.0)
    engine.run(batch, 200)
    total, steps = 0.0, 400
    for _ in range(steps):
        engine.step(batch)
        total += kinetic_energy(batch).mean()
    # All 48 degrees of freedom of 16 free atoms count, since the held ones take up momentum.
    assert bool((degrees_of_freedom(batch) == 48).all())
    assert float(2 * total / steps / (48 * units.kB)) == pytest.approx(300.0, rel=0.03)
    held = batch.atom_categories == 1
    assert torch.equal(batch.positions[held], before[held])
    assert not bool(batch.velocities[held].any())


def test_lone_atom_without_degrees_of_freedom_flies_on():
    lone = AtomicData(
        positions=torch.zeros(1, 3, dtype=torch.float64),
        atomic_numbers=torch.tensor([18]),
        velocities=torch.full((1, 3), 0.01, dtype=torch.float64),
    )
    batch = Batch.from_data_list([lone])
    NVTNoseHoover(_model(), 2.0, 300.0, 100.0).run(batch, 10)
    assert torch.equal(batch.velocities, lone.velocities)
    torch.testing.assert_close(batch.positions, lone.velocities * 20 * units.fs)


def test_momentum_stays_zero():
    batch = _batch(_argon())
    NVTNoseHoover(_model(), 4.0, 60.0, 100.0).run(batch, 300)
    assert float((batch.atomic_masses.unsqueeze(-1) * batch.velocities).sum(0).abs().max()) < 1e-12


def test_path_and_chain_are_the_same_alone_and_in_a_batch_with_own_parameters():
    structures = [_argon(), _argon((2, 2, 1), 1)]
    dt, T, tau = (torch.tensor(x) for x in ([2.0, 4.0], [40.0, 80.0], [50.0, 200.0]))
    together = _batch(*structures)
    alone = [together[[i]] for i in range(2)]
    NVTNoseHoover(_model(), dt, T, tau).run(together, 40)
    for i, batch in enumerate(alone):
        NVTNoseHoover(_model(), float(dt[i]), float(T[i]), float(tau[i])).run(batch, 40)
        for name in ("positions", "velocities", "thermostat_positions", "thermostat_velocities"):
            torch.testing.assert_close(together[i][name], batch[0][name], rtol=0, atol=1e-10)


def test_finished_structure_and_its_chain_stay_to_the_bit_and_do_not_disturb_the_other():
    batch = _batch(_argon(), _argon((2, 2, 1), 1))
    alone = batch[[1]]
    engine = NVTNoseHoover(_model(), 4.0, 60.0, 100.0)
    engine.run(batch, 5)
    batch.status[0] = 1
    batch.velocities[:32] = float("nan")
    before = {name: t[0].clone() for name, t in batch.items() if batch.level(name) == "system"}
    positions = batch.positions[:32].clone()
    engine.run(batch, 20)
    assert all(torch.equal(batch[name][0], old) for name, old in before.items())
    assert torch.equal(batch.positions[:32], positions)
    NVTNoseHoover(_model(), 4.0, 60.0, 100.0).run(alone, 25)
    torch.testing.assert_close(batch[1].positions, alone.positions, rtol=0, atol=1e-10)


def test_two_runs_are_one_long_run_and_a_new_engine_begins_with_chains_at_rest():
    whole, parts = _batch(_argon()), _batch(_argon())
    NVTNoseHoover(_model(), 4.0, 60.0, 100.0).run(whole, 30)
    engine = NVTNoseHoover(_model(), 4.0, 60.0, 100.0)
    engine.run(parts, 10)
    engine.run(parts, 20)
    assert torch.equal(whole.positions, parts.positions)
    assert torch.equal(whole.thermostat_velocities, parts.thermostat_velocities)
    NVTNoseHoover(_model(), 4.0, 60.0, 100.0).run(parts, 0)
    assert not bool(parts.thermostat_velocities.any())
    NVTNoseHoover(_model(), 4.0, 60.0, 100.0, chain_length=5).run(parts, 1)
    assert parts.thermostat_velocities.shape == (1, 1, 5)


@pytest.mark.parametrize(
    "make",
    [
        lambda T: NVTNoseHoover(_model(), 2.0, T, 100.0),
        lambda T: NVTLangevin(_model(), 2.0, T, 0.01),
    ],
)
def test_temperature_ramp_follows_the_steps_of_the_system(make):
    asked = []

    def ramp(step):
        asked.append(step.tolist())
        return 100.0 + 200.0 * step / 100

    batch = _batch(_argon((1, 1, 1)), _argon((2, 1, 1), 1))
    make(ramp).run(batch, 50)
    engine = make(ramp)
    engine.run(batch, 25)
    assert engine.step_count == 25
    assert engine.temperature.per_graph(batch).tolist() == [250.0, 250.0]
    assert asked[-2] == [74, 74]  # the target within the last step, in which 74 had been made


def test_ramp_heats():
    batch = _batch(_argon(), temperature=20.0)
    NVTNoseHoover(_model(), 4.0, lambda step: 20.0 + 0.6 * step, 50.0).run(batch, 250)
    # 92 degrees of freedom at 170 K: the standard deviation is 15 %.
    assert 90 < float(temperature(batch)) < 250
    with pytest.raises(ValueError, match=r"temperature must be finite and > 0, got 0\.0"):
        NVTNoseHoover(_model(), 4.0, lambda step: 2.0 - step, 50.0).run(_batch(_argon()), 5)


@pytest.mark.parametrize("bad", [-1.0, 0.0, float("inf"), float("nan")])
def test_bad_parameters_are_errors_at_construction(bad):
    for name, arguments in (
        ("dt", (bad, 60, 100)),
        ("temperature", (2, bad, 100)),
        ("thermostat_time", (2, 60, bad)),
    ):
        with pytest.raises(ValueError, match=f"{name} must be finite and > 0"):
            NVTNoseHoover(_model(), *arguments)
    with pytest.raises(ValueError, match="chain_length must be an int ≥ 1"):
        NVTNoseHoover(_model(), 2.0, 60.0, 100.0, chain_length=0)
    with pytest.raises(ValueError, match="yoshida_order must be 1, 3 or 5"):
        NVTNoseHoover(_model(), 2.0, 60.0, 100.0, yoshida_order=2)


def test_float32_state_stays_float32():
    double = _batch(_argon())
    single = double.to(dtype=torch.float32)
    for batch in (double, single):
        NVTNoseHoover(_model(), 2.0, 60.0, 100.0).run(batch, 20)
    assert {t.dtype for _, t in single.items() if t.is_floating_point()} == {torch.float32}
    torch.testing.assert_close(single.positions.double(), double.positions, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        single.thermostat_positions.double(), double.thermostat_positions, rtol=1e-3, atol=1e-6
    )


def test_works_with_a_convergence_hook():
    batch = _batch(_argon(), temperature=1.0)
    engine = NVTNoseHoover(_model(), 2.0, 60.0, 100.0, convergence_hook=ConvergenceHook.from_fmax(10.0))
    engine.run(batch, 5)
    assert batch.system_step.tolist() == [[1]]
