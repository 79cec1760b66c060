"""Relaxation against ASE: the same path, the same number of steps, the same minimum."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter
from ase.optimize import FIRE as ASEFIRE
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import FIRE, ConvergenceHook, FIREVariableCell
from nvalchemi.models.base import BaseModelMixin, ModelConfig
from nvalchemi.models.lj import LennardJonesModelWrapper


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


def _crystal(seed, a=5.0, strain=0.03):
    atoms = bulk("Ar", "fcc", a, cubic=True)
    deformation = np.eye(3) + np.random.default_rng(seed).normal(0, strain, (3, 3))
    atoms.set_cell(atoms.cell[:] @ deformation, scale_atoms=True)
    atoms.rattle(0.1, seed=seed)
    return atoms


def _batch(*atoms):
    return Batch.from_data_list([AtomicData.from_atoms(a, dtype=torch.float64) for a in atoms])


def test_fire_makes_the_steps_of_ase_and_needs_as_many():
    structures = [_cluster(n) for n in (4, 7, 13)]
    batch = _batch(*structures)
    FIRE(_model(), convergence_hook=ConvergenceHook.from_fmax(0.002)).run(batch, 1000)
    for i, atoms in enumerate(structures):
        atoms.calc = _calculator()
        optimizer = ASEFIRE(atoms, logfile=None)
        assert optimizer.run(fmax=0.002)
        assert batch.system_step[i].item() == optimizer.nsteps
        np.testing.assert_allclose(batch[i].positions.numpy(), atoms.positions, rtol=0, atol=1e-7)


def test_time_step_arguments_are_those_of_ase_in_femtoseconds():
    from nvalchemi import units

    atoms = _cluster(7)
    batch = _batch(atoms)
    FIRE(_model(), dt=0.05 / units.fs, dt_max=0.3 / units.fs).run(batch, 40)
    atoms.calc = _calculator()
    ASEFIRE(atoms, dt=0.05, dtmax=0.3, logfile=None).run(fmax=0.0, steps=40)
    np.testing.assert_allclose(batch.positions.numpy(), atoms.positions, rtol=0, atol=1e-8)
    with pytest.raises(ValueError, match="dt must not exceed dt_max"):
        FIRE(_model(), dt=2.0, dt_max=1.0).run(_batch(_cluster(4)), 1)


def test_fixed_atoms_are_those_of_ase():
    atoms = _cluster(7)
    atoms.set_constraint(FixAtoms([0, 3]))
    batch = _batch(atoms)
    FIRE(_model()).run(batch, 40)
    atoms.calc = _calculator()
    ASEFIRE(atoms, logfile=None).run(fmax=0.0, steps=40)
    np.testing.assert_allclose(batch.positions.numpy(), atoms.positions, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"pressure": 0.01}, {"scalar_pressure": 0.01}),
        ({"hydrostatic": True}, {"hydrostatic_strain": True}),
        ({"constant_volume": True}, {"constant_volume": True}),
        ({"mask": [1, 1, 0, 0, 0, 1]}, {"mask": [1, 1, 0, 0, 0, 1]}),
    ],
)
def test_variable_cell_path_is_that_of_frechet_cell_filter(ours, theirs):
    structures = [bulk("Ar", "fcc", 5.0), _crystal(0)]
    batch = _batch(*structures)
    engine = FIREVariableCell(_model(), **ours)
    for atoms in structures:
        atoms.calc = _calculator()
    optimizers = [ASEFIRE(FrechetCellFilter(atoms, **theirs), logfile=None) for atoms in structures]
    for _ in range(20 if not ours else 8):
        engine.step(batch)
        for i, (atoms, optimizer) in enumerate(zip(structures, optimizers, strict=True)):
            optimizer.step()
            np.testing.assert_allclose(batch[i].positions.numpy(), atoms.positions, rtol=0, atol=1e-6)
            np.testing.assert_allclose(batch[i].cell[0].numpy(), atoms.cell[:], rtol=0, atol=1e-6)


def test_relaxed_lattice_energy_and_steps_are_those_of_ase():
    structures = [bulk("Ar", "fcc", 5.0), _crystal(0)]
    batch = _batch(*structures)
    FIREVariableCell(_model(), convergence_hook=ConvergenceHook.from_fmax(1e-3)).run(batch, 1000)
    assert batch.status[:, 0].tolist() == [1, 1]
    for i, atoms in enumerate(structures):
        atoms.calc = _calculator()
        optimizer = ASEFIRE(FrechetCellFilter(atoms), logfile=None)
        assert optimizer.run(fmax=1e-3, steps=1000)
        assert batch.system_step[i].item() == pytest.approx(optimizer.nsteps, abs=1)
        np.testing.assert_allclose(batch[i].cell[0].numpy(), atoms.cell[:], rtol=0, atol=1e-4)
    # ASE shifts its pair energy at the cutoff; the minimum of the unshifted one is known from the lattice
    # sum at 5.26 Å.
    assert float(batch.energy[0]) == pytest.approx(-0.0842277845, abs=1e-4)


def test_target_pressure_is_reached():
    batch = _batch(_crystal(0))
    FIREVariableCell(_model(), pressure=0.02, convergence_hook=ConvergenceHook.from_fmax(1e-5)).run(
        batch, 2000
    )
    expected = -0.02 * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(batch.stress[0], expected, rtol=0, atol=1e-5)


def test_path_of_a_structure_does_not_change_when_its_batch_mate_is_replaced_half_way():
    a, b, c = _crystal(0), _crystal(1), _crystal(2, 5.6)
    first = _batch(a, b)
    FIREVariableCell(_model()).run(first, 15)
    second = first[[0]]
    mate = _batch(c)
    FIREVariableCell(_model()).run(mate, 3)
    mate.system_id[0] = 7
    second.append(mate)
    engine = FIREVariableCell(_model())
    engine.run(second, 15)
    # Half-way a new engine begins with a first step; so it does where A is alone.
    half = _batch(a)
    FIREVariableCell(_model()).run(half, 15)
    rest = half[[0]]
    FIREVariableCell(_model()).run(rest, 15)
    torch.testing.assert_close(second[0].positions, rest.positions, rtol=0, atol=1e-10)
    torch.testing.assert_close(second.cell[0], rest.cell[0], rtol=0, atol=1e-10)


class SkewStress(nn.Module, BaseModelMixin):
    """No forces, a constant stress with σxy ≠ σyx."""

    def __init__(self):
        super().__init__()
        self.model_config = ModelConfig(outputs={"energy", "forces", "stress"}, supports_pbc=True)

    def forward(self, data):
        """Energy, forces, stress."""
        stress = torch.zeros(data.num_graphs, 3, 3, dtype=data.dtype)
        stress[:, 0, 1] = 0.01
        stress[:, 1, 0] = -0.01
        stress[:, 2, 2] = 0.01
        return {
            "energy": data.cell.new_zeros(data.num_graphs, 1),
            "forces": 0 * data.positions,
            "stress": stress,
        }


def test_unsymmetric_stress_does_not_rotate_the_cell():
    batch = _batch(bulk("Ar", "fcc", 5.26, cubic=True))
    FIREVariableCell(SkewStress()).run(batch, 20)
    cell = batch.cell[0]
    assert float(cell[2, 2]) < 5.2
    torch.testing.assert_close(
        cell, torch.diag(torch.stack([cell[0, 0], cell[0, 0], cell[2, 2]])), rtol=0, atol=1e-12
    )
    assert float(cell[0, 0]) == pytest.approx(5.26)


def test_structure_without_a_periodic_cell_is_an_error_naming_it():
    with pytest.raises(
        ValueError, match=r"needs cells periodic in three directions; graph 1 \(system_id 1\)"
    ):
        FIREVariableCell(_model()).run(_batch(_crystal(0), _cluster(4)), 1)
    with pytest.raises(ValueError, match="nothing to relax"):
        FIREVariableCell(_model(), hydrostatic=True, constant_volume=True)


def test_continuing_a_run_is_one_long_run_and_leaves_physical_velocities_alone():
    whole, parts = _batch(_crystal(0)), _batch(_crystal(0))
    for b in (whole, parts):
        b.velocities = torch.full_like(b.positions, 0.01)
    FIREVariableCell(_model()).run(whole, 25)
    engine = FIREVariableCell(_model())
    engine.run(parts, 10)
    engine.run(parts, 15)
    assert torch.equal(whole.positions, parts.positions)
    assert torch.equal(whole.cell, parts.cell)
    assert bool((whole.velocities == 0.01).all())
