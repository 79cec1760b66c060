"""Relaxation of 33 real crystals with a published potential, against ASE one by one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ase.filters import FrechetCellFilter
from ase.optimize import FIRE as ASEFIRE

from nvalchemi.data import AtomicData, Batch, read
from nvalchemi.dynamics import ConvergenceHook, FIREVariableCell

pytestmark = [
    pytest.mark.filterwarnings("ignore:No tensor product accelerator:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

CRYSTALS = Path(__file__).parents[1] / "data_files" / "crystals.extxyz"


@pytest.mark.slow
def test_lattice_constants_of_33_crystals_with_7net_0_are_those_of_ase():
    pytest.importorskip("sevenn")
    from sevenn.calculator import SevenNetCalculator

    from nvalchemi.models import SevenNetWrapper

    structures = read(CRYSTALS, dtype=torch.float64)
    batch = Batch.from_data_list(structures)
    done = ConvergenceHook.from_fmax(0.02)
    engine = FIREVariableCell(SevenNetWrapper("7net-0"), convergence_hook=done, max_edges_per_eval=500)
    engine.run(batch)  # ends by itself, when all have converged
    assert batch.num_graphs == 33
    assert batch.status[:, 0].tolist() == [1] * 33

    calculator = SevenNetCalculator("7net-0", device="cpu")
    steps = 0
    for data, relaxed in zip(structures, batch.to_data_list(), strict=True):
        atoms = data.to_atoms()
        atoms.calc = calculator
        optimizer = ASEFIRE(FrechetCellFilter(atoms), logfile=None)
        assert optimizer.run(fmax=0.02, steps=500)
        steps += optimizer.nsteps
        # The paths are the same but for the round-off of a float32 model, which a soft mode may amplify.
        lengths = relaxed.cell[0].norm(dim=-1).numpy()
        np.testing.assert_allclose(lengths, atoms.cell.lengths(), rtol=2e-3, err_msg=data.info["name"])
        energy = float(relaxed.energy)
        assert energy == pytest.approx(atoms.get_potential_energy(), abs=1e-4 * len(atoms)), data.info["name"]
    assert int(batch.system_step.sum()) <= 1.2 * steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FIRE", "FIRE2", "LBFGS"])
def test_steps_in_a_fixed_cell_are_at_most_a_fifth_more_than_those_of_ase(name):
    pytest.importorskip("sevenn")
    import ase.optimize
    from sevenn.calculator import SevenNetCalculator

    from nvalchemi import dynamics
    from nvalchemi.models import SevenNetWrapper

    displaced = []
    for seed, data in enumerate(read(CRYSTALS, dtype=torch.float64)):
        if data.info["name"] in ("Si-diamond", "MgO-rocksalt", "Ti-hcp", "W-bcc"):
            atoms = data.to_atoms()
            atoms.rattle(0.1, seed=seed)
            displaced.append(atoms)
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64) for atoms in displaced])
    engine = getattr(dynamics, name)(
        SevenNetWrapper("7net-0"), convergence_hook=ConvergenceHook.from_fmax(0.02)
    )
    engine.run(batch, 300)
    assert batch.status[:, 0].tolist() == [1] * 4

    calculator = SevenNetCalculator("7net-0", device="cpu")
    steps = 0
    for atoms, relaxed in zip(displaced, batch.to_data_list(), strict=True):
        atoms.calc = calculator
        optimizer = getattr(ase.optimize, name)(atoms, logfile=None)
        assert optimizer.run(fmax=0.02, steps=300)
        steps += optimizer.nsteps
        # Both stop within fmax of one minimum: the energy is flat there.
        assert float(relaxed.energy) == pytest.approx(atoms.get_potential_energy(), abs=2e-3)
    assert int(batch.system_step.sum()) <= 1.2 * steps
