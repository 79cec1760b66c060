"""FreezeAtomsHook: atoms that are held do not move and do not count."""

from enum import Enum

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import FIRE, NVE, ConvergenceHook, DynamicsStage, NVTLangevin
from nvalchemi.dynamics.hooks import FreezeAtomsHook, LoggingHook
from nvalchemi.dynamics.inflight import SizeAwareSampler
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.dynamics.thermo import degrees_of_freedom, max_force, temperature
from nvalchemi.hooks import BiasedPotentialHook, HookOrderWarning, HookRegistryMixin

SUBSTRATE = 7


class Spy:
    """Calls a function at a stage."""

    def __init__(self, stage, function, frequency=1):
        self.stage, self.function, self.frequency = stage, function, frequency

    def __call__(self, ctx, stage):
        self.function(ctx)


@pytest.fixture
def half_frozen(crystal):
    """Function: a batch of moving crystals, the first half of whose atoms are of category SUBSTRATE."""

    def make(count=1, repeat=(1, 1, 1), speed=0.05) -> Batch:
        structures = []
        for seed in range(count):
            data = crystal(repeat, seed=seed, speed=speed)
            categories = torch.zeros(data.num_nodes, dtype=torch.int64)
            categories[: data.num_nodes // 2] = SUBSTRATE
            data.add_node_property("atom_categories", categories)
            structures.append(data)
        return Batch.from_data_list(structures)

    return make


def frozen_rows(batch):
    return batch.atom_categories == SUBSTRATE


def test_atoms_of_the_category_keep_their_positions_to_the_bit_and_the_others_move(argon, half_frozen):
    batch = half_frozen(2)
    held, before = frozen_rows(batch), batch.positions.clone()
    NVE(argon, dt=2.0, hooks=[FreezeAtomsHook(freeze_category=SUBSTRATE)]).run(batch, 10)
    assert torch.equal(batch.positions[held], before[held])
    assert (batch.velocities[held] == 0).all()
    assert (batch.forces[held] == 0).all()
    assert ((batch.positions - before)[~held].norm(dim=-1) > 1e-3).all()


def test_the_same_as_atoms_that_were_fixed_from_the_start(argon, half_frozen):
    hooked, fixed = half_frozen(), half_frozen()
    fixed.atom_categories = frozen_rows(fixed).long()
    NVE(argon, dt=2.0, hooks=[FreezeAtomsHook(freeze_category=SUBSTRATE)]).run(hooked, 20)
    NVE(argon, dt=2.0).run(fixed, 20)
    assert torch.equal(hooked.positions, fixed.positions)


def test_indices_count_within_each_structure(argon, crystal, cluster):
    batch = Batch.from_data_list([cluster(3, seed=1), cluster(5, seed=2)])
    before = batch.positions.clone()
    NVE(argon, dt=5.0, hooks=[FreezeAtomsHook(indices=[0, 2])]).run(batch, 5)
    still = (batch.positions == before).all(-1)
    assert still.tolist() == [True, False, True, True, False, True, False, False]


@pytest.mark.parametrize("zero_forces", [True, False])
def test_neither_temperature_nor_fmax_nor_degrees_of_freedom_count_them(argon, half_frozen, zero_forces):
    batch = half_frozen(1)
    held = frozen_rows(batch)
    seen = []

    def look(ctx):
        kinetic = 0.5 * (batch.atomic_masses[:, None] * batch.velocities**2)[~held].sum()
        seen.append(
            (
                degrees_of_freedom(batch).item(),
                temperature(batch).item() / (2 * kinetic / (6 * 8.617330337217213e-05)).item(),
                max_force(batch).item() / batch.forces[~held].norm(dim=-1).max().item(),
                (batch.forces[held] == 0).all().item(),
            )
        )

    hooks = [
        FreezeAtomsHook(freeze_category=SUBSTRATE, zero_forces=zero_forces),
        Spy(DynamicsStage.AFTER_STEP, look),
    ]
    NVE(argon, dt=2.0, hooks=hooks).run(batch, 3)
    assert seen == [(6, pytest.approx(1.0), pytest.approx(1.0), zero_forces)] * 3


def test_a_frozen_half_does_not_change_the_temperature_of_the_mobile_half(argon, half_frozen):
    # 20 copies of 16 mobile atoms, 48 degrees of freedom each: the standard error of the mean temperature over
    # 20 × 48 × 12 independent samples (friction decorrelates within 1/γ = 100 fs) is 300 sqrt(2 / 11520) = 4 K.
    batch = half_frozen(20, repeat=(2, 2, 2))
    wells = Batch.from_data_list([batch[i] for i in range(20)])
    held, before = frozen_rows(wells), wells.positions.clone()
    temperatures = []
    hooks = [
        FreezeAtomsHook(freeze_category=SUBSTRATE),
        Spy(DynamicsStage.AFTER_STEP, lambda ctx: temperatures.append(temperature(wells, False).mean()), 20),
    ]
    NVTLangevin(argon, dt=5.0, temperature=300.0, friction=0.01, random_seed=3, hooks=hooks).run(wells, 340)
    assert torch.stack(temperatures[5:]).mean().item() == pytest.approx(300, abs=16)
    assert torch.equal(wells.positions[held], before[held])


def test_relaxation_ends_when_the_free_atoms_are_relaxed(argon, half_frozen):
    batch = half_frozen(1)
    held, before = frozen_rows(batch), batch.positions.clone()
    FIRE(
        argon,
        hooks=[FreezeAtomsHook(freeze_category=SUBSTRATE, zero_forces=False)],
        convergence_hook=ConvergenceHook.from_fmax(1e-4),
    ).run(batch, 300)
    assert batch.status.item() == 1
    assert batch.forces[held].norm(dim=-1).max() > 1e-3 > batch.forces[~held].norm(dim=-1).max()
    assert torch.equal(batch.positions[held], before[held])


def test_a_hook_that_joins_between_two_runs_stops_a_minimiser_that_moves(argon, half_frozen):
    batch = half_frozen(1)
    engine = FIRE(argon)
    engine.run(batch, 5)
    engine.register_hook(FreezeAtomsHook(freeze_category=SUBSTRATE))
    held, before = frozen_rows(batch), batch.positions.clone()
    engine.run(batch, 5)
    assert torch.equal(batch.positions[held], before[held])
    assert not torch.equal(batch.positions[~held], before[~held])


def test_marks_leave_with_the_run_and_come_back_with_it_and_categories_stay(argon, half_frozen):
    batch = half_frozen(1)
    categories, before, held = batch.atom_categories.clone(), batch.positions.clone(), frozen_rows(batch)
    engine = NVE(argon, dt=2.0, hooks=[FreezeAtomsHook(frequency=10, freeze_category=SUBSTRATE)])
    engine.run(batch, 3)
    assert "frozen_atoms" not in batch
    engine.run(batch, 3)  # begins at a step at which the hook is not due
    assert torch.equal(batch.positions[held], before[held])
    assert torch.equal(batch.atom_categories, categories)
    NVE(argon, dt=2.0).run(batch, 3)
    assert not torch.equal(batch.positions[held], before[held])


def test_two_runs_equal_one(argon, half_frozen):
    one, two = half_frozen(), half_frozen()
    make = lambda: NVE(argon, dt=2.0, hooks=[FreezeAtomsHook(freeze_category=SUBSTRATE)])  # noqa: E731
    make().run(one, 10)
    engine = make()
    engine.run(two, 4)
    engine.run(two, 6)
    assert torch.equal(one.positions, two.positions)


def test_a_new_batch_is_marked_and_the_old_one_set_free(argon, half_frozen):
    engine = NVE(argon, dt=2.0, hooks=[FreezeAtomsHook(freeze_category=SUBSTRATE)])
    first, second = half_frozen(1), half_frozen(2)
    with engine:
        engine.run(first, 2)
        engine.run(second, 2)
        assert "frozen_atoms" not in first
        assert second.frozen_atoms.sum() == 4


def test_a_run_that_a_fresh_engine_takes_up_holds_them_to_the_bit(argon, half_frozen):
    def make():
        return NVE(argon, dt=2.0, hooks=[FreezeAtomsHook(frequency=7, freeze_category=SUBSTRATE)])

    whole, begun, resumed = half_frozen(2), half_frozen(2), half_frozen(2)
    make().run(whole, 10)
    first, second = make(), make()
    first.run(begun, 4)
    second.load_state_dict(first.state_dict())
    second.run(resumed, 6)
    assert torch.equal(resumed.positions, whole.positions)
    assert torch.equal(resumed.velocities, whole.velocities)


def test_structures_that_come_and_go_are_held_and_leave_free(argon, half_frozen):
    structures = half_frozen(5).to_data_list()
    sink = HostMemory()
    sampler = SizeAwareSampler(structures, max_batch_size=2)
    hooks = [FreezeAtomsHook(frequency=3, freeze_category=SUBSTRATE)]
    NVE(argon, dt=2.0, n_steps=4, hooks=hooks, sampler=sampler, sinks=[sink]).run()
    done = sink.read()
    assert sorted(done.system_id[:, 0].tolist()) == [0, 1, 2, 3, 4]
    for graph in done.to_data_list():
        start = structures[graph.system_id.item()].positions
        assert (graph.positions == start).all(-1).tolist() == [True] * 2 + [False] * 2
    before = done.positions.clone()
    done.status.zero_()
    NVE(argon, dt=2.0).run(done, 1)
    assert not (done.positions == before).all(-1).any()


def test_two_hooks_hold_the_atoms_of_both(argon, cluster):
    batch = Batch.from_data_list([cluster(4)])
    before = batch.positions.clone()
    hooks = [FreezeAtomsHook(indices=[0]), FreezeAtomsHook(indices=[2])]
    engine = NVE(argon, dt=5.0, hooks=hooks)
    engine.run(batch, 3)
    engine.run(batch, 3)
    assert (batch.positions == before).all(-1).tolist() == [True, False, True, False]


def test_inactive_structures_are_left_untouched(argon, half_frozen):
    batch = half_frozen(2)
    batch.status = torch.tensor([[0], [1]])
    NVE(argon, dt=2.0, hooks=[FreezeAtomsHook(freeze_category=SUBSTRATE)]).run(batch, 3)
    reference = half_frozen(2)
    ours, other = batch[1], reference[1]
    assert torch.equal(ours.velocities, other.velocities)
    assert torch.equal(ours.positions, other.positions)


def test_structure_woken_up_during_a_run_is_marked_too(argon, half_frozen):
    batch = half_frozen(2)
    batch.status = torch.tensor([[0], [1]])
    held, before = frozen_rows(batch), batch.positions.clone()

    def wake(ctx):
        if ctx.step_count == 2:
            batch.status.zero_()

    hooks = [Spy(DynamicsStage.AFTER_STEP, wake), FreezeAtomsHook(freeze_category=SUBSTRATE)]
    NVE(argon, dt=2.0, hooks=hooks).run(batch, 6)
    assert torch.equal(batch.positions[held], before[held])
    assert ((batch.positions - before)[~held].norm(dim=-1) > 1e-5).all()


def test_velocities_that_another_hook_gives_are_taken_away(argon, half_frozen):
    batch = half_frozen(1)
    hooks = [
        Spy(DynamicsStage.AFTER_STEP, lambda ctx: batch.velocities.fill_(0.01)),
        FreezeAtomsHook(freeze_category=SUBSTRATE),
    ]
    seen = []
    hooks.append(
        Spy(DynamicsStage.BEFORE_PRE_UPDATE, lambda ctx: seen.append(batch.velocities[:2].abs().max()))
    )
    NVE(argon, dt=2.0, hooks=hooks).run(batch, 3)
    assert max(seen) == 0


def test_logged_temperature_and_fmax_are_those_of_the_free_atoms(argon, half_frozen):
    batch, rows = half_frozen(1), []
    hooks = [
        FreezeAtomsHook(freeze_category=SUBSTRATE, zero_forces=False),
        LoggingHook("custom", writer_fn=rows.extend),
    ]
    held = frozen_rows(batch)
    NVE(argon, dt=2.0, hooks=hooks).run(batch, 1)
    assert rows[0]["fmax"] == pytest.approx(batch.forces[~held].norm(dim=-1).max().item())


def test_errors_name_what_is_missing(argon, cluster):
    batch = Batch.from_data_list([cluster(5), cluster(2)])
    with pytest.raises(ValueError, match="atoms of category 7, but the batch has no atom_categories"):
        NVE(argon, dt=1.0, hooks=[FreezeAtomsHook(freeze_category=7)]).run(batch, 1)
    with pytest.raises(ValueError, match=r"atom 3 of every structure, but graph 1 .* has 2 atoms"):
        NVE(argon, dt=1.0, hooks=[FreezeAtomsHook(indices=[1, 3])]).run(batch, 1)
    for bad in ([-1], [1, 1]):
        with pytest.raises(ValueError, match="different atoms counted from 0"):
            FreezeAtomsHook(indices=bad)


def test_an_engine_that_would_not_hold_them_is_refused():
    class Stage(Enum):
        BEFORE_STEP = 0

    class Engine(HookRegistryMixin):
        _stage_type, step_count = Stage, 0

    with pytest.raises(TypeError, match="FreezeAtomsHook works in dynamics engines only, not in Engine"):
        Engine().register_hook(FreezeAtomsHook(indices=[0]))


def test_a_bias_registered_after_it_is_questioned(argon):
    engine = NVE(argon, dt=1.0, hooks=[FreezeAtomsHook(indices=[0])])
    with pytest.warns(HookOrderWarning, match="FreezeAtomsHook is registered before BiasedPotentialHook"):
        engine.register_hook(BiasedPotentialHook(lambda batch: (batch.energy, batch.forces)))


def test_an_atom_alone_that_is_held_has_no_temperature_and_no_division_by_zero(well):
    atom = AtomicData(positions=torch.ones(1, 3, dtype=torch.float64), atomic_numbers=[18])
    batch, rows = Batch.from_data_list([atom]), []
    hooks = [FreezeAtomsHook(indices=[0]), LoggingHook("custom", writer_fn=rows.extend)]
    NVE(well, dt=1.0, hooks=hooks).run(batch, 1)
    assert rows[0]["temperature"] == rows[0]["fmax"] == 0.0
