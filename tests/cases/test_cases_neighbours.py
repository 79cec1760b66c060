"""Cases from the field: periodic images."""

import numpy as np
import pytest
import torch
from ase import Atoms

from nvalchemi.data import AtomicData
from nvalchemi.dynamics import NVE, DynamicsStage, FIREVariableCell, initialize_velocities
from nvalchemi.hooks import NeighborListHook, WrapPeriodicHook
from nvalchemi.neighbors import compute_neighbors


class Unwrapped:
    """Positions of each step, with the lattice vectors that the atoms crossed."""

    frequency, stage = 1, DynamicsStage.AFTER_STEP

    def __init__(self):
        self.path = []

    def __call__(self, ctx, stage):
        batch = ctx.batch
        crossed = batch.image_flags.to(batch.dtype).unsqueeze(-2) @ batch.cell[batch.batch_idx]
        self.path.append(batch.positions + crossed.squeeze(-2))


@pytest.mark.parametrize("handedness", [1, -1])
def test_unwrapped_path_is_the_path_without_wrapping_and_makes_no_jumps(argon, join, handedness):
    cell = np.array([[handedness * 10.6, 0, 0], [3.0, 10.0, 0], [-2.0, 1.5, 9.8]])
    grid = np.stack(np.meshgrid(*[(0.0, 0.5)] * 3), -1).reshape(-1, 3)
    atoms = Atoms("Ar8", scaled_positions=grid, cell=cell, pbc=True)
    atoms.rattle(0.05, seed=0)
    paths = []
    for hooks in ([], [WrapPeriodicHook()]):
        batch = join(AtomicData.from_atoms(atoms, dtype=torch.float64))
        batch.image_flags = torch.zeros(8, 3, dtype=torch.int32)
        initialize_velocities(batch, 80.0)
        watch = Unwrapped()
        NVE(argon, 2.0, hooks=[*hooks, watch]).run(batch, 100)
        paths.append(torch.stack(watch.path))
    assert int(batch.image_flags.abs().sum()) > 3
    torch.testing.assert_close(paths[1], paths[0], rtol=0, atol=1e-8)
    assert float(paths[1].diff(dim=0).norm(dim=-1).max()) < 0.5 * 9.8


def test_wrapping_a_relaxing_sheared_cell_with_atoms_far_outside_changes_nothing_but_the_images(argon, join):
    rng = np.random.default_rng(0)
    cell = np.array([[0, 5.2, 0.3], [5.2, 0.6, 0], [0.4, 0, 5.1]])
    fcc = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    atoms = Atoms("Ar4", scaled_positions=fcc + rng.integers(-9, 10, (4, 3)), cell=cell, pbc=True)
    atoms.rattle(0.1, seed=1)
    assert np.linalg.det(cell) < 0
    plain, wrapped = (join(AtomicData.from_atoms(atoms, dtype=torch.float64)) for _ in range(2))
    wrapped.image_flags = torch.zeros(4, 3, dtype=torch.int32)
    FIREVariableCell(argon).run(plain, 60)
    FIREVariableCell(argon, hooks=[WrapPeriodicHook()]).run(wrapped, 60)
    assert int(wrapped.image_flags.abs().max()) > 3
    torch.testing.assert_close(wrapped.cell, plain.cell, rtol=0, atol=1e-10)
    unwrapped = wrapped.positions + wrapped.image_flags.double() @ wrapped.cell[0]
    torch.testing.assert_close(unwrapped, plain.positions, rtol=0, atol=1e-9)


def test_list_follows_a_change_of_periodicity_between_two_runs(argon, crystal, join):
    batch = join(crystal())
    engine = NVE(argon, 1.0)
    engine.run(batch, 2)
    for change in (lambda: batch.pbc.fill_(False), lambda: batch.add_key("pbc", ~batch.pbc)):
        change()
        engine.run(batch, 1)
        fresh = batch.clone()
        compute_neighbors(fresh, config=argon.model_config.neighbor_config)
        torch.testing.assert_close(batch.energy, argon(fresh)["energy"], rtol=1e-12, atol=0)


def test_two_engines_that_take_turns_walk_the_path_of_one(argon, crystal, join):
    batches = [join(crystal(repeat=2)) for _ in range(2)]
    for batch in batches:
        initialize_velocities(batch, 120.0)
    # One keeps a list with a skin, the other searches at each step.
    searching = NeighborListHook(argon.model_config.neighbor_config)
    turns = [NVE(argon, 2.0), NVE(argon, 2.0, hooks=[searching])]
    for k in range(10):
        turns[k % 2].run(batches[0], 10)
    NVE(argon, 2.0).run(batches[1], 100)
    torch.testing.assert_close(batches[0].positions, batches[1].positions, rtol=0, atol=1e-9)
    assert searching.num_builds >= 50
