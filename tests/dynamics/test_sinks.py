"""Sinks: what was written comes back, capacities hold, and nothing is lost in silence."""

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.zarr import AtomicDataZarrReader
from nvalchemi.dynamics import NVE, SizeAwareSampler
from nvalchemi.dynamics.hooks import SnapshotHook
from nvalchemi.dynamics.sinks import DataSink, GPUBuffer, HostMemory, ZarrData


def _sink(kind, capacity=8):
    return {
        "host": lambda: HostMemory(capacity),
        "buffer": lambda: GPUBuffer(capacity, 100, 100),
        "zarr": lambda: ZarrData("out.zarr", capacity),
    }[kind]()


KINDS = ["host", "buffer", "zarr"]


def _batch(sizes=(2, 1, 3), first_id=0):
    data = []
    for i, n in enumerate(sizes):
        structure = AtomicData(
            positions=torch.randn(n, 3, dtype=torch.float64),
            atomic_numbers=torch.full((n,), 18),
            neighbor_list=torch.tensor([[0, n - 1], [n - 1, 0]]),
            system_id=torch.tensor([[first_id + i]]),
            info={"name": f"s{first_id + i}"},
        )
        structure.add_node_property("spin_density", torch.randn(n, 2))
        structure.add_edge_property("bond_order", torch.randn(2))
        structure.add_system_property("band_gap", torch.randn(1, 1))
        data.append(structure)
    return Batch.from_data_list(data)


