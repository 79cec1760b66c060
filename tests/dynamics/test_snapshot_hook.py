import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk

from nvalchemi.data import AtomicData, AtomicDataZarrReader, Batch, read
from nvalchemi.dynamics import NVE, DynamicsStage, SizeAwareSampler, initialize_velocities
from nvalchemi.dynamics.hooks import SnapshotHook
from nvalchemi.dynamics.hooks.snapshot import ALWAYS_KEPT
from nvalchemi.dynamics.sinks import ExtxyzTrajectory, HostMemory, SnapshotSink, ZarrData
from nvalchemi.models.lj import LennardJonesModelWrapper


class ConvergeAt:
    """Move structure k to the exit status at the end of step ``steps[k]``, counted from 1."""

    frequency = 1
    stage = DynamicsStage.AFTER_STEP

    def __init__(self, steps):
        self.steps = torch.tensor(steps)

    def __call__(self, ctx, stage):
        ctx.batch.status.masked_fill_((self.steps == ctx.step_count + 1)[:, None], 1)


class Recorder:
    """Sink that keeps (system_id, system_step) of every frame."""

    def __init__(self):
        self.frames = []

    def write(self, batch, mask=None):
        chosen = batch if mask is None else batch[mask]
        self.frames += zip(chosen.system_id[:, 0].tolist(), chosen.system_step[:, 0].tolist(), strict=True)

    def close(self):
        pass


def argon_batch(count: int = 3) -> Batch:
    crystals = [bulk("Ar", "fcc", a=5.3 + 0.05 * k, cubic=True) for k in range(count)]
    for k, atoms in enumerate(crystals):
        atoms.info["name"] = f"crystal {k}"
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64) for atoms in crystals])
    initialize_velocities(batch, 50.0, random_seed=1)
    return batch


def nve(*hooks) -> NVE:
    return NVE(LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5), dt=2.0, hooks=list(hooks))


def test_structures_that_finish_at_steps_5_7_9_have_as_many_frames():
    sink = Recorder()
    nve(SnapshotHook(sink), ConvergeAt([5, 7, 9])).run(argon_batch(), n_steps=20)
    for system, count in enumerate((5, 7, 9)):
        assert [step for who, step in sink.frames if who == system] == list(range(1, count + 1))


def test_last_state_of_every_structure_is_written_when_the_run_ends():
    sink = Recorder()
    nve(SnapshotHook(sink, frequency=4), ConvergeAt([5, 7, 100])).run(argon_batch(), n_steps=12)
    assert [[step for who, step in sink.frames if who == k] for k in range(3)] == [
        [1, 5],
        [1, 5, 7],
        [1, 5, 9, 12],
    ]


def test_extxyz_frames_can_be_told_apart_and_hold_the_whole_state():
    batch = argon_batch(2)
    nve(SnapshotHook(ExtxyzTrajectory("deep/traj.extxyz"), frequency=2)).run(batch, n_steps=4)
    frames = ase.io.read("deep/traj.extxyz", ":")
    assert [(f.info["system_id"], f.info["system_step"]) for f in frames] == [
        (k, s) for s in (1, 3, 4) for k in (0, 1)
    ]
    assert frames[1].info["name"] == "crystal 1"
    for k, atoms in enumerate(frames[-2:]):
        data = batch[k]
        assert np.allclose(atoms.positions, data.positions, atol=1e-7)
        assert np.allclose(atoms.get_forces(), data.forces, atol=1e-7)
        assert np.allclose(atoms.get_momenta(), data.velocities * data.atomic_masses[:, None], atol=1e-7)
        assert np.isclose(atoms.get_potential_energy(), data.energy.item(), atol=1e-7)
        assert np.array_equal(atoms.cell[:], data.cell[0])


def test_further_run_goes_on_in_the_same_trajectory():
    batch = argon_batch(1)
    engine = nve(SnapshotHook(ExtxyzTrajectory("traj.extxyz")))
    engine.run(batch, n_steps=2)
    engine.run(batch, n_steps=2)
    assert [f.info["system_step"] for f in ase.io.read("traj.extxyz", ":")] == [1, 2, 3, 4]


def test_trajectory_replaces_an_older_file_unless_told_to_append(tmp_path):
    ase.io.write("traj.extxyz", bulk("Cu"))
    nve(SnapshotHook(ExtxyzTrajectory("traj.extxyz", append=True))).run(argon_batch(1), n_steps=1)
    assert [len(f) for f in ase.io.read("traj.extxyz", ":")] == [1, 4]
    nve(SnapshotHook(ExtxyzTrajectory("traj.extxyz"))).run(argon_batch(1), n_steps=1)
    assert [len(f) for f in ase.io.read("traj.extxyz", ":")] == [4]


def test_nothing_is_touched_before_the_first_snapshot(tmp_path):
    (tmp_path / "traj.extxyz").write_text("mine")
    ExtxyzTrajectory("traj.extxyz").close()
    assert (tmp_path / "traj.extxyz").read_text() == "mine"


