"""In-flight batching: every structure comes out once, with its id and with the result that it has alone."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ase.io import read

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import (
    FAILED,
    FIRE,
    NPT,
    NVE,
    ConvergenceHook,
    DynamicsStage,
    FIREVariableCell,
    NVTLangevin,
    SizeAwareSampler,
)
from nvalchemi.dynamics.hooks import LoggingHook, SafetyHook, SnapshotHook
from nvalchemi.dynamics.sinks import ExtxyzTrajectory, HostMemory, ZarrData
from nvalchemi.hooks import BiasedPotentialHook
from nvalchemi.models.lj import LennardJonesModelWrapper

RESULTS = ("positions", "velocities", "forces", "energy", "system_step", "status")


def _clusters(cluster, sizes):
    return [cluster(n, seed=i) for i, n in enumerate(sizes)]


def _by_id(batch):
    ids = batch.system_id[:, 0].tolist()
    assert len(set(ids)) == len(ids)
    return {i: batch[place] for place, i in enumerate(ids)}


def _assert_as_alone(results, data, make_engine, **run):
    for i, structure in enumerate(data):
        alone = Batch.from_data_list([structure])
        alone.system_id = torch.tensor([[i]])
        make_engine().run(alone, **run)
        for name in RESULTS[:-1]:
            assert torch.equal(results[i][name], alone[0][name]), (i, name)


def test_relaxed_in_flight_as_alone_to_the_bit(argon, cluster):
    data = _clusters(cluster, [5, 2, 6, 3, 4, 2, 7, 3, 5, 4])

    def make(**options):
        return FIRE(argon, convergence_hook=ConvergenceHook.from_fmax(0.001), **options)

    sink = HostMemory()
    sampler = SizeAwareSampler(data, max_atoms=12, max_batch_size=3)
    left = make(sampler=sampler, sinks=sink).run()
    assert left.num_graphs == 0
    results = _by_id(sink.drain())
    assert sorted(results) == list(range(10))
    assert all(int(r.status) == 1 for r in results.values())
    _assert_as_alone(results, data, make)


def test_dynamics_in_flight_makes_n_steps_of_each_and_is_as_alone_to_the_bit(argon, crystal):
    data = [crystal(seed=i, speed=0.02 * (i + 1), a=5.3 + 0.05 * i) for i in range(5)]

    def make(**options):
        return NVTLangevin(argon, 2.0, 60.0, 0.01, n_steps=30, **options)

    sink = HostMemory()
    make(sampler=SizeAwareSampler(data, max_batch_size=2), sinks=sink).run()
    results = _by_id(sink.read())
    assert [int(results[i].system_step) for i in range(5)] == [30] * 5
    _assert_as_alone(results, data, make)


def test_a_bias_acts_once_on_the_first_forces_of_those_that_enter(well):
    data = [
        AtomicData(
            positions=torch.full((1, 3), 0.1 * (i + 1), dtype=torch.float64),
            atomic_numbers=torch.tensor([18]),
            velocities=torch.zeros(1, 3, dtype=torch.float64),
        )
        for i in range(5)
    ]

    def make(**options):
        def pull(batch):
            return torch.zeros_like(batch.energy), -2.0 * batch.positions

        hook = ConvergenceHook(
            {"key": "velocities", "threshold": 0.0, "custom_op": lambda v: v.abs().amax(1) > 0.01}
        )
        return NVE(well, 1.0, hooks=[BiasedPotentialHook(pull)], convergence_hook=hook, **options)

    sink = HostMemory()
    make(sampler=SizeAwareSampler(data, max_batch_size=2), sinks=sink).run()
    results = _by_id(sink.read())
    assert len({int(r.system_step) for r in results.values()}) > 1
    _assert_as_alone(results, data, make)


class _Watch:
    frequency, stage = 7, None

    def __init__(self):
        self.admitted, self.graduated = [], []

    def _runs_on_stage(self, stage):
        return stage in (DynamicsStage.ON_ADMISSION, DynamicsStage.ON_GRADUATE)

    def __call__(self, ctx, stage):
        ids = ctx.batch.system_id[:, 0]
        if stage is DynamicsStage.ON_ADMISSION:
            self.admitted.append(ids[ctx.admitted_mask].tolist())
        else:
            self.graduated += ids[ctx.graduated_mask].tolist()


def test_admission_shows_each_structure_once_and_in_groups_that_fit(well, atoms_in_wells):
    data = atoms_in_wells(count=5).to_data_list()
    watch = _Watch()
    sampler = SizeAwareSampler(data, max_batch_size=2)
    NVE(well, 1.0, n_steps=7, hooks=[watch], sampler=sampler, sinks=HostMemory()).run()
    assert watch.admitted == [[0, 1], [2, 3], [4]]
    assert watch.graduated == []  # frequency 7: only a graph that is done in a step 0, 7, … is shown


class _Finish:
    """Moves a structure to its end in the step in which it has made as many as its id asks for."""

    frequency, stage = 1, DynamicsStage.AFTER_STEP
    steps = (5, 7, 9)

    def __call__(self, ctx, stage):
        batch = ctx.batch
        limit = torch.tensor(self.steps)[batch.system_id[:, 0] % 3]
        batch.status.masked_fill_((batch.system_step[:, 0] >= limit)[:, None], 1)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_systems_that_finish_at_5_7_and_9_leave_5_7_and_9_frames_and_rows(well, atoms_in_wells, slots):
    data = atoms_in_wells(count=3).to_data_list()
    hooks = [SnapshotHook(ExtxyzTrajectory("path.extxyz")), LoggingHook(log_path="log.csv"), _Finish()]
    sampler = SizeAwareSampler(data, max_batch_size=slots)
    NVE(well, 1.0, n_steps=100, hooks=hooks, sampler=sampler).run()
    frames = [frame.info["system_id"] for frame in read("path.extxyz", ":")]
    with open("log.csv") as file:
        rows = [int(row["system_id"]) for row in csv.DictReader(file)]
    assert [frames.count(i) for i in range(3)] == [5, 7, 9]
    assert [rows.count(i) for i in range(3)] == [5, 7, 9]


# ---------------------------------------------------------------------- failures
def test_failed_structures_leave_with_their_reason_and_disturb_nobody(argon, crystal):
    data = [crystal(seed=i, speed=0.01) for i in range(6)]
    data[1].velocities[0, 0] = 1e6
    data[2].positions[0, 0] = float("nan")
    data[4].cell = torch.zeros(1, 3, 3, dtype=torch.float64)

    def make(**options):
        return NVE(argon, 2.0, n_steps=12, **options)

    sink = HostMemory()
    engine = make(sampler=SizeAwareSampler(data, max_batch_size=2), sinks=sink)
    engine.run()
    results = _by_id(sink.read())
    assert [int(results[i].status) for i in range(6)] == [1, FAILED, FAILED, 1, FAILED, 1]
    assert sorted(engine.failures) == [1, 2, 4]
    assert {i: results[i].info["failure"] for i in (1, 2, 4)} == engine.failures
    for i in (0, 3, 5):
        alone = Batch.from_data_list([data[i]])
        make().run(alone)
        assert torch.equal(results[i].positions, alone.positions)


def test_a_sampler_registers_a_check_for_values_that_are_not_finite(well, atoms_in_wells):
    sampler = SizeAwareSampler(atoms_in_wells().to_data_list(), max_batch_size=2)
    engine = NVE(well, 1.0, n_steps=1, sampler=sampler, sinks=HostMemory())
    engine.run()
    assert [type(hook) for hook in engine.hooks] == [SafetyHook]


def test_structures_without_a_periodic_cell_fail_alone_in_a_variable_cell(argon, crystal, cluster):
    molecule, flat = cluster(4), crystal(seed=1)
    molecule.add_node_property("velocities", torch.zeros(4, 3, dtype=torch.float64))
    flat.cell[0, 2] = flat.cell[0, 1]
    slab = crystal(seed=2)
    slab.pbc[0, 2] = False
    data = [molecule, crystal(seed=3), flat, slab, crystal(seed=4)]
    sink = HostMemory()
    done = ConvergenceHook.from_fmax(0.01)
    sampler = SizeAwareSampler(data, max_batch_size=2)
    engine = FIREVariableCell(argon, convergence_hook=done, sampler=sampler, sinks=sink)
    engine.run()
    results = _by_id(sink.read())
    assert [int(results[i].status) for i in range(5)] == [FAILED, 1, FAILED, FAILED, 1]
    assert "graph 0 (system_id 0) has pbc [False, False, False] and volume 0" in engine.failures[0]
    assert "degenerate" in engine.failures[2]
    assert "needs cells periodic in three directions" in engine.failures[3]
    alone = Batch.from_data_list([data[4]])
    FIREVariableCell(argon, convergence_hook=done).run(alone)
    assert torch.equal(results[4].positions, alone.positions)


def test_barostat_and_fused_stages_let_molecules_fail_alone_too(argon, crystal, cluster):
    def npt(**options):
        return NPT(argon, 2.0, 60.0, 0.0, 1000.0, 100.0, n_steps=2, **options)

    for engine in (npt(), FIRE(argon, n_steps=2) + npt()):
        sink = HostMemory()
        engine.feed_from(SizeAwareSampler([cluster(4), crystal()], max_batch_size=1))
        engine.sinks = (sink,)
        engine.run()
        status = {int(d.system_id): int(d.status) for d in sink.read()}
        assert status[0] == FAILED
        assert status[1] > 0


def test_a_structure_that_needs_no_run_has_no_made_up_energy(well, atoms_in_wells):
    batch = atoms_in_wells(count=2)
    assert "energy" not in batch
    batch.status = torch.tensor([[1], [0]])
    NVE(well, 1.0, n_steps=1).run(batch)
    assert batch.energy[:, 0].isnan().tolist() == [True, False]


def test_a_run_that_keeps_no_structure_warns(well, atoms_in_wells):
    data = atoms_in_wells().to_data_list()
    engine = NVE(well, 1.0, n_steps=1, sampler=SizeAwareSampler(data, max_batch_size=2))
    with pytest.warns(UserWarning, match="nothing keeps them: give the engine sinks="):
        engine.run()
    hooks = [SnapshotHook(HostMemory())]
    NVE(well, 1.0, n_steps=1, hooks=hooks, sampler=SizeAwareSampler(data, max_batch_size=2)).run()


@pytest.mark.parametrize("size", [1, 2])
def test_zero_steps_for_each_structure_is_an_evaluation_of_all(argon, cluster, size):
    data = _clusters(cluster, [4, 3, 5])
    sink = HostMemory()
    sampler = SizeAwareSampler(data, max_batch_size=size)
    assert NVE(argon, 1.0, n_steps=0, sampler=sampler, sinks=sink).run().num_graphs == 0
    results = _by_id(sink.read())
    assert [int(results[i].system_step) for i in range(3)] == [0, 0, 0]
    assert [int(results[i].status) for i in range(3)] == [1, 1, 1]
    _assert_as_alone(results, data, lambda: NVE(argon, 1.0), n_steps=0)


def test_all_structures_unusable_is_an_empty_result_with_reasons(well, atoms_in_wells):
    data = atoms_in_wells(count=3).to_data_list()
    for structure in data:
        structure.positions.fill_(float("inf"))
    sink = HostMemory()
    engine = NVE(well, 1.0, n_steps=1, sampler=SizeAwareSampler(data, max_batch_size=2), sinks=sink)
    assert engine.run().num_graphs == 0
    assert len(sink) == 3
    assert sorted(engine.failures) == [0, 1, 2]


# ---------------------------------------------------------------------- running
def test_a_limit_leaves_what_is_under_way_and_the_next_call_goes_on(argon, cluster):
    data = _clusters(cluster, [4, 3, 5, 2])

    def make(**options):
        return FIRE(argon, convergence_hook=ConvergenceHook.from_fmax(0.001), **options)

    sink = HostMemory()
    engine = make(sampler=SizeAwareSampler(data, max_batch_size=2), sinks=sink)
    left = engine.run(n_steps=3)
    assert left.num_graphs == 2
    while engine.run(n_steps=40).num_graphs > 0:
        pass
    results = _by_id(sink.read())
    assert sorted(results) == [0, 1, 2, 3]
    _assert_as_alone(results, data, make)


def test_restored_in_flight_run_ends_as_the_uninterrupted_one(argon, cluster, tmp_path):
    data = _clusters(cluster, [4, 3, 5, 2, 3])

    def make(sink):
        sampler = SizeAwareSampler(data, max_batch_size=2)
        return FIRE(argon, convergence_hook=ConvergenceHook.from_fmax(0.001), sampler=sampler, sinks=sink)

    whole, resumed = HostMemory(), HostMemory()
    make(whole).run()
    first = make(HostMemory())
    first.run(n_steps=60)
    second = make(resumed)
    second.load_state_dict(first.state_dict())
    second.run()
    expected, found = _by_id(whole.read()), _by_id(resumed.read())
    assert sorted(found) == list(range(5))
    for i in range(5):
        for name in RESULTS:
            assert torch.equal(found[i][name], expected[i][name]), (i, name)


def test_per_graph_tensors_are_refused_with_a_sampler(well, atoms_in_wells):
    sampler = SizeAwareSampler(atoms_in_wells().to_data_list(), max_batch_size=2)
    engine = NVE(well, torch.tensor([1.0, 2.0]), n_steps=1, sampler=sampler)
    with pytest.raises(ValueError, match="dt of NVE has one value for each graph"):
        engine.run()


def test_a_run_without_batch_and_without_sampler_is_refused(well):
    with pytest.raises(ValueError, match="needs a batch, or an engine with a sampler"):
        NVE(well, 1.0, n_steps=1).run()


def test_plain_run_delivers_each_structure_to_the_sink_once_when_it_stops(well, atoms_in_wells):
    batch, sink = atoms_in_wells(count=3), HostMemory()
    engine = NVE(well, 1.0, n_steps=6, hooks=[_Finish()], sinks=sink)
    engine.run(batch)
    assert sink.read().system_id[:, 0].tolist() == [0]
    engine.run(batch)
    assert sink.read().system_id[:, 0].tolist() == [0, 1, 2]
    assert sink.read().system_step[:, 0].tolist() == [5, 7, 9]


def test_state_of_earlier_runs_and_labels_of_the_dataset(well, atoms_in_wells):
    batch = atoms_in_wells(count=4)
    NVE(well, 1.0).run(batch, 3)
    batch.status.fill_(1)
    batch.add_key("band_gap", torch.arange(4.0)[:, None], "system")
    sink = HostMemory()
    sampler = SizeAwareSampler([(data, {"name": f"s{i}"}) for i, data in enumerate(batch)], max_batch_size=3)
    NVE(well, 1.0, n_steps=2, sampler=sampler, sinks=sink).run()
    results = _by_id(sink.read())
    assert [float(results[i].band_gap) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert [results[i].info["name"] for i in range(4)] == ["s0", "s1", "s2", "s3"]
    assert all(int(r.system_step) == 2 for r in results.values())
    assert batch.status[:, 0].tolist() == [1] * 4


# ---------------------------------------------------------------------- sampler
def test_sampler_keeps_within_every_budget_and_hands_out_all(cluster):
    data = _clusters(cluster, [5, 2, 6, 3, 4, 2, 7, 3])
    sampler = SizeAwareSampler(data, max_atoms=9, max_batch_size=2)
    seen = []
    while drawn := sampler.draw(None):
        assert len(drawn) <= 2
        assert sum(d.num_nodes for d in drawn) <= 9
        seen += [int(d.system_id) for d in drawn]
    assert sorted(seen) == list(range(8))


def test_sampler_counts_what_is_still_out(cluster):
    sampler = SizeAwareSampler(_clusters(cluster, [5, 4, 3, 2]), max_atoms=9)
    first = sampler.draw(None)
    assert [int(d.system_id) for d in first] == [0, 1]
    out = Batch.from_data_list([first[0]])
    assert [int(d.system_id) for d in sampler.draw(out)] == [2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_atoms": 6}, "structure 2 of the dataset has 7 atoms, more than max_atoms=6"),
        ({"max_edges": 6}, "the dataset has none"),
        ({}, "needs max_atoms, max_edges or max_batch_size"),
        ({"max_batch_size": 0}, "max_batch_size must be ≥ 1"),
    ],
)
def test_impossible_budgets_are_refused_at_construction(cluster, options, words):
    with pytest.raises(ValueError, match=words):
        SizeAwareSampler(_clusters(cluster, [5, 2, 7]), **options)


def test_sizes_are_asked_for_and_not_loaded_where_the_dataset_knows_them(cluster):
    class Dataset:
        loaded = 0

        def __len__(self):
            return 3

        def __getitem__(self, index):
            self.loaded += 1
            return cluster(index + 1)

        def get_metadata(self, index):
            return index + 1, 10 * index

    dataset = Dataset()
    sampler = SizeAwareSampler(dataset, max_edges=20)
    assert dataset.loaded == 0
    assert [int(d.system_id) for d in sampler.draw(None)] == [2, 0]
    assert dataset.loaded == 2


def test_shuffle_mixes_structures_of_one_bin_only(cluster):
    data = _clusters(cluster, [2] * 8 + [6] * 8)
    drawn = SizeAwareSampler(data, max_batch_size=16, shuffle=True, random_seed=3).draw(None)
    order = [int(d.system_id) for d in drawn]
    assert sorted(order[:8]) == list(range(8, 16))
    assert order[:8] != sorted(order[:8])


RESTARTED = """
import sys
sys.path.insert(0, {here!r})
import os, torch
from test_inflight import restartable
engine = restartable()

