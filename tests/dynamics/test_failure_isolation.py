"""A structure that blows up is given up with a reason; the others go on undisturbed, to the bit."""

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import FAILED, FIRE, NVE, ConvergenceHook, DynamicsStage
from nvalchemi.dynamics.hooks import NaNDetectorHook, SafetyHook
from nvalchemi.hooks import BiasedPotentialHook, HookContext, NeighborListHook
from nvalchemi.models.base import NeighborConfig

KEPT = ("positions", "velocities", "forces", "energy", "system_step")


def _assert_same(batch, graph, alone):
    for name in KEPT:
        assert torch.equal(batch[graph][name], alone[0][name]), name


@pytest.fixture
def three_crystals(crystal):
    def make(speed_of_second=0.0):
        data = [crystal(seed=i, speed=0.01) for i in range(3)]
        if speed_of_second:
            data[1].velocities[0, 0] = speed_of_second
        return data

    return make


def test_speed_of_1e6_in_system_2_of_3_stops_it_and_leaves_the_others_as_if_alone(argon, three_crystals):
    data = three_crystals(speed_of_second=1e6)
    batch = Batch.from_data_list(data)
    engine = NVE(argon, 2.0)
    engine.run(batch, 60)
    assert batch.status[:, 0].tolist() == [0, FAILED, 0]
    assert list(engine.failures) == [1]
    assert "graph 1 (system_id 1)" in engine.failures[1]
    assert batch.info[1]["failure"] == engine.failures[1]
    assert int(batch.system_step[1]) < 60
    for i in (0, 2):
        alone = Batch.from_data_list([three_crystals()[i]])
        NVE(argon, 2.0).run(alone, 60)
        _assert_same(batch, i, alone)


def test_path_does_not_depend_on_when_others_need_a_new_neighbor_list(argon, crystal):
    slow, fast = crystal(seed=0, speed=0.005), crystal(seed=1, speed=0.2)
    together = Batch.from_data_list([slow, fast])
    NVE(argon, 2.0).run(together, 80)
    alone = Batch.from_data_list([slow])
    NVE(argon, 2.0).run(alone, 80)
    _assert_same(together, 0, alone)


@pytest.mark.parametrize("format_", ["coo", "matrix"])
def test_failed_graph_leaves_the_neighbor_search_with_no_pairs(three_crystals, format_):
    batch = Batch.from_data_list(three_crystals())
    batch.status = torch.tensor([[0], [FAILED], [0]])
    batch.positions[batch.batch_idx == 1] = torch.nan
    hook = NeighborListHook(NeighborConfig(cutoff=5.0, format=format_), skin=1.0)
    for _ in range(2):
        hook(HookContext(batch=batch), DynamicsStage.BEFORE_COMPUTE)
    assert hook.num_builds == 1
    if format_ == "coo":
        assert batch.num_edges_per_graph.tolist()[1] == 0
    else:
        assert int(batch.num_neighbors[batch.batch_idx == 1].sum()) == 0
    others = batch[[0, 2]]
    NeighborListHook(NeighborConfig(cutoff=5.0, format=format_), skin=1.0)(
        HookContext(batch=others), DynamicsStage.BEFORE_COMPUTE
    )
    name = "neighbor_list_shifts" if format_ == "coo" else "num_neighbors"
    assert torch.equal(batch[[0, 2]][name], others[name])


def test_a_structure_that_cannot_be_searched_at_the_start_is_given_up_too(argon, three_crystals):
    data = three_crystals()
    data[2].positions[0, 0] = 1e15
    engine = NVE(argon, 2.0)
    batch = engine.run(Batch.from_data_list(data), 2)
    assert batch.status[:, 0].tolist() == [0, 0, FAILED]
    assert "too many cells away" in engine.failures[2]


def test_a_degenerate_cell_is_refused_before_the_first_step(argon, three_crystals):
    data = three_crystals()
    data[2].cell = torch.zeros(1, 3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"cell of graph 2 \(system_id 2\) is degenerate: volume 0"):
        NVE(argon, 2.0).run(Batch.from_data_list(data), 2)


def _push(size):
    """A bias with one force in graph 1 that does not belong there."""

    def bias(batch):
        forces = torch.zeros_like(batch.forces)
        forces[batch.batch_idx == 1] = size
        return torch.zeros_like(batch.energy), forces

    return BiasedPotentialHook(bias)


@pytest.mark.parametrize(
    ("limits", "size", "words"),
    [
        ({"max_force": 50.0}, 100.0, "max_force is 50 eV/Å"),
        ({"max_displacement": 0.3}, 1e4, "max_displacement is 0.3 Å"),
        ({"max_temperature": 1000.0}, 20.0, "max_temperature is 1000 K"),
        ({}, float("nan"), "forces is not finite"),
        ({}, float("inf"), "forces is not finite"),
    ],
)
def test_limits_and_values_that_are_not_finite_give_a_structure_up(well, atoms_in_wells, limits, size, words):
    batch, alone = atoms_in_wells(count=3, size=2), atoms_in_wells(count=3, size=2)
    engine = NVE(well, 1.0, hooks=[_push(size), SafetyHook(**limits)])
    engine.run(batch, 20)
    assert batch.status[:, 0].tolist() == [0, FAILED, 0]
    assert words in engine.failures[1]
    NVE(well, 1.0).run(alone, 20)
    for i in (0, 2):
        assert torch.equal(batch[i].positions, alone[i].positions)
        assert torch.equal(batch[i].velocities, alone[i].velocities)


def test_limits_that_are_kept_disturb_nobody(well, atoms_in_wells):
    batch, plain = atoms_in_wells(count=3), atoms_in_wells(count=3)
    hook = SafetyHook(max_force=1e3, max_displacement=1.0, max_temperature=1e5)
    engine = NVE(well, 1.0, hooks=[hook])
    engine.run(batch, 10)
    NVE(well, 1.0).run(plain, 10)
    assert engine.failures == {}
    assert torch.equal(batch.positions, plain.positions)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_no_positive_number_is_refused(limit):
    with pytest.raises(ValueError, match="max_force must be a positive number"):
        SafetyHook(max_force=limit)


def test_quarantine_of_the_nan_detector_keeps_the_reason(well, atoms_in_wells):
    batch = atoms_in_wells(count=3)
    engine = NVE(well, 1.0, hooks=[_push(float("nan")), NaNDetectorHook(action="quarantine")])
    engine.run(batch, 3)
    assert engine.failures == {1: "step 0: forces is not finite"}


def test_another_engine_leaves_failed_structures_alone_whatever_is_in_them(argon, three_crystals):
    batch = Batch.from_data_list(three_crystals(speed_of_second=1e6))
    NVE(argon, 2.0).run(batch, 20)
    batch.positions[batch.batch_idx == 1] = torch.nan
    FIRE(argon, convergence_hook=ConvergenceHook.from_fmax(0.01)).run(batch, 300)
    assert batch.status[:, 0].tolist() == [1, FAILED, 1]


def test_structures_that_make_no_sense_are_still_refused_at_the_start(well):
    atom = AtomicData(
        positions=torch.full((1, 3), float("nan"), dtype=torch.float64), atomic_numbers=torch.tensor([18])
    )
    with pytest.raises(ValueError, match=r"positions are not finite: atom 0 of graph 0 \(system_id 0\)"):
        NVE(well, 1.0).run(Batch.from_data_list([atom]), 1)
