"""Size of evaluations: found by trying, kept on disk, bounded by memory."""

import json
import time

import pytest
import torch
from ase.build import bulk, molecule

from nvalchemi import _cache
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import FAILED, FIRE, NVE, ConvergenceHook, SizeAwareSampler
from nvalchemi.dynamics.cost import EvaluationCost, Trial, cost_key
from nvalchemi.dynamics.evaluation import cut_by_loads
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.models import PaiNN
from nvalchemi.models.lj import LennardJonesModelWrapper
from nvalchemi.neighbors import NeighborConfig, compute_neighbors


class Recorded(LennardJonesModelWrapper):
    """Takes a time by a clock of its own, and runs out of memory above a number of edges."""

    def __init__(self, clock=None, fits=10**9, error=torch.OutOfMemoryError, per_edge=lambda edges: 1e-4):
        super().__init__(0.0104, 3.40, 8.5)
        self.clock, self.fits, self.error, self.per_edge = clock, fits, error, per_edge
        self.sizes = []

    def forward(self, data):
        edges = int(data.num_neighbors.sum())
        if edges > self.fits:
            raise self.error("out of memory")
        self.sizes.append(edges)
        if self.clock is not None:
            self.clock[0] += 0.01 + edges * self.per_edge(edges)
        return super().forward(data)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: now[0])
    return now


def argon(count, repeat=1):
    atoms = bulk("Ar", "fcc", 5.3).repeat(repeat)
    return [AtomicData.from_atoms(atoms, dtype=torch.float64) for _ in range(count)]


def slow_beyond_1500(edges):
    return 1e-4 if edges < 1500 else 3e-4


# ---------------------------------------------------------------------- what is found
def test_sizes_are_doubled_until_they_are_clearly_slower_and_the_smallest_good_one_is_taken(clock):
    batch = Batch.from_data_list(argon(64))
    model = Recorded(clock, per_edge=slow_beyond_1500)
    engine = NVE(model, 1.0, max_edges_per_eval="auto")
    engine.run(batch, 0)
    assert engine._evaluate_pieces.bound.max_edges == 1024


def test_what_was_found_is_kept_for_other_runs_of_the_same_model_only(clock):
    batch = Batch.from_data_list(argon(64))
    NVE(Recorded(clock, per_edge=slow_beyond_1500), 1.0, max_edges_per_eval="auto").run(batch, 0)
    again = Recorded(clock, per_edge=slow_beyond_1500)
    engine = NVE(again, 1.0, max_edges_per_eval="auto")
    engine.run(Batch.from_data_list(argon(64)), 0)
    assert engine._evaluate_pieces.bound.max_edges == 1024
    assert max(again.sizes) <= 1024
    assert sum(again.sizes) == int(batch.num_neighbors.sum())  # each graph once: nothing was tried
    assert cost_key(again, batch) != cost_key(LennardJonesModelWrapper(0.0104, 3.40, 8.5), batch)
    assert cost_key(again, batch) == cost_key(Recorded(), batch)


def test_a_larger_batch_is_tried_where_an_earlier_one_left_off(clock):
    small, large = Batch.from_data_list(argon(8)), Batch.from_data_list(argon(64))
    engine = NVE(Recorded(clock), 1.0, max_edges_per_eval="auto")
    engine.run(small, 0)
    first = engine._evaluate_pieces.bound.max_edges
    engine.run(large, 0)
    assert engine._evaluate_pieces.bound.max_edges > first


def test_nothing_is_written_before_something_is_measured(tmp_path):
    NVE(Recorded(), 1.0, max_edges_per_eval="auto")
    NVE(Recorded(), 1.0, max_edges_per_eval=100).run(Batch.from_data_list(argon(2)), 1)
    NVE(Recorded(), 1.0, max_edges_per_eval="auto").run(Batch.from_data_list(argon(1)), 1)
    assert not (tmp_path / "cache").exists()


def stored(trials, complete="true"):
    return f'{{"key": KEY, "value": {{"trials": {trials}, "complete": {complete}}}}}'


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"key": 1}', stored("{}"), stored('{"256": [1]}')),
        stored('{"-5": [3, 200, 0.1, 0, 1.0]}'),
        stored('{"256": [3, 200, 0.1, Infinity, 1.0]}'),
        stored('{"256": [3, 200, 0.1, -5, 1.0]}'),
        stored('{"256": [-3, 200, 0.1, 0, 1.0]}'),
        stored(f'{{"256": [3, 200, {10**400}, 0, 1.0]}}'),
        stored('{"256": [3, 200, NaN, 0, 1.0]}'),
    ],
)
def test_a_damaged_entry_is_measured_again(clock, tmp_path, content):
    for _ in range(2):
        engine = NVE(Recorded(clock, per_edge=slow_beyond_1500), 1.0, max_edges_per_eval="auto")
        engine.run(Batch.from_data_list(argon(64)), 0)
        assert engine._evaluate_pieces.bound.max_edges == 1024
        (entry,) = (tmp_path / "cache").rglob("*.json")
        key = json.loads(entry.read_text())["key"]
        entry.write_text(content.replace("KEY", json.dumps(key)))