def test_frames_are_on_disk_while_the_run_goes_on():
    seen = []

    class Count:
        frequency = 1
        stage = DynamicsStage.AFTER_STEP

        def __call__(self, ctx, stage):
            seen.append(len(ase.io.read("traj.extxyz", ":")))

    nve(SnapshotHook(ExtxyzTrajectory("traj.extxyz")), Count()).run(argon_batch(2), n_steps=3)
    assert seen == [2, 4, 6]


def test_trajectory_is_a_sink():
    assert isinstance(ExtxyzTrajectory("a.extxyz"), SnapshotSink)


# ---------------------------------------------------------------------- chosen fields
def test_named_fields_are_what_a_frame_has_beside_who_where_and_when():
    for fields, more in (([], set()), (["energy", "velocities"], {"energy", "velocities"})):
        sink = HostMemory()
        nve(SnapshotHook(sink, frequency=3, fields=fields)).run(argon_batch(2), n_steps=4)
        assert set(sink.read().keys()) == {*ALWAYS_KEPT, *more}
        assert sink.read().system_step[:, 0].tolist() == [1, 1, 4, 4]


def test_custom_field_goes_into_every_kind_of_file():
    class Coordination:
        frequency, stage = 1, DynamicsStage.AFTER_COMPUTE

        def __call__(self, ctx, stage):
            ctx.batch.add_key("coordination", ctx.batch.num_neighbors.long(), "node")

    sinks = ZarrData("path.zarr"), ExtxyzTrajectory("path.extxyz")
    batch = argon_batch(2)
    nve(Coordination(), *(SnapshotHook(sink, fields=["coordination"]) for sink in sinks)).run(
        batch, n_steps=2
    )
    for file in ("path.zarr", "path.extxyz"):
        frames = read(file, dtype=torch.float64)
        assert [frame.num_nodes for frame in frames] == [4] * 4
        assert torch.equal(frames[-1].coordination, batch[1].coordination)
        assert torch.allclose(frames[-1].positions, batch[1].positions, atol=1e-7)
        assert torch.equal(frames[-1].cell, batch[1].cell)
        assert "energy" not in frames[-1]


def test_field_that_is_not_there_is_named_at_the_first_snapshot():
    with pytest.raises(ValueError, match=r"is to write charges, which the batch lacks; it has positions"):
        nve(SnapshotHook(HostMemory(), fields=["charges", "energy"])).run(argon_batch(1), n_steps=5)


def test_fields_that_no_file_keeps_are_refused():
    with pytest.raises(ValueError, match="'neighbor_matrix' is working state"):
        SnapshotHook(HostMemory(), fields=["neighbor_matrix"])
    with pytest.raises(TypeError, match=r"fields=\['energy'\]"):
        SnapshotHook(HostMemory(), fields="energy")


# ---------------------------------------------------------------------- graphs that come and go
@pytest.mark.parametrize("frequency", [1, 4, 100])
def test_trajectory_of_each_system_out_of_an_in_flight_run(frequency):
    # Two at a time: 0 and 1 begin; 2 takes the room of the first to finish, 3 that of the second, …
    finish = {0: 5, 1: 7, 2: 9, 3: 2, 4: 6}

    class ConvergeByItself:
        frequency, stage = 1, DynamicsStage.AFTER_STEP

        def __call__(self, ctx, stage):
            last = torch.tensor([[finish[i]] for i in ctx.batch.system_id[:, 0].tolist()])
            ctx.batch.status.masked_fill_(ctx.batch.system_step >= last, 1)

    sampler = SizeAwareSampler(argon_batch(5).to_data_list(), max_batch_size=2)
    hooks = [SnapshotHook(ZarrData("path.zarr"), frequency), ConvergeByItself()]
    model = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)
    final = HostMemory()
    NVE(model, dt=2.0, hooks=hooks, n_steps=1000, sampler=sampler, sinks=final).run()
    reader = AtomicDataZarrReader("path.zarr")
    assert reader.system_ids() == [0, 1, 2, 3, 4]
    ended = {int(data.system_id): data for data in final.read()}
    for system, last in finish.items():
        path = list(reader.trajectory(system))
        steps = [int(data.system_step) for data in path]
        assert {int(data.system_id) for data in path} == {system}
        assert steps[-1] == last
        assert steps == sorted(set(steps))
        if frequency == 1:
            assert steps == list(range(1, last + 1))
        assert torch.equal(path[-1].positions, ended[system].positions)


def test_snapshots_end_with_their_hook():
    sink = Recorder()
    hook = SnapshotHook(sink, frequency=100)
    engine = nve(hook, ConvergeAt([3]))
    engine.remove_hook(hook)
    engine.run(argon_batch(1), n_steps=5)
    assert sink.frames == []
    assert "LastSnapshotHook" not in engine.describe_hooks()
