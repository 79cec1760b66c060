"""FIRE2 and L-BFGS against ASE's, with fixed and variable cell, and what each structure keeps to itself."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter
from ase.optimize import FIRE2 as ASEFIRE2
from ase.optimize import LBFGS as ASELBFGS

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import (
    FIRE2,
    LBFGS,
    CellCoordinates,
    ConvergenceHook,
    FIRE2VariableCell,
    SizeAwareSampler,
)
from nvalchemi.dynamics.optimizers.coordinates import Vector
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.models.lj import LennardJonesModelWrapper

PAIRS = [(FIRE2, ASEFIRE2), (LBFGS, ASELBFGS)]
MINIMISERS = [FIRE2, LBFGS]


def _model():
    return LennardJonesModelWrapper(0.0104, 3.40, 8.5)


def _calculator():
    return LennardJones(epsilon=0.0104, sigma=3.40, rc=8.5)


def _cluster(n, seed=0):
    rng = np.random.default_rng(seed)
    placed = []
    while len(placed) < n:
        x = rng.uniform(-0.5, 0.5, 3) * 3.6 * n ** (1 / 3)
        if all(np.linalg.norm(x - y) > 2.9 for y in placed):
            placed.append(x)
    return Atoms(f"Ar{n}", positions=placed)


def _crystal(seed, a=5.0):
    atoms = bulk("Ar", "fcc", a, cubic=True)
    deformation = np.eye(3) + np.random.default_rng(seed).normal(0, 0.03, (3, 3))
    atoms.set_cell(atoms.cell[:] @ deformation, scale_atoms=True)
    atoms.rattle(0.1, seed=seed)
    return atoms


def _batch(*atoms):
    return Batch.from_data_list([AtomicData.from_atoms(a, dtype=torch.float64) for a in atoms])


def _steps_of_ase(method, atoms, fmax, variable_cell=False):
    atoms = atoms.copy()
    atoms.calc = _calculator()
    optimizer = method(FrechetCellFilter(atoms) if variable_cell else atoms, logfile=None)
    assert optimizer.run(fmax=fmax, steps=1000)
    return optimizer.nsteps, atoms


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_steps_on_clusters_are_those_of_ase(ours, theirs):
    structures = [_cluster(n, seed) for n in (4, 7) for seed in (0, 1, 2)]
    batch = _batch(*structures)
    ours(_model(), convergence_hook=ConvergenceHook.from_fmax(0.005)).run(batch, 1000)
    assert batch.status[:, 0].tolist() == [1] * len(structures)
    for i, atoms in enumerate(structures):
        steps, _ = _steps_of_ase(theirs, atoms, 0.005)
        assert batch.system_step[i].item() <= 1.2 * steps + 1


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_steps_and_lattice_with_variable_cell_are_those_of_ase(ours, theirs):
    structures = [bulk("Ar", "fcc", 5.0), _crystal(0), _crystal(2, 5.6)]
    batch = _batch(*structures)
    ours(_model(), convergence_hook=ConvergenceHook.from_fmax(1e-3), coordinates=CellCoordinates()).run(
        batch, 1000
    )
    assert batch.status[:, 0].tolist() == [1, 1, 1]
    for i, atoms in enumerate(structures):
        steps, relaxed = _steps_of_ase(theirs, atoms, 1e-3, variable_cell=True)
        assert batch.system_step[i].item() <= 1.2 * steps + 1
        volume = float(torch.linalg.det(batch.cell[i]))
        assert volume == pytest.approx(relaxed.get_volume(), rel=1e-4)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_path_is_that_of_ase(ours, theirs):
    # For FIRE2 on the stretch where nothing goes uphill, as its docstring says.
    structures = [_cluster(7), _crystal(0)]
    structures[0].set_constraint(FixAtoms([2]))
    batch = _batch(*structures)
    steps = 8 if ours is FIRE2 else 15
    ours(_model()).run(batch, steps)
    for i, atoms in enumerate(structures):
        atoms.calc = _calculator()
        theirs(atoms, logfile=None).run(fmax=0.0, steps=steps)
        np.testing.assert_allclose(batch[i].positions.numpy(), atoms.positions, rtol=0, atol=1e-7)


def test_lbfgs_with_variable_cell_walks_the_path_of_frechet_cell_filter():
    atoms = _crystal(0)
    batch = _batch(atoms)
    LBFGS(_model(), coordinates=CellCoordinates()).run(batch, 15)
    atoms.calc = _calculator()
    ASELBFGS(FrechetCellFilter(atoms), logfile=None).run(fmax=0.0, steps=15)
    np.testing.assert_allclose(batch.positions.numpy(), atoms.positions, rtol=0, atol=1e-6)
    np.testing.assert_allclose(batch.cell[0].numpy(), atoms.cell[:], rtol=0, atol=1e-6)


def test_full_history_forgets_the_oldest_pair_as_in_ase():
    atoms = _cluster(7)
    batch = _batch(atoms)
    LBFGS(_model(), memory=4).run(batch, 15)
    atoms.calc = _calculator()
    ASELBFGS(atoms, memory=4, logfile=None).run(fmax=0.0, steps=15)
    np.testing.assert_allclose(batch.positions.numpy(), atoms.positions, rtol=0, atol=1e-7)
    assert batch.lbfgs_pairs.tolist() == [[14]]


def test_fire2_takes_back_half_a_step_when_it_goes_uphill(well, atoms_in_wells):
    # One step by hand: x = 0.1 Å moving outwards with v = 0.05; P < 0. Δt = 0.1 → 0.05, back by Δt v / 2, then
    # from rest with F = −0.1: v = Δt F (mixing changes nothing, it is along F), x += Δt v.
    batch = atoms_in_wells(count=1)
    batch.positions[:] = torch.tensor([[0.1, 0.0, 0.0]], dtype=torch.float64)
    engine = FIRE2(well)
    engine.run(batch, 0)
    batch.fire_velocities[:] = torch.tensor([[0.05, 0.0, 0.0]], dtype=torch.float64)
    batch.fire_downhill_steps[:] = 7
    engine.step(batch)
    expected = 0.1 - 0.5 * 0.05 * 0.05 + 0.05 * 0.05 * -0.1
    assert float(batch.positions[0, 0]) == pytest.approx(expected, abs=1e-12)
    assert float(batch.fire_dt) == pytest.approx(0.05)
    assert batch.fire_downhill_steps.tolist() == [[0]]


def test_fire2_time_step_stays_within_its_bounds(well, atoms_in_wells):
    batch = atoms_in_wells(count=1)
    engine = FIRE2(well, dt=1.0, dt_max=1.5, dt_min=0.9, n_min=2)
    engine.run(batch, 0)
    seen = []
    for _ in range(60):
        engine.step(batch)
        seen.append(float(batch.fire_dt))
    assert max(seen) == pytest.approx(1.5 * units.fs)
    assert min(seen) == pytest.approx(0.9 * units.fs)


@pytest.mark.parametrize("minimiser", MINIMISERS)
def test_path_is_the_same_alone_and_in_a_batch(minimiser):
    structures = [_crystal(0), _crystal(1, 5.6), bulk("Ar", "fcc", 5.0)]
    together = _batch(*structures)
    minimiser(_model(), coordinates=CellCoordinates()).run(together, 15)
    for i, atoms in enumerate(structures):
        alone = _batch(atoms)
        minimiser(_model(), coordinates=CellCoordinates()).run(alone, 15)
        torch.testing.assert_close(together[i].positions, alone.positions, rtol=0, atol=1e-9)
        torch.testing.assert_close(together.cell[i], alone.cell[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("minimiser", MINIMISERS)
def test_finished_structure_is_constant_to_the_bit(minimiser):
    batch = _batch(_crystal(0), _crystal(1, 5.6))
    alone = batch[[1]]
    engine = minimiser(_model(), coordinates=CellCoordinates())
    engine.run(batch, 4)
    batch.status[0] = 1
    batch.forces[:4] = float("nan")
    before = {name: t[0].clone() for name, t in batch.items() if batch.level(name) == "system"}
    atoms = {
        name: t[:4].clone() for name, t in batch.items() if batch.level(name) == "node" and name != "forces"
    }
    engine.run(batch, 8)
    assert all(torch.equal(batch[name][0], old) for name, old in before.items())
    skipped = {name for name in atoms if "neighbor" in name}  # the list is the batch's, and padded with N
    assert all(torch.equal(batch[name][:4], old) for name, old in atoms.items() if name not in skipped)
    minimiser(_model(), coordinates=CellCoordinates()).run(alone, 12)
    torch.testing.assert_close(batch[1].positions, alone.positions, rtol=0, atol=1e-9)


@pytest.mark.parametrize("minimiser", MINIMISERS)
def test_two_runs_are_one_long_run(minimiser):
    whole, parts = _batch(_cluster(7)), _batch(_cluster(7))
    minimiser(_model()).run(whole, 20)
    engine = minimiser(_model())
    engine.run(parts, 7)
    engine.run(parts, 13)
    assert torch.equal(whole.positions, parts.positions)


@pytest.mark.parametrize("minimiser", MINIMISERS)
def test_saved_state_goes_on_to_the_bit(minimiser):
    whole, first, second = (_batch(_crystal(0)) for _ in range(3))
    minimiser(_model(), coordinates=CellCoordinates()).run(whole, 20)
    engine, other = (minimiser(_model(), coordinates=CellCoordinates()) for _ in range(2))
    engine.run(first, 8)
    other.load_state_dict(engine.state_dict())
    other.run(second, 12)
    assert torch.equal(whole.positions, second.positions)
    assert torch.equal(whole.cell, second.cell)


@pytest.mark.parametrize("minimiser", MINIMISERS)
def test_structures_in_flight_have_the_path_they_have_alone(minimiser):
    structures = [AtomicData.from_atoms(_cluster(n, n), dtype=torch.float64) for n in (4, 6, 3, 5, 4)]

    def make(**options):
        return minimiser(_model(), convergence_hook=ConvergenceHook.from_fmax(0.01), **options)

    sink = HostMemory()
    make(sampler=SizeAwareSampler(structures, max_batch_size=2), sinks=sink).run()
    out = sink.drain()
    assert sorted(out.system_id[:, 0].tolist()) == [0, 1, 2, 3, 4]
    for data in out:
        alone = Batch.from_data_list([structures[int(data.system_id)]])
        make().run(alone)
        assert data.system_step.item() == alone.system_step.item()
        torch.testing.assert_close(data.positions, alone.positions, rtol=0, atol=1e-7)


@pytest.mark.parametrize("minimiser", MINIMISERS)
def test_float32_state_stays_float32_and_finds_the_same_minimum(minimiser):
    double = _batch(_cluster(4))
    single = double.to(dtype=torch.float32)
    for batch in (double, single):
        minimiser(_model(), convergence_hook=ConvergenceHook.from_fmax(0.005)).run(batch, 500)
        assert batch.status.tolist() == [[1]]
    assert {t.dtype for _, t in single.items() if t.is_floating_point()} == {torch.float32}
    torch.testing.assert_close(single.energy.double(), double.energy, rtol=0, atol=1e-4)


@pytest.mark.parametrize("minimiser", MINIMISERS)
def test_structure_at_its_minimum_stays_there(minimiser, well, atoms_in_wells):
    batch = atoms_in_wells(count=2)
    batch.positions[0] = 0.0
    minimiser(well).run(batch, 5)
    assert torch.equal(batch.positions[0], torch.zeros(3, dtype=torch.float64))
    assert bool(batch.positions.isfinite().all())


def test_lbfgs_goes_downhill_where_the_curvature_is_negative():
    # A dimer stretched beyond the inflection of the pair potential (4.2 Å): s·y < 0 until it has come closer.
    atoms = Atoms("Ar2", [[0, 0, 0], [0, 0, 5.0]])
    batch = _batch(atoms)
    engine = LBFGS(_model(), alpha=0.05, max_step=0.1)
    engine.run(batch, 0)
    energies = [float(batch.energy)]
    for _ in range(4):
        engine.step(batch)
        energies.append(float(batch.energy))
    assert energies == sorted(energies, reverse=True)
    assert batch.lbfgs_pairs.tolist() == [[0]]
    engine.run(batch, 60)
    assert float(batch.energy) == pytest.approx(-0.0104, abs=1e-6)


def test_lbfgs_solves_a_quadratic_as_the_two_loops_of_nocedal_do(well, atoms_in_wells):
    rng = torch.Generator().manual_seed(0)
    batch = atoms_in_wells(count=2, size=3)
    engine = LBFGS(well, memory=5)
    engine.run(batch, 0)
    shape = (9, 5)
    curvature = torch.diag(torch.arange(1.0, 10.0, dtype=torch.float64))
    s = torch.randn(shape, generator=rng, dtype=torch.float64)
    y = curvature @ s
    f = torch.randn(9, generator=rng, dtype=torch.float64)
    for k in range(5):
        batch.lbfgs_last[:3] = torch.stack([s[:, k].view(3, 3), torch.zeros(3, 3)], 1)
        batch.lbfgs_pairs.clamp_(min=0)
        change = torch.cat([-y[:, k].view(3, 3), torch.zeros(3, 3, dtype=torch.float64)])
        engine._remember(batch, Vector(change, None))
    q, a = f.clone(), torch.zeros(5, dtype=torch.float64)
    for k in reversed(range(5)):
        a[k] = s[:, k] @ q / (s[:, k] @ y[:, k])
        q -= a[k] * y[:, k]
    q /= 70.0
    for k in range(5):
        q += s[:, k] * (a[k] - y[:, k] @ q / (s[:, k] @ y[:, k]))
    found = engine._downhill(batch, Vector(torch.cat([f.view(3, 3), f.view(3, 3)]), None)).atoms
    torch.testing.assert_close(found[:3].flatten(), q)
    torch.testing.assert_close(found[3:].flatten(), f / 70.0)  # without a history of its own
    assert batch.lbfgs_pairs.tolist() == [[5], [0]]


def test_variable_cell_name_is_the_combination_and_reaches_the_pressure():
    one, two = _batch(_crystal(0)), _batch(_crystal(0))
    FIRE2VariableCell(_model(), pressure=0.02).run(one, 20)
    FIRE2(_model(), coordinates=CellCoordinates(0.02)).run(two, 20)
    assert torch.equal(one.cell, two.cell)
    LBFGS(_model(), coordinates=CellCoordinates(0.02), convergence_hook=ConvergenceHook.from_fmax(1e-5)).run(
        two, 200
    )
    expected = -0.02 * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(two.stress[0], expected, rtol=0, atol=1e-5)


def test_bad_arguments_are_errors_at_construction(well):
    for bad in (0, -1, True):
        with pytest.raises(ValueError, match="memory must be an int ≥ 1"):
            LBFGS(well, memory=bad)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="alpha must be finite and > 0"):
            LBFGS(well, alpha=bad)
        with pytest.raises(ValueError, match="max_step must be finite and > 0"):
            LBFGS(well, max_step=bad)
        with pytest.raises(ValueError, match="dt must be finite and > 0"):
            FIRE2(well, dt=bad)
        with pytest.raises(ValueError, match="dt_min must be finite and > 0"):
            FIRE2(well, dt_min=bad)