def test_a_cache_that_cannot_be_written_is_done_without(clock, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NVALCHEMI_CACHE_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level("DEBUG", "nvalchemi"):
        engine = NVE(Recorded(clock, per_edge=slow_beyond_1500), 1.0, max_edges_per_eval="auto")
        engine.run(Batch.from_data_list(argon(64)), 0)
    assert engine._evaluate_pieces.bound.max_edges == 1024
    assert "not written" in caplog.text


def test_an_entry_that_cannot_be_put_in_its_place_leaves_nothing_behind(tmp_path):
    _cache.store("kind", {"a": 1}, "first")
    (entry,) = (tmp_path / "cache").rglob("*.json")
    entry.unlink()
    entry.mkdir()
    _cache.store("kind", {"a": 1}, "second")
    assert list(entry.parent.iterdir()) == [entry]


def test_place_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _cache.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("NVALCHEMI_CACHE_DIR")
    assert _cache.cache_dir() == tmp_path / "xdg" / "nvalchemi"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _cache.cache_dir() == tmp_path / ".cache" / "nvalchemi"


def test_a_saved_state_wins_over_the_cache(clock):
    engine = NVE(Recorded(clock, per_edge=slow_beyond_1500), 1.0, max_edges_per_eval="auto")
    engine.run(Batch.from_data_list(argon(64)), 0)
    state = engine.state_dict()
    state["parts"]["pieces"]["bound"][0] = 300
    model = Recorded(clock)
    other = NVE(model, 1.0, max_edges_per_eval="auto")
    other.load_state_dict(state)
    other.run(Batch.from_data_list(argon(64)), 2)
    assert max(model.sizes) <= 300


# ---------------------------------------------------------------------- memory
def test_fits_recover_the_cost_of_atoms_and_edges():
    def trial(atoms, edges):
        return Trial(atoms, edges, 0.01 + 3e-5 * atoms + 2e-6 * edges, 1000 + 40 * atoms + 7 * edges, 1.0)

    cost = EvaluationCost(
        {2**k: trial(*size) for k, size in enumerate([(5, 90), (8, 400), (40, 700), (90, 3000)])}
    )
    assert cost.seconds() == pytest.approx((0.01, 3e-5, 2e-6), rel=1e-6)
    assert cost.memory() == pytest.approx((1000, 40, 7), rel=1e-6)
    bound = cost.bound(torch.device("cpu"))
    assert bound.bytes_per_edge == pytest.approx(7)
    assert bound.max_bytes > trial(90, 3000).bytes


def test_memory_of_a_network_grows_with_its_edges():
    model = PaiNN(cutoff=4.0).eval()
    trials = []
    for count in (1, 4):
        atoms = [AtomicData.from_atoms(molecule("C6H6"), dtype=torch.float64) for _ in range(count)]
        batch = Batch.from_data_list(atoms)
        compute_neighbors(batch, config=model.model_config.neighbor_config)
        cost = EvaluationCost().measure(model, lambda size, batch=batch: (batch, [batch]), 1)
        trials.append(next(iter(cost.trials.values())))
    assert trials[1].bytes > 3 * trials[0].bytes > 1e5


def test_pieces_keep_within_the_limit_that_is_reached_first():
    edges, taken = [5, 5, 5, 5, 30], [1.0, 8.0, 1.0, 1.0, 1.0]
    assert cut_by_loads([edges, taken], [15, 9.5]) == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("bound", ["auto", 10_000, lambda edges: [(0, len(edges))]])
def test_pieces_that_do_not_fit_are_halved_until_they_do(bound, error, caplog):
    batch, whole = Batch.from_data_list(argon(24)), Batch.from_data_list(argon(24))
    engine = NVE(Recorded(fits=400, error=error), 1.0, max_edges_per_eval=bound)
    engine.run(batch, 2)
    NVE(LennardJonesModelWrapper(0.0104, 3.40, 8.5), 1.0).run(whole, 2)
    assert torch.equal(batch.forces, whole.forces)
    assert torch.equal(batch.energy, whole.energy)
    if bound != "auto":  # which never tries more than what fits
        assert "does not fit into the memory of cpu" in caplog.text
        engine.model.sizes.clear()
        engine.run(batch, 1)
        assert max(engine.model.sizes) <= 400


def test_later_pieces_do_not_raise_the_limit():
    batch = Batch.from_data_list(argon(13))
    compute_neighbors(batch, config=NeighborConfig(cutoff=9.5, format="matrix"))
    one = int(batch.num_neighbors.sum()) // 13
    engine = NVE(Recorded(fits=3 * one), 1.0, max_edges_per_eval=lambda edges: [(0, 8), (8, 13)])
    engine.run(batch, 0)
    assert engine._evaluate_pieces._memory_limit == 2 * one


@pytest.mark.parametrize("fits", [100, 700])
def test_what_did_not_fit_is_tried_again_when_there_may_be_more_memory(clock, fits):
    for limit in (fits, 10**9):
        engine = NVE(Recorded(clock, fits=limit, per_edge=slow_beyond_1500), 1.0, max_edges_per_eval="auto")
        engine.run(Batch.from_data_list(argon(64)), 0)
    assert engine._evaluate_pieces.bound.max_edges == 1024


def test_another_error_of_the_model_is_not_taken_for_a_lack_of_memory():
    engine = NVE(Recorded(fits=0, error=RuntimeError), 1.0, max_edges_per_eval=1000)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.run(Batch.from_data_list(argon(2)), 1)


def test_a_structure_that_does_not_fit_alone_fails_and_others_go_on():
    batch = Batch.from_data_list([*argon(2), *argon(1, repeat=2), *argon(1)])
    engine = NVE(Recorded(fits=400), 1.0, max_edges_per_eval=400)
    engine.run(batch, 2)
    assert batch.status[:, 0].tolist() == [0, 0, FAILED, 0]
    assert engine.failures[2] == "graph 2 (system_id 2) with 8 atoms does not fit into the memory of cpu"
    assert batch.energy[:, 0].isnan().tolist() == [False, False, True, False]
    alone = Batch.from_data_list(argon(1))
    NVE(Recorded(), 1.0).run(alone, 2)
    assert torch.equal(batch[3].forces, alone.forces)


def test_a_run_of_which_nothing_fits_is_an_error():
    with pytest.raises(MemoryError, match=r"graph 0 .* with 8 atoms does not fit"):
        NVE(Recorded(fits=400), 1.0, max_edges_per_eval="auto").run(
            Batch.from_data_list(argon(1, repeat=2)), 1
        )


def test_in_flight_a_structure_that_does_not_fit_leaves_as_failed():
    sink = HostMemory()
    sampler = SizeAwareSampler([*argon(2), *argon(1, repeat=2), *argon(2)], max_batch_size=1)
    engine = NVE(Recorded(fits=400), 1.0, n_steps=2, sampler=sampler, sinks=sink, max_edges_per_eval="auto")
    engine.run()
    status = {int(d.system_id): int(d.status) for d in sink.read()}
    assert status == {0: 1, 1: 1, 2: FAILED, 3: 1, 4: 1}


# ---------------------------------------------------------------------- the sampler
def test_sampler_admits_as_many_atoms_as_are_evaluated_best_at_once(clock):
    data, sink = argon(200), HostMemory()
    model = Recorded(clock, per_edge=slow_beyond_1500)
    sampler = SizeAwareSampler(data, max_atoms="auto")
    with pytest.raises(ValueError, match="decided by an engine"):
        sampler.draw(None)
    done = ConvergenceHook.from_fmax(1.0)
    engine = FIRE(model, convergence_hook=done, sampler=sampler, sinks=sink, max_edges_per_eval="auto")
    engine.run(n_steps=0)
    probe = Batch.from_data_list(argon(1))
    compute_neighbors(probe, config=NeighborConfig(cutoff=9.5, format="matrix"))
    assert sampler.max_atoms == 1024 // int(probe.num_neighbors.sum())
    engine.run()
    assert len(sink) == 200


def test_room_for_the_largest_structure_in_any_case(clock):
    data = [*argon(3), *argon(1, repeat=4)]
    sampler = SizeAwareSampler(data, max_atoms="auto")
    model = Recorded(clock, per_edge=lambda edges: 1e-4 if edges < 300 else 1e-3)
    NVE(model, 1.0, n_steps=1, sampler=sampler, sinks=HostMemory()).run()
    assert sampler.max_atoms == 64


def test_what_was_decided_is_part_of_the_state_of_the_sampler():
    decided = SizeAwareSampler(argon(5), max_atoms="auto")
    decided.choose_max_atoms(3)
    other = SizeAwareSampler(argon(5), max_atoms="auto")
    other.load_state_dict(decided.state_dict())
    assert [len(sampler.draw(None)) for sampler in (decided, other)] == [3, 3]


def test_unusable_examples_do_not_stop_the_choice(clock):
    data = argon(4)
    data[0].positions.fill_(torch.nan)
    sink = HostMemory()
    sampler = SizeAwareSampler(data, max_atoms="auto")
    NVE(Recorded(clock), 1.0, n_steps=1, sampler=sampler, sinks=sink).run()
    assert sorted(int(d.status) for d in sink.read()) == [FAILED, 1, 1, 1]
