"""WrapPeriodicHook."""

from enum import Enum

import numpy as np
import pytest
import torch
from ase import Atoms

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE
from nvalchemi.hooks import DynamicsContext, HookContext, NeighborListHook, WrapPeriodicHook
from nvalchemi.hooks.wrap import (
    _change_of_matrix,
    _has_full_matrix,
    _move_compiled,
    _move_portable,
    _shift_matrix,
)
from nvalchemi.models.lj import LennardJonesModelWrapper
from nvalchemi.neighbors import NeighborConfig, compute_neighbors


class Stage(Enum):
    AFTER_POST_UPDATE = 0


def _wrap(batch, **mask):
    ctx = DynamicsContext(batch=batch, **mask) if mask else HookContext(batch=batch)
    WrapPeriodicHook()(ctx, Stage.AFTER_POST_UPDATE)


def _scattered(pbc=True, seed=0, n=20):
    rng = np.random.default_rng(seed)
    cell = 6 * np.eye(3) + rng.normal(0, 1, (3, 3))
    return Atoms(f"Ar{n}", positions=rng.uniform(-20, 20, (n, 3)), cell=cell, pbc=pbc)


def _batch(*atoms):
    return Batch.from_data_list([AtomicData.from_atoms(a, dtype=torch.float64) for a in atoms])


@pytest.mark.parametrize("pbc", [True, (True, False, True), (False, False, True)])
def test_atoms_move_by_whole_lattice_vectors_of_periodic_axes_into_the_cell(pbc):
    structures = [_scattered(pbc, seed) for seed in (0, 1)]
    batch = _batch(*structures)
    _wrap(batch)
    for i, atoms in enumerate(structures):
        moved = (batch[i].positions.numpy() - atoms.positions) @ np.linalg.inv(atoms.cell[:])
        np.testing.assert_allclose(moved, moved.round(), atol=1e-12)
        assert not moved[:, ~atoms.pbc].round().any()
        inside = (batch[i].positions.numpy() @ np.linalg.inv(atoms.cell[:]))[:, atoms.pbc]
        assert inside.min() >= -1e-12
        assert inside.max() <= 1 + 1e-12


def test_image_flags_count_so_that_the_path_can_be_unwrapped():
    atoms = _scattered()
    batch = _batch(atoms)
    batch.image_flags = torch.zeros(20, 3, dtype=torch.int32)
    _wrap(batch)
    unwrapped = batch.positions.numpy() + batch.image_flags.numpy() @ atoms.cell[:]
    np.testing.assert_allclose(unwrapped, atoms.positions, atol=1e-12)


def test_inactive_graphs_and_molecules_are_left_to_the_bit():
    molecule = Atoms("Ar20", positions=_scattered().positions)
    batch = _batch(_scattered(), molecule, _scattered(seed=1))
    before = batch.positions.clone()
    _wrap(batch, active_graph_mask=torch.tensor([False, True, True]))
    assert torch.equal(batch.positions[:40], before[:40])
    assert not torch.equal(batch.positions[40:], before[40:])


@pytest.mark.parametrize("format_", ["coo", "matrix"])
def test_neighbor_list_stays_valid(format_):
    batch = _batch(_scattered(), _scattered(seed=1))
    compute_neighbors(batch, 7.0, format=format_)
    _wrap(batch)
    new = batch.clone()
    compute_neighbors(new, 7.0, format=format_)

    def pairs(b):
        if format_ == "coo":
            return {
                (*p, *s)
                for p, s in zip(b.neighbor_list.tolist(), b.neighbor_list_shifts.tolist(), strict=True)
            }
        rows = enumerate(
            zip(
                b.num_neighbors.tolist(),
                b.neighbor_matrix.tolist(),
                b.neighbor_matrix_shifts.tolist(),
                strict=True,
            )
        )
        return {(i, j[k], *s[k]) for i, (count, j, s) in rows for k in range(count)}

    assert pairs(batch) == pairs(new)


def test_portable_and_compiled_change_of_a_matrix_are_the_same():
    batch = _batch(_scattered(), _scattered(seed=1, n=7))
    compute_neighbors(batch, 7.0, format="matrix")
    before = batch.neighbor_matrix_shifts.long()
    n = torch.randint(-2, 3, (batch.num_nodes, 3), generator=torch.Generator().manual_seed(0))
    version = batch.neighbor_matrix_shifts._version
    _shift_matrix(batch, n, (n != 0).any(1))
    assert torch.equal(
        batch.neighbor_matrix_shifts.long() - before, _change_of_matrix(batch.neighbor_matrix, n)
    )
    assert batch.neighbor_matrix_shifts._version > version


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_shifts_of_a_full_matrix_need_only_rows_near_atoms_that_crossed(share):
    """Cells smaller than the cutoff, so that one atom is in a row several times."""
    batch = _batch(_scattered(n=60), _scattered(seed=1, n=7))
    compute_neighbors(batch, 7.0, format="matrix")
    generator = torch.Generator().manual_seed(0)
    n = torch.randint(-2, 3, (batch.num_nodes, 3), generator=generator)
    n[torch.rand(batch.num_nodes, generator=generator) > share] = 0
    other, crossed = batch.clone(), (n != 0).any(1)
    assert bool(crossed.any())
    _shift_matrix(batch, n, crossed, full=True)
    _shift_matrix(other, n, crossed, full=False)
    assert torch.equal(batch.neighbor_matrix_shifts, other.neighbor_matrix_shifts)


