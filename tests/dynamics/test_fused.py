"""Fused stages: the path of a structure is the one through the engines run one after another on it alone."""

import pytest
import torch

from nvalchemi.data import Batch
from nvalchemi.dynamics import (
    FAILED,
    FIRE,
    NVE,
    ConvergenceHook,
    DynamicsStage,
    FIREVariableCell,
    FusedStage,
    NVTLangevin,
    SizeAwareSampler,
)
from nvalchemi.dynamics.hooks import FreezeAtomsHook, InitializeVelocitiesHook, LoggingHook, SafetyHook
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.hooks import BiasedPotentialHook, NeighborListHook
from nvalchemi.neighbors import NeighborConfig

PATH = ("positions", "velocities", "forces", "energy", "system_step")


def _relax(model, **options):
    return FIRE(model, convergence_hook=ConvergenceHook.from_fmax(0.005), **options)


def _sample(model, n_steps=12, temperature=30.0, hooks=(), **options):
    start = InitializeVelocitiesHook(temperature, random_seed=3)
    return NVTLangevin(model, 2.0, temperature, 0.01, n_steps=n_steps, hooks=[start, *hooks], **options)


def _one_after_another(data, number, engines):
    batch = Batch.from_data_list([data])
    batch.system_id = torch.tensor([[number]])
    for engine in engines:
        batch.status.fill_(0) if "status" in batch else None
        engine.run(batch)
    return batch


def _assert_same_path(found, expected):
    for name in PATH:
        assert torch.equal(found[name], expected[0][name]), name


def test_relaxed_then_sampled_as_one_after_another_to_the_bit(argon, crystal):
    data = [crystal(seed=i, rattle=0.02 + 0.04 * i) for i in range(3)]
    batch = Batch.from_data_list(data)
    (_relax(argon) + _sample(argon)).run(batch)
    assert batch.status[:, 0].tolist() == [2, 2, 2]
    assert len(set(batch.system_step[:, 0].tolist())) > 1
    for i in range(3):
        _assert_same_path(batch[i], _one_after_another(data[i], i, [_relax(argon), _sample(argon)]))


def test_three_stages_with_a_variable_cell(argon, crystal):
    def engines():
        return [
            FIREVariableCell(argon, convergence_hook=ConvergenceHook.from_fmax(0.01), n_steps=40),
            _sample(argon, 8),
            NVE(argon, 1.0, n_steps=5),
        ]

    data = [crystal(seed=i, a=5.3 + 0.05 * i) for i in range(3)]
    batch = Batch.from_data_list(data)
    a, b, c = engines()
    fused = a + b + c
    assert [type(stage) for stage in fused.stages] == [FIREVariableCell, NVTLangevin, NVE]
    fused.run(batch)
    for i in range(3):
        alone = _one_after_another(data[i], i, engines())
        assert torch.equal(batch[i].cell, alone.cell)
        _assert_same_path(batch[i], alone)


def test_forces_on_entry_are_those_of_the_stage_entered(well, atoms_in_wells):
    """Each stage has its own bias; the first half kick must use it."""

    def pull(k):
        return BiasedPotentialHook(lambda batch: (torch.zeros_like(batch.energy), -k * batch.positions))

    def engines():
        return [NVE(well, 1.0, n_steps=4, hooks=[pull(1.0)]), NVE(well, 2.0, n_steps=3, hooks=[pull(5.0)])]

    batch = atoms_in_wells(count=2)
    data = batch.clone().to_data_list()
    FusedStage(engines()).run(batch)
    for i in range(2):
        _assert_same_path(batch[i], _one_after_another(data[i], i, engines()))


def test_one_evaluation_per_step_serves_all_stages(well, atoms_in_wells):
    batch = atoms_in_wells(count=4)
    batch.status = torch.tensor([[0], [1], [0], [1]])
    (NVE(well, 1.0, n_steps=3) + NVE(well, 1.0, n_steps=3)).run(batch)
    # At admission and in each step one; those that enter the second stage are evaluated once more.
    assert [len(ids) for ids in well.graphs_seen] == [4, 4, 4, 4, 2, 2, 2, 2]


def test_structure_starts_in_the_stage_that_its_status_names(well, atoms_in_wells):
    batch = atoms_in_wells(count=3)
    batch.status = torch.tensor([[1], [0], [2]])
    (NVE(well, 1.0, n_steps=3) + NVE(well, 1.0, n_steps=2)).run(batch)
    assert batch.system_step[:, 0].tolist() == [2, 5, 0]
    assert batch.status[:, 0].tolist() == [2, 2, 2]