@pytest.mark.parametrize("kind", KINDS)
def test_custom_fields_info_and_order_survive(kind):
    sink, batch = _sink(kind), _batch()
    assert isinstance(sink, DataSink)
    sink.write(batch, torch.tensor([True, False, True]))
    sink.write(batch, torch.tensor([False, True, False]))
    back = sink.read()
    expected = batch[[0, 2, 1]]
    assert len(sink) == 3
    assert back.info == expected.info
    names = ["positions", "atomic_numbers", "spin_density", "band_gap", "system_id"]
    for name in [*names, "neighbor_list", "bond_order"] if kind != "zarr" else names:
        assert torch.equal(back[name], expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_written_structures_are_copies(kind):
    sink, batch = _sink(kind), _batch()
    before = batch.positions.clone()
    sink.write(batch)
    batch.positions.zero_()
    assert torch.equal(sink.read().positions, before)


@pytest.mark.parametrize("kind", KINDS)
def test_drain_empties_and_the_sink_goes_on(kind):
    sink = _sink(kind)
    sink.write(_batch())
    assert sink.drain().num_graphs == 3
    assert len(sink) == 0
    with pytest.raises(ValueError, match="the sink is empty"):
        sink.read()
    sink.write(_batch(first_id=10))
    assert sink.read().system_id[:, 0].tolist() == [10, 11, 12]


@pytest.mark.parametrize("kind", KINDS)
def test_full_sink_refuses_a_write_as_a_whole(kind):
    sink = _sink(kind, capacity=4)
    sink.write(_batch())
    assert not sink.is_full
    assert sink.fits(_batch()).tolist() == [True, False, False]
    with pytest.raises(RuntimeError, match="holds 3 structures and has no room for 3 more"):
        sink.write(_batch())
    assert len(sink) == 3
    sink.write(_batch((1,)))
    assert sink.is_full


@pytest.mark.parametrize("kind", KINDS)
def test_capacity_must_be_positive(kind):
    with pytest.raises(ValueError, match="capacity must be ≥ 1, got 0"):
        _sink(kind, capacity=0)


def test_zarr_store_is_appended_to_or_replaced():
    for mode, count in (("a", 3), ("a", 6), ("w", 3)):
        sink = ZarrData("out.zarr", config={"mode": mode})
        sink.write(_batch())
        sink.close()
        assert len(ZarrData("out.zarr")) == count


def test_second_run_into_a_zarr_trajectory_is_refused_unless_the_mode_is_chosen(well, atoms_in_wells):
    def run(**options):
        hook = SnapshotHook(ZarrData("path.zarr", **options), frequency=2)
        NVE(well, 1.0, hooks=[hook]).run(atoms_in_wells(), n_steps=4)

    def steps():
        reader = AtomicDataZarrReader("path.zarr")
        return [frame.system_step.item() for frame in reader.trajectory(0)]

    run()
    once = steps()
    with pytest.raises(
        ValueError, match=r"path\.zarr has frames of system_id 0 up to step 4.*mode.*'w'.*'a'"
    ):
        run()
    assert steps() == once
    run(config={"mode": "w"})
    assert steps() == once
    run(config={"mode": "a"})
    with pytest.raises(ValueError, match="both step 1 of system_id 0"):
        steps()


def test_zarr_sink_takes_other_systems_and_later_steps():
    for first_id, step in ((0, 3), (3, 1), (0, 4)):
        batch = _batch(first_id=first_id)
        batch.system_step = torch.full((3, 1), step)
        sink = ZarrData("path.zarr")
        sink.write(batch)
        sink.close()
    assert len(ZarrData("path.zarr")) == 9


def test_restored_zarr_sink_does_not_write_again_what_is_there():
    sink = ZarrData("out.zarr")
    sink.write(_batch((1, 2)))
    saved = sink.state_dict()
    sink.write(_batch((3,), first_id=2))
    sink.close()
    restarted = ZarrData("out.zarr")
    restarted.load_state_dict(saved)
    restarted.write(_batch((3, 1), first_id=2))
    assert restarted.read().system_id[:, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="holds 4 structures, 9 were in it"):
        ZarrData("out.zarr").load_state_dict({"count": 9})


def test_restored_zarr_trajectory_has_each_frame_once():
    def frames(step):
        batch = _batch((1, 2))
        batch.system_step = torch.full((2, 1), step)
        return batch

    sink = ZarrData("path.zarr")
    sink.write(frames(0))
    saved = sink.state_dict()
    for step in (1, 2):
        sink.write(frames(step))
    sink.close()
    restarted = ZarrData("path.zarr")
    restarted.load_state_dict(saved)
    for step in (1, 2, 3):
        restarted.write(frames(step))
    back = restarted.read()
    assert back.system_step[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert back.system_id[:, 0].tolist() == [0, 1] * 4


@pytest.mark.parametrize("kind", ["host", "buffer"])
def test_memory_sinks_come_back_from_their_state(kind):
    sink, other = _sink(kind), _sink(kind)
    sink.write(_batch())
    other.load_state_dict(sink.state_dict())
    assert torch.equal(other.read().positions, sink.read().positions)


# ---------------------------------------------------------------------- with engines
def test_second_sink_takes_what_the_first_has_no_room_for(well, atoms_in_wells):
    data = atoms_in_wells(count=5).to_data_list()
    first, second = HostMemory(2), HostMemory()
    sampler = SizeAwareSampler(data, max_batch_size=3)
    NVE(well, 1.0, n_steps=2, sampler=sampler, sinks=[first, second]).run()
    assert [len(first), len(second)] == [2, 3]


def test_full_sinks_stop_the_run_with_an_error_that_names_who_has_no_room(well, atoms_in_wells):
    sampler = SizeAwareSampler(atoms_in_wells(count=5).to_data_list(), max_batch_size=3)
    with pytest.raises(
        RuntimeError, match=r"all sinks are full: there is no room for 2 structures .*\[1, 2\]"
    ):
        NVE(well, 1.0, n_steps=2, sampler=sampler, sinks=HostMemory(1)).run()


def test_what_was_finished_is_on_disk_after_an_error(well, atoms_in_wells):
    class Stop:
        frequency, stage = 1, None

        def _runs_on_stage(self, stage):
            return stage.name == "AFTER_STEP"

        def __call__(self, ctx, stage):
            if ctx.step_count == 3:
                raise KeyboardInterrupt

    sampler = SizeAwareSampler(atoms_in_wells(count=5).to_data_list(), max_batch_size=3)
    engine = NVE(well, 1.0, n_steps=2, hooks=[Stop()], sampler=sampler, sinks=ZarrData("out.zarr"))
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert ZarrData("out.zarr").read().system_id[:, 0].tolist() == [0, 1, 2]


def test_working_state_stays_out_of_sinks(argon, crystal):
    sink = GPUBuffer(4, 100)
    sampler = SizeAwareSampler([crystal(seed=i) for i in range(2)], max_batch_size=1)
    NVE(argon, 1.0, n_steps=2, sampler=sampler, sinks=sink).run()
    assert not [name for name in sink.read().keys() if "neighbor" in name or "reference" in name]


def test_snapshots_go_into_a_sink_too(well, atoms_in_wells):
    sink = HostMemory()
    NVE(well, 1.0, hooks=[SnapshotHook(sink, frequency=2)]).run(atoms_in_wells(count=2), 3)
    assert sink.read().system_step[:, 0].tolist() == [1, 1, 3, 3]


# ---------------------------------------------------------------------- Batch.empty
def test_fixed_batch_takes_what_fits_moves_indices_and_closes_gaps():
    batch = _batch((2, 1, 3))
    fixed = Batch.empty(3, 5, 6, batch)
    assert fixed.put(batch).tolist() == [True, True, False]
    assert torch.equal(fixed.view().neighbor_list, batch[[0, 1]].neighbor_list)
    fixed.defrag(torch.tensor([True, False]))
    assert (fixed.num_graphs, fixed.num_nodes, fixed.num_edges) == (1, 1, 2)
    assert fixed.put(batch, torch.tensor([False, False, True])).tolist() == [False, False, True]
    expected = batch[[1, 2]]
    for name in ("positions", "neighbor_list", "bond_order", "band_gap"):
        assert torch.equal(fixed.view()[name], expected[name])
    assert fixed.view().info == expected.info
    fixed.zero()
    assert (fixed.num_graphs, fixed.num_nodes) == (0, 0)


def test_fixed_batch_refuses_other_fields():
    batch = _batch()
    fixed = Batch.empty(3, 9, 9, batch)
    other = batch.clone()
    other.remove_key("band_gap")
    with pytest.raises(ValueError, match=r"lacks \['band_gap'\]"):
        fixed.put(other)