@pytest.mark.parametrize("half_list", [False, True])
def test_only_a_list_of_the_engine_is_taken_for_full(half_list):
    batch = _batch(_scattered(n=5))
    hooks = [NeighborListHook(NeighborConfig(cutoff=5.0, format="matrix", half_list=half_list), skin=0.5)]
    engine = NVE(LennardJonesModelWrapper(1e-9, 1.0, 5.0, half_list=half_list), dt=1.0, hooks=hooks)
    engine.run(batch, 1)
    ctx = HookContext(batch=batch, workflow=engine)
    assert _has_full_matrix(ctx, batch) is not half_list
    assert not _has_full_matrix(HookContext(batch=batch), batch)
    compute_neighbors(batch, 5.0, format="matrix", half_list=True)
    assert not _has_full_matrix(ctx, batch)


def test_half_matrix_stays_right_next_to_a_full_list():
    atoms = Atoms("Ar20", positions=_scattered().positions, cell=[12.0] * 3, pbc=True)
    atoms.wrap()
    atoms.positions[::2, 0] -= 12.0
    model = LennardJonesModelWrapper(1e-9, 1.0, 5.0, half_list=True)
    full = NeighborListHook(NeighborConfig(cutoff=5.0), skin=0.5)
    half = NeighborListHook(model.model_config.neighbor_config, skin=0.5)
    batch = _batch(atoms)
    NVE(model, dt=1.0, hooks=[half, full, WrapPeriodicHook()]).run(batch, 1)
    i, k = (batch.neighbor_matrix < 20).nonzero().unbind(1)
    shift = batch.neighbor_matrix_shifts[i, k].double() @ batch.cell[0]
    vectors = batch.positions[batch.neighbor_matrix[i, k].long()] + shift - batch.positions[i]
    assert float(vectors.norm(dim=1).max()) < 5.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_portable_and_compiled_moves_are_the_same_and_atoms_of_failed_structures_stay(dtype):
    batch = _batch(_scattered((True, False, True)), _scattered(seed=1)).to(dtype=dtype)
    batch.positions[3] = torch.nan
    batch.positions[4] = torch.inf
    batch.neighbor_list_reference_positions = batch.positions + 0.25
    batch.neighbor_matrix_reference_positions = batch.positions - 0.5
    other = batch.clone()
    inverse, version = torch.linalg.pinv(batch.cell), batch.positions._version
    n, crossed, count = _move_compiled(batch, inverse, batch.pbc)
    for ours, portable in zip((n, crossed, count), _move_portable(other, inverse, other.pbc), strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(portable))
    for name in ("positions", "neighbor_list_reference_positions", "neighbor_matrix_reference_positions"):
        torch.testing.assert_close(batch[name], other[name], equal_nan=True)
    assert batch.positions._version > version
    assert count > 20
    assert (n[:20, 1] == 0).all()
    assert not crossed[3:5].any()


@pytest.mark.slow
def test_wrapping_each_step_does_not_change_the_energy_of_nve_argon_with_a_skin():
    # The case of the collection: 500 steps, skin 1 Å, the same E(t) to 1e-8 eV. Round-off grows about
    # tenfold each 100 steps in this liquid, so the atoms start close to the boundary, where they cross
    # often, at a low temperature.
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3)
    basis = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    positions = 5.4 * (grid[:, None] + basis).reshape(-1, 3)
    atoms = Atoms("Ar108", positions=positions, cell=3 * 5.4 * np.eye(3), pbc=True)
    atoms.set_velocities(rng.normal(0, 0.02, (108, 3)))
    energies, crossings = [], 0
    for hooks in ([], [WrapPeriodicHook()]):
        batch = _batch(atoms)
        batch.image_flags = torch.zeros(108, 3, dtype=torch.int32)
        engine = NVE(LennardJonesModelWrapper(0.0104, 3.40, 8.5), dt=2.0, hooks=hooks)
        series = []
        for _ in range(500):
            engine.step(batch)
            series.append(batch.energy.item())
        energies.append(series)
        crossings = int(batch.image_flags.abs().sum())
    assert crossings > 20
    np.testing.assert_allclose(energies[0], energies[1], rtol=0, atol=1e-8)