class _Watch:
    def __init__(self, stage, mask):
        self.frequency, self.stage, self.mask, self.seen = 1, stage, mask, []

    def __call__(self, ctx, stage):
        mask = getattr(ctx, self.mask)
        ids = ctx.batch.system_id[:, 0]
        self.seen.append((ctx.step_count, (ids if mask is None else ids[mask]).tolist()))


def test_hooks_of_a_stage_see_its_own_graphs_and_those_of_the_whole_see_all(well, atoms_in_wells):
    first, second, whole = (_Watch(DynamicsStage.AFTER_STEP, "active_graph_mask") for _ in range(3))
    batch = atoms_in_wells(count=3)
    batch.status = torch.tensor([[0], [1], [0]])
    a = NVE(well, 1.0, n_steps=2, hooks=[first])
    b = NVE(well, 1.0, n_steps=3, hooks=[second])
    fused = a + b
    fused.register_hook(whole)
    fused.run(batch)
    assert first.seen == [(0, [0, 2]), (1, [0, 2])]
    assert second.seen == [(0, [1]), (1, [1]), (2, [0, 1, 2]), (3, [0, 2]), (4, [0, 2])]
    assert whole.seen == [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [0, 1, 2]), (3, [0, 2]), (4, [0, 2])]


def test_admission_and_graduation_are_announced_where_they_happen(well, atoms_in_wells):
    names = ("admitted_mask", "graduated_mask")
    stages = (DynamicsStage.ON_ADMISSION, DynamicsStage.ON_GRADUATE)
    watches = [[_Watch(s, m) for s, m in zip(stages, names, strict=True)] for _ in range(3)]
    a = NVE(well, 1.0, n_steps=2, hooks=watches[0])
    b = NVE(well, 1.0, n_steps=1, hooks=watches[1])
    FusedStage([a, b], hooks=watches[2]).run(atoms_in_wells(count=2))
    ids = [[[ids for _, ids in watch.seen] for watch in pair] for pair in watches]
    assert ids == [[[[0, 1]]] * 2] * 3


def test_hook_that_moves_a_status_in_mid_step_hands_over_at_the_end_of_the_step(well, atoms_in_wells):
    class Push:
        frequency, stage = 1, DynamicsStage.AFTER_COMPUTE

        def __call__(self, ctx, stage):
            if ctx.step_count == 1:
                ctx.batch.status[1] = 1

    batch, plain = atoms_in_wells(count=2), atoms_in_wells(count=2)
    (NVE(well, 1.0, n_steps=5, hooks=[Push()]) + NVE(well, 1.0, n_steps=3)).run(batch)
    assert batch.system_step[:, 0].tolist() == [8, 5]
    NVE(well, 1.0).run(plain, 5)
    torch.testing.assert_close(batch[1].positions, plain[1].positions, rtol=0, atol=1e-14)


def test_atoms_frozen_by_one_stage_move_in_the_next(argon, crystal):
    data = crystal(seed=1)
    batch = Batch.from_data_list([data])
    held = FreezeAtomsHook(indices=[0])
    relax = FIRE(argon, n_steps=5, hooks=[held])
    seen = []

    class Look:
        frequency, stage = 1, DynamicsStage.ON_ADMISSION

        def __call__(self, ctx, stage):
            seen.append(ctx.batch.positions[0].clone())

    (relax + _sample(argon, 5, hooks=[Look()])).run(batch)
    assert torch.equal(seen[0], data.positions[0])
    assert not torch.equal(batch.positions[0], data.positions[0])


def test_failed_structure_leaves_all_stages_with_its_reason(argon, crystal):
    data = [crystal(seed=i, speed=0.01) for i in range(3)]
    data[1].velocities[0, 0] = 1e6
    batch = Batch.from_data_list(data)
    fused = NVE(argon, 2.0, n_steps=6, hooks=[SafetyHook(max_displacement=1.0)]) + NVE(argon, 1.0, n_steps=4)
    fused.run(batch)
    assert batch.status[:, 0].tolist() == [2, FAILED, 2]
    assert list(fused.failures) == [1]