class Kill:
    frequency, stage = 1, None

    def _runs_on_stage(self, stage):
        return stage.name == "AFTER_STEP"

    def __call__(self, ctx, stage):
        if ctx.step_count == 37:
            os._exit(9)

engine.register_hook(Kill())
engine.run(restart="run.restart", save_every=10)
"""


def restartable():
    argon = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)
    rows = [3.6 + 0.1 * torch.arange(6.0, dtype=torch.float64), torch.arange(1, 7)]
    data = []
    for spacing, n in zip(*rows, strict=True):
        positions = torch.zeros(int(n), 3, dtype=torch.float64)
        positions[:, 0] = spacing * torch.arange(int(n))
        data.append(AtomicData(positions=positions, atomic_numbers=torch.full((int(n),), 18)))
    sampler = SizeAwareSampler(data, max_batch_size=2)
    return NVTLangevin(argon, 2.0, 20.0, 0.01, n_steps=15, sampler=sampler, sinks=ZarrData("out.zarr"))


def test_killed_run_goes_on_and_no_structure_is_lost_or_doubled(monkeypatch, tmp_path):
    program = RESTARTED.format(here=str(Path(__file__).parent))
    killed = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert killed.returncode == 9, killed.stderr
    restartable().run(restart="run.restart", save_every=10)
    results = _by_id(ZarrData("out.zarr").read())
    other = tmp_path / "uninterrupted"
    other.mkdir()
    monkeypatch.chdir(other)
    restartable().run()
    expected = _by_id(ZarrData("out.zarr").read())
    assert sorted(results) == sorted(expected) == list(range(6))
    for i in range(6):
        for name in RESULTS:
            assert torch.equal(results[i][name], expected[i][name]), (i, name)
