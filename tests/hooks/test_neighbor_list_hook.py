"""NeighborListHook: when it searches again, and that the list is never wrong."""

from enum import Enum

import numpy as np
import pytest
import torch
from ase.build import bulk

from nvalchemi.data import AtomicData, Batch
from nvalchemi.hooks import HookContext, NeighborListHook
from nvalchemi.models.base import NeighborConfig
from nvalchemi.neighbors import compute_neighbors


class Stage(Enum):
    BEFORE_COMPUTE = 0


def _crystal(seed=0, a=5.4):
    atoms = bulk("Ar", "fcc", a, cubic=True).repeat((2, 1, 1))
    atoms.rattle(0.1, seed=seed)
    return AtomicData.from_atoms(atoms, dtype=torch.float64)


def _pairs_within(batch, cutoff):
    i, j = batch.neighbor_list.unbind(1)
    shift = (batch.neighbor_list_shifts.double().unsqueeze(1) @ batch.cell[batch.batch_idx[i]]).squeeze(1)
    near = (batch.positions[j] + shift - batch.positions[i]).norm(dim=-1) < cutoff
    return set(
        map(tuple, torch.cat([batch.neighbor_list, batch.neighbor_list_shifts.long()], 1)[near].tolist())
    )


def _exact(batch, cutoff):
    other = batch.clone()
    compute_neighbors(other, cutoff)
    return _pairs_within(other, cutoff)


@pytest.fixture
def call():
    def _call(hook, batch):
        hook(HookContext(batch=batch), Stage.BEFORE_COMPUTE)

    return _call


def test_without_a_skin_it_searches_every_time(call):
    hook, batch = NeighborListHook(NeighborConfig(cutoff=5.0)), Batch.from_data_list([_crystal()])
    for _ in range(3):
        call(hook, batch)
    assert hook.num_builds == 3


@pytest.mark.parametrize("format_", ["coo", "matrix"])
def test_with_a_skin_it_searches_when_an_atom_moved_more_than_half_of_it(call, format_):
    hook, batch = (
        NeighborListHook(NeighborConfig(cutoff=5.0, format=format_), skin=1.0),
        Batch.from_data_list([_crystal()] * 2),
    )
    call(hook, batch)
    batch.positions[9, 0] += 0.49
    call(hook, batch)
    assert hook.num_builds == 1
    batch.positions[9, 0] += 0.02
    call(hook, batch)
    assert hook.num_builds == 2
    call(hook, batch)
    assert hook.num_builds == 2


def test_skin_of_the_config_is_used_when_none_is_given():
    assert NeighborListHook(NeighborConfig(cutoff=5.0, skin=0.3)).skin == 0.3
    assert NeighborListHook(NeighborConfig(cutoff=5.0, skin=0.3), skin=0.7).skin == 0.7
    with pytest.raises(ValueError, match="skin must be"):
        NeighborListHook(NeighborConfig(cutoff=5.0), skin=-1.0)


def test_small_strain_keeps_the_list_and_a_larger_one_does_not(call):
    hook, batch = (
        NeighborListHook(NeighborConfig(cutoff=5.0), skin=1.0),
        Batch.from_data_list([_crystal()] * 2),
    )
    call(hook, batch)

    def strain(size):
        deformation = torch.eye(3, dtype=torch.float64)
        deformation[0, 0] += size
        batch.cell[1] = batch.cell[1] @ deformation
        batch.positions[8:] = batch.positions[8:] @ deformation

    strain(-0.05)  # 0.05 × 6 Å < 1 Å
    call(hook, batch)
    assert hook.num_builds == 1
    strain(-0.15)
    call(hook, batch)
    assert hook.num_builds == 2


def test_the_list_is_never_short_of_a_pair_under_motion_and_strain(call):
    hook, batch = (
        NeighborListHook(NeighborConfig(cutoff=5.0), skin=1.0),
        Batch.from_data_list([_crystal(), _crystal(1, 5.0)]),
    )
    rng = np.random.default_rng(0)
    for _ in range(60):
        deformation = torch.as_tensor(np.eye(3) + rng.normal(0, 0.006, (3, 3)))
        batch.cell.copy_(batch.cell @ deformation)
        batch.positions.copy_(
            batch.positions @ deformation + torch.as_tensor(rng.normal(0, 0.02, batch.positions.shape))
        )
        call(hook, batch)
        assert _pairs_within(batch, 5.0) == _exact(batch, 5.0)
    assert 3 < hook.num_builds < 40


def test_other_graphs_mean_a_new_list(call):
    hook = NeighborListHook(NeighborConfig(cutoff=5.0), skin=1.0)
    batch = Batch.from_data_list([_crystal(), _crystal()])
    call(hook, batch)
    other = batch[[0]]
    call(hook, other)
    assert hook.num_builds == 2
    batch.system_id = torch.tensor([[0], [1]])
    call(hook, batch)
    assert hook.num_builds == 3
    batch.system_id[0] = 9
    call(hook, batch)
    assert hook.num_builds == 4
    batch.append(_with_reference(batch))
    call(hook, batch)
    assert _pairs_within(batch, 5.0) == _exact(batch, 5.0)


def _with_reference(batch):
    return batch[[0]]


def test_a_list_that_somebody_removed_is_made_again(call):
    hook, batch = NeighborListHook(NeighborConfig(cutoff=5.0), skin=1.0), Batch.from_data_list([_crystal()])
    call(hook, batch)
    batch.remove_key("neighbor_list")
    call(hook, batch)
    assert hook.num_builds == 2
    assert "neighbor_list" in batch


def test_the_first_width_of_a_matrix_grows_rather_than_cuts(call):
    hook = NeighborListHook(NeighborConfig(cutoff=5.0, format="matrix"), max_neighbors=4)
    batch = Batch.from_data_list([_crystal()])
    call(hook, batch)
    assert int(batch.num_neighbors.sum()) == len(_exact(batch, 5.0))


@pytest.mark.parametrize("order", [("coo", "matrix"), ("matrix", "coo")])
def test_lists_of_two_formats_are_made_again_each_for_its_own_positions(call, order):
    hooks = [NeighborListHook(NeighborConfig(cutoff=5.0, format=kind), skin=1.0) for kind in order]
    batch = Batch.from_data_list([_crystal()])
    rng = np.random.default_rng(0)
    for _ in range(30):
        batch.positions.add_(torch.as_tensor(rng.normal(0, 0.1, batch.positions.shape)))
        for hook in hooks:
            call(hook, batch)
        assert _pairs_within(batch, 5.0) == _exact(batch, 5.0)
    assert 2 < hooks[0].num_builds == hooks[1].num_builds < 30


def test_a_second_hook_for_the_same_list_is_refused_unless_the_first_is_the_automatic_one(argon_dynamics):
    engine = argon_dynamics([])
    engine._add_neighbor_hook()
    config = engine.model.model_config.neighbor_config
    own = NeighborListHook(config, skin=0.5)
    engine.register_hook(own)
    assert list(engine.hooks) == [own]
    engine.register_hook(NeighborListHook(NeighborConfig(cutoff=4.0)))
    with pytest.raises(ValueError, match=r"the matrix list.*cutoff=8\.5.*cutoff=9\.5"):
        engine.register_hook(NeighborListHook(config.model_copy(update={"cutoff": 9.5})))