def test_rows_of_a_stages_log_are_of_its_own_structures(well, atoms_in_wells):
    rows = []
    log = LoggingHook(backend="custom", writer_fn=lambda new: rows.extend(new))
    batch = atoms_in_wells(count=3)
    batch.status = torch.tensor([[0], [1], [0]])
    (NVE(well, 1.0, n_steps=2) + NVE(well, 1.0, n_steps=3, hooks=[log])).run(batch)
    assert [row["system_id"] for row in rows].count(1) == 3
    assert len(rows) == 9


def test_neighbor_hook_of_a_stage_becomes_the_one_of_all(argon, crystal):
    hook = NeighborListHook(argon.model_config.neighbor_config, skin=0.7)
    fused = FIRE(argon, n_steps=2, hooks=[hook]) + NVE(argon, 1.0, n_steps=2)
    fused.run(Batch.from_data_list([crystal()]))
    assert [h for h in fused.hooks if isinstance(h, NeighborListHook)] == [hook]
    assert hook.num_builds == 1


def test_of_the_neighbor_hooks_of_stages_the_widest_of_each_format_stays(argon):
    own = argon.model_config.neighbor_config
    given = [
        NeighborListHook(config, skin=0.7)
        for config in (own, NeighborConfig(cutoff=4.0), own.model_copy(update={"cutoff": 9.0}), own)
    ]
    a, b, c = (NVE(argon, 1.0, n_steps=2, hooks=hooks) for hooks in (given[:2], given[2:3], given[3:]))
    assert list((a + b + c).hooks) == given[1:3]


# ---------------------------------------------------------------------- in flight
def test_in_flight_through_two_stages_as_alone_to_the_bit(argon, cluster):
    data = [cluster(n, seed=i) for i, n in enumerate([4, 2, 5, 3, 4, 2])]
    sink = HostMemory()
    sampler = SizeAwareSampler(data, max_batch_size=2)
    fused = _relax(argon, sampler=sampler) + _sample(argon, 6, sinks=sink)
    assert fused.run().num_graphs == 0
    results = sink.read()
    ids = results.system_id[:, 0].tolist()
    assert sorted(ids) == list(range(6))
    for place, i in enumerate(ids):
        _assert_same_path(results[place], _one_after_another(data[i], i, [_relax(argon), _sample(argon, 6)]))


def test_restored_fused_run_ends_as_the_uninterrupted_one(argon, crystal):
    data = [crystal(seed=i, rattle=0.02 + 0.04 * i) for i in range(3)]
    whole, first_batch, second_batch = (Batch.from_data_list(data) for _ in range(3))
    (_relax(argon) + _sample(argon)).run(whole)
    first, second = (_relax(argon) + _sample(argon) for _ in range(2))
    first.run(first_batch, 15)
    saved = first.state_dict()
    second.load_state_dict(saved)
    second.run(second_batch)
    first.run(first_batch)
    for name in PATH:
        assert torch.equal(second_batch[name], whole[name]), name
        assert torch.equal(first_batch[name], whole[name]), name
    first.load_state_dict(saved)  # back to the middle, in the same batch
    first.run(first_batch)
    assert torch.equal(first_batch.positions, whole.positions)
    assert first.stages[1].step_count == second.stages[1].step_count


# ---------------------------------------------------------------------- refused
def test_stages_with_different_models_are_refused(well, argon):
    with pytest.raises(ValueError, match=r"share one model: NVE \(stage 1\) has another"):
        NVE(well, 1.0, n_steps=1) + NVE(argon, 1.0, n_steps=1)


def test_what_cannot_be_fused_is_refused(well):
    engine = NVE(well, 1.0, n_steps=1)
    with pytest.raises(ValueError, match="an engine can be only one stage"):
        engine + engine
    with pytest.raises(ValueError, match=r"\(stage 1\) has n_steps=0"):
        engine + NVE(well, 1.0, n_steps=0)
    with pytest.raises(ValueError, match="at least two engines"):
        FusedStage([engine])
    with pytest.raises(ValueError, match="give it the ConvergenceHook"):
        FusedStage([engine, NVE(well, 1.0, n_steps=1)], hooks=[ConvergenceHook()])


def test_a_run_in_which_a_stage_would_never_let_go_needs_a_limit(well, atoms_in_wells):
    fused = NVE(well, 1.0, n_steps=1) + NVE(well, 1.0)
    with pytest.raises(ValueError, match="would never end"):
        fused.run(atoms_in_wells())
    assert fused.run(atoms_in_wells(), 4).system_step[:, 0].tolist() == [4, 4, 4]
