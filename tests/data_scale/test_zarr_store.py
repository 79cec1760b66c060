"""The Zarr store gives back what was written, whole frames only, whatever happens to the writer."""

import json
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch, read, write
from nvalchemi.data.zarr import AtomicDataZarrReader, AtomicDataZarrWriter, CorruptChunkError, write_zarr


def structure(i: int, *, cell: bool = True, energy: bool = True, dtype=torch.float64) -> AtomicData:
    """Structure that says in every value which one it is; sizes 0 to 6 atoms."""
    n = i % 7
    data = AtomicData(
        positions=torch.full((n, 3), float(i)),
        atomic_numbers=torch.full((n,), 1 + i % 90),
        cell=torch.eye(3) * (i + 1) if cell else None,
        energy=torch.tensor([[-float(i)]]) if energy else None,
        forces=torch.full((n, 3), -float(i)),
        info={"number": i},
    )
    data.add_node_property("spin_density", torch.full((n, 2, 2), i, dtype=dtype))
    data.add_system_property("band_gap", torch.tensor(float(i)))
    data.add_edge_property("neighbor_list", torch.full((i % 3 if n else 0, 2), max(n - 1, 0)))
    data.add_edge_property("weights", torch.full((i % 3 if n else 0,), i))
    return data


def assert_equal(found: AtomicData, expected: AtomicData) -> None:
    assert set(found.keys()) == set(expected.keys())
    for name in expected.keys():
        assert found.level(name) == expected.level(name)
        assert found[name].dtype == expected[name].dtype
        assert found[name].shape == expected[name].shape, name
        assert torch.equal(found[name], expected[name]), name
    assert found.info == expected.info


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "set.zarr"
    write_zarr(path, [structure(i) for i in range(50)], chunk_bytes=256)
    return path


def test_every_field_of_every_level_comes_back(store):
    reader = AtomicDataZarrReader(store)
    assert len(reader) == 50
    for i, data in enumerate(reader):
        assert_equal(data, structure(i))
        assert_equal(reader[i], structure(i))


def test_scalar_of_shape_nothing_keeps_its_shape(store):
    assert AtomicDataZarrReader(store)[7]["band_gap"].shape == ()


def test_batch_read_is_the_batch_of_the_structures(store):
    index = [3, 40, 41, 42, 3, -1, 8]
    found = AtomicDataZarrReader(store)[index]
    expected = Batch.from_data_list([structure(i % 50) for i in index])
    assert torch.equal(found.batch_ptr, expected.batch_ptr)
    assert torch.equal(found.edge_ptr, expected.edge_ptr)
    assert found.info == expected.info
    assert set(found.keys()) == set(expected.keys())
    for name in expected.keys():
        assert torch.equal(found[name], expected[name]), name
    for k, i in enumerate(index):
        assert_equal(found[k], structure(i % 50))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 49), min_size=1, max_size=20), st.sampled_from([1, 300, 1 << 20]))
def test_any_selection_equals_reading_one_by_one(tmp_path_factory, index, cache_bytes):
    path = tmp_path_factory.getbasetemp() / "selection.zarr"
    if not path.exists():
        write_zarr(path, [structure(i) for i in range(50)], chunk_bytes=256)
    batch = AtomicDataZarrReader(path, cache_bytes=cache_bytes)[index]
    for k, i in enumerate(index):
        assert_equal(batch[k], structure(i))


@pytest.mark.parametrize("how", ["batches", "one by one", "list", "shards", "blosc", "none"])
def test_ways_of_writing_give_the_same_store(tmp_path, how):
    data = [structure(i) for i in range(1, 40)]
    options = {
        "shards": {"chunks_per_shard": 4},
        "blosc": {"compressor": "blosc"},
        "none": {"compressor": "none"},
    }
    with AtomicDataZarrWriter(
        tmp_path / "s.zarr", chunk_bytes=256, buffer_frames=7, **options.get(how, {})
    ) as writer:
        if how == "batches":
            for start in range(0, 39, 13):
                writer.append(Batch.from_data_list(data[start : start + 13]))
        elif how == "list":
            assert writer.write(data) == 39
        else:
            for frame in data:
                writer.append(frame)
    for found, expected in zip(AtomicDataZarrReader(tmp_path / "s.zarr"), data, strict=True):
        assert_equal(found, expected)


def test_frames_with_different_fields_keep_their_own(tmp_path):
    kinds = [{"cell": c, "energy": e} for c in (True, False) for e in (True, False)]
    data = [structure(i, **kinds[i % 4]) for i in range(20)]
    with AtomicDataZarrWriter(tmp_path / "s.zarr", buffer_frames=3) as writer:
        for frame in data:
            writer.append(frame)
    reader = AtomicDataZarrReader(tmp_path / "s.zarr")
    for found, expected in zip(reader, data, strict=True):
        assert_equal(found, expected)
    assert reader.counts()["energy"] == 10
    with pytest.raises(ValueError, match=r"field 'energy' is missing in structures \[1, 3\]"):
        reader[[0, 1, 2, 3]]
    filled = reader.read([0, 1, 2, 3], missing="fill")
    expected = Batch.from_data_list(data[:4], missing="fill")
    for name in expected.keys():
        assert torch.equal(filled[name].nan_to_num(-7), expected[name].nan_to_num(-7)), name


def test_appending_copies_what_it_is_given(tmp_path):
    data = structure(5)
    with AtomicDataZarrWriter(tmp_path / "s.zarr") as writer:
        writer.append(data)
        data.positions.zero_()
    assert AtomicDataZarrReader(tmp_path / "s.zarr")[0].positions.eq(5).all()


@pytest.mark.parametrize("kind", ["memory store", "memory url", "file url", "string"])
def test_stores_of_other_kinds(tmp_path, kind):
    store = {
        "memory store": zarr.storage.MemoryStore(),
        "memory url": f"memory://{tmp_path.name}/s.zarr",
        "file url": (tmp_path / "s.zarr").as_uri(),
        "string": str(tmp_path / "s.zarr"),
    }[kind]
    for first in (0, 10):
        with AtomicDataZarrWriter(store, chunk_bytes=128) as writer:
            writer.write([structure(i) for i in range(first, first + 10)])
    for i, data in enumerate(AtomicDataZarrReader(store)):
        assert_equal(data, structure(i))
    assert i == 19


def test_stored_type_can_be_chosen_per_field(tmp_path):
    with AtomicDataZarrWriter(
        tmp_path / "s.zarr", dtypes={"forces": torch.float16, "positions": "float64"}
    ) as writer:
        writer.write([structure(3)])
    data = AtomicDataZarrReader(tmp_path / "s.zarr")[0]
    assert (data.forces.dtype, data.positions.dtype) == (torch.float16, torch.float64)
    assert AtomicDataZarrReader(tmp_path / "s.zarr", dtype=torch.float32)[0].forces.dtype == torch.float32


def test_what_would_lose_something_is_refused_and_named(tmp_path):
    with AtomicDataZarrWriter(tmp_path / "s.zarr") as writer:
        writer.append(structure(1))
        with pytest.raises(
            ValueError, match=r"field 'positions' of frame 1 is float64, the store has float32"
        ):
            writer.append(
                AtomicData(
                    positions=torch.zeros(1, 3, dtype=torch.float64), atomic_numbers=torch.ones(1).long()
                )
            )
        wrong = structure(2)
        wrong.remove_key("spin_density")
        wrong.add_node_property("spin_density", torch.zeros(2, 3))
        with pytest.raises(
            ValueError, match=r"'spin_density' of frame 1 has shape \[num_nodes, 3\].*\[num_nodes, 2, 2\]"
        ):
            writer.append(wrong)
        writer.append(structure(2))
    assert [data.info["number"] for data in AtomicDataZarrReader(tmp_path / "s.zarr")] == [1, 2]


def test_only_chosen_fields_are_written_and_read(tmp_path, store):
    reader = AtomicDataZarrReader(store, fields=["energy"])
    assert set(reader[3].keys()) == {"positions", "atomic_numbers", "energy"}
    with AtomicDataZarrWriter(tmp_path / "few.zarr", fields=["energy", "weights"]) as writer:
        writer.append(structure(4))
    assert set(AtomicDataZarrReader(tmp_path / "few.zarr")[0].keys()) == {
        "positions",
        "atomic_numbers",
        "energy",
        "weights",
    }
    with pytest.raises(ValueError, match=r"has no field \['stress'\]"):
        AtomicDataZarrReader(store, fields=["stress"])


def test_sizes_without_reading_structures(store):
    reader = AtomicDataZarrReader(store)
    assert reader.num_nodes().tolist() == [i % 7 for i in range(50)]
    assert reader.get_metadata(13) == (6, 1)
    assert reader.column("energy")[9].tolist() == [-9.0]


def test_info_survives_as_json(tmp_path):
    info = {"name": "α-quartz", "values": np.arange(3.0), "nested": {"a": [1, None, True]}}
    data = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.ones(1).long(), info=info)
    write_zarr(tmp_path / "s.zarr", [data])
    found = AtomicDataZarrReader(tmp_path / "s.zarr")[0].info
    assert np.array_equal(found.pop("values"), info.pop("values"))
    assert found == info
    data.info["bad"] = object()
    with pytest.raises(ValueError, match=r"info cannot be written as JSON.*'bad': 'object'"):
        write_zarr(tmp_path / "t.zarr", [data])


# ---------------------------------------------------------------------- commits
def test_keys_of_info_that_look_like_numbers_stay_text(tmp_path):
    data = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[1])
    data.info.update({"été 漢字": np.arange(2), "levels": {"1": [1, 2]}})
    write_zarr(tmp_path / "a.zarr", [data])
    info = AtomicDataZarrReader(tmp_path / "a.zarr")[0].info
    assert info["levels"] == {"1": [1, 2]}
    assert info["été 漢字"].tolist() == [0, 1]


def test_padded_neighbour_matrices_are_refused(tmp_path):
    with pytest.raises(ValueError, match="neighbor_matrix cannot be stored"):
        AtomicDataZarrWriter(tmp_path / "a.zarr", fields=["neighbor_matrix"])
    assert not (tmp_path / "a.zarr").exists()


def test_readers_see_committed_frames_only_and_new_ones_after_refresh(tmp_path):
    with AtomicDataZarrWriter(tmp_path / "s.zarr", chunk_bytes=64) as writer:
        writer.append(structure(1))
        writer.commit()
        writer.append(structure(2))
        reader = AtomicDataZarrReader(tmp_path / "s.zarr")
        assert (len(reader), len(writer), writer.num_committed) == (1, 2, 1)
        assert_equal(reader[0], structure(1))
        writer.commit()
        copy = pickle.loads(pickle.dumps(reader))
        assert len(reader) == len(copy) == 1
        assert reader.refresh() == 2
        assert_equal(reader[1], structure(2))


def test_buffer_is_committed_when_full_or_old(tmp_path):
    with AtomicDataZarrWriter(tmp_path / "s.zarr", buffer_frames=2) as writer:
        writer.append(structure(1))
        assert writer.num_committed == 0
        writer.append(structure(2))
        assert writer.num_committed == 2
    with AtomicDataZarrWriter(tmp_path / "s.zarr", buffer_seconds=0.0) as writer:
        writer.append(structure(3))
        assert writer.num_committed == 3


class Crash(Exception):
    pass


class CrashingStore(zarr.storage.MemoryStore):
    """Store whose writing process dies at a chosen write."""

    writes_left = 10**9

    async def set(self, key, value, byte_range=None):
        if self.writes_left <= 0:
            raise Crash
        self.writes_left -= 1
        await super().set(key, value, byte_range)

    def set_sync(self, key, value):
        if self.writes_left <= 0:
            raise Crash
        self.writes_left -= 1
        super().set_sync(key, value)


@pytest.mark.parametrize("chunks_per_shard", [1, 2])
def test_crash_at_any_write_keeps_committed_frames_and_appending_goes_on(chunks_per_shard):
    options = {"chunk_bytes": 48, "chunks_per_shard": chunks_per_shard}

    def contents(store):
        return [data.info["number"] for data in AtomicDataZarrReader(store)]

    def small(i):
        data = structure(i, energy=i > 3)
        for name in ("band_gap", "spin_density", "neighbor_list", "weights", "cell", "forces"):
            data.remove_key(name)
        return data

    crashes = 0
    for allowed in range(200):
        store = CrashingStore()
        with AtomicDataZarrWriter(store, **options) as writer:
            writer.write([small(i) for i in range(1, 4)])
        store.writes_left = allowed
        writer = AtomicDataZarrWriter(store, **options)
        try:
            # A field that the first frames do not have, too.
            writer.write([small(i) for i in range(4, 7)])
        except Crash:
            crashes += 1
        store.writes_left = 10**9
        whole = contents(store)
        assert whole in ([1, 2, 3], [1, 2, 3, 4, 5, 6])
        with AtomicDataZarrWriter(store, **options) as writer:
            writer.write([small(i) for i in range(7, 10)])
        assert contents(store) == [*whole, 7, 8, 9]
        for data in AtomicDataZarrReader(store):
            i = data.info["number"]
            assert_equal(data, small(i))
        if allowed >= crashes:
            break
    assert crashes > 20


WRITER = """
import sys, torch
from nvalchemi.data import AtomicData
from nvalchemi.data.zarr import AtomicDataZarrWriter
writer = AtomicDataZarrWriter(sys.argv[1], chunk_bytes=512, buffer_frames=5)
i = len(writer)
print(i, flush=True)
while True:
    n = 1 + i % 7
    numbers = torch.full((n,), 1 + i % 50)
    writer.append(AtomicData(positions=torch.full((n, 3), float(i)), atomic_numbers=numbers, energy=-float(i)))
    i += 1
    print(writer.num_committed, flush=True)
"""


@pytest.mark.slow
def test_killed_writer_loses_no_committed_frame(tmp_path):
    rng = np.random.default_rng(0)
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    store = tmp_path / "s.zarr"
    count = 0
    for _ in range(8):
        process = subprocess.Popen([sys.executable, script, store], stdout=subprocess.PIPE, text=True)
        assert int(process.stdout.readline()) == count
        time.sleep(rng.uniform(0.0, 0.2))
        process.send_signal(signal.SIGKILL)
        reported = [
            int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")
        ]
        process.wait()
        process.stdout.close()
        reader = AtomicDataZarrReader(store)
        count = len(reader)
        assert count >= max(reported, default=0)
        for i, data in enumerate(reader):
            assert data.num_nodes == 1 + i % 7
            assert data.positions.eq(i).all()
            assert data.energy.item() == -i
    assert count > 0
    with AtomicDataZarrWriter(store) as writer:
        assert list(store.rglob("*.partial")) == []
        assert len(writer) == count


@pytest.mark.parametrize("chunks_per_shard", [1, 3])
def test_readers_at_any_moment_see_whole_frames(tmp_path, chunks_per_shard):
    path = tmp_path / "s.zarr"
    stop = threading.Event()
    seen: list[int] = []
    failures: list[BaseException] = []

    def follow():
        try:
            reader = AtomicDataZarrReader(path)
            while not stop.is_set():
                count = reader.refresh()
                for i in range(max(0, count - 5), count):
                    assert_equal(reader[i], structure(i))
                fresh = AtomicDataZarrReader(path)
                assert [info["number"] for info in fresh[:].info] == list(range(len(fresh)))
                seen.append(count)
        except BaseException as error:
            failures.append(error)

    with AtomicDataZarrWriter(
        path, chunk_bytes=128, chunks_per_shard=chunks_per_shard, buffer_frames=3
    ) as writer:
        writer.append(structure(0))
        writer.commit()
        threads = [threading.Thread(target=follow) for _ in range(2)]
        for thread in threads:
            thread.start()
        for i in range(1, 60):
            writer.append(structure(i))
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(set(seen)) > 2


def test_second_writer_is_refused(store):
    with AtomicDataZarrWriter(store), pytest.raises(RuntimeError, match="written by another writer"):
        AtomicDataZarrWriter(store)
    AtomicDataZarrWriter(store).close()


def test_overwriting(tmp_path, store):
    with pytest.raises(FileExistsError, match=r"mode 'a' appends"):
        AtomicDataZarrWriter(store, mode="x")
    with AtomicDataZarrWriter(store, mode="w") as writer:
        writer.append(structure(3))
        with pytest.raises(RuntimeError, match="another writer"):
            AtomicDataZarrWriter(store)
    assert len(AtomicDataZarrReader(store)) == 1
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("dear reader")
    for attempt in (lambda: AtomicDataZarrWriter(other, mode="w"), lambda: write_zarr(other, [structure(1)])):
        with pytest.raises(FileExistsError, match="not a Zarr store; nothing was changed"):
            attempt()
    assert (other / "chapter1.tex").read_text() == "dear reader"


def test_whole_store_appears_only_when_written(tmp_path, store):
    def failing():
        yield structure(1)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        write_zarr(store, failing())
    assert len(AtomicDataZarrReader(store)) == 50
    assert [path.name for path in tmp_path.iterdir()] == ["set.zarr"]


def test_what_is_not_a_store(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such store"):
        AtomicDataZarrReader(tmp_path / "nothing.zarr")
    zarr.create_group(str(tmp_path / "other.zarr"))
    with pytest.raises(ValueError, match="holds no structures"):
        AtomicDataZarrReader(tmp_path / "other.zarr")


# ---------------------------------------------------------------------- damage
def chunk_file(store: Path, array: str) -> Path:
    return sorted(path for path in (store / array / "c").rglob("*") if path.is_file())[3]


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "bit flip":
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    path = tmp_path_factory.mktemp("intact") / "s.zarr"
    write_zarr(path, [structure(i) for i in range(200)], chunk_bytes=256)
    return path


@pytest.mark.parametrize("how", ["bit flip", "truncated", "emptied", "removed"])
@pytest.mark.parametrize(
    "array", ["node/positions", "system/energy", "edge/weights", "node_ptr", "signature", "info"]
)
def test_damaged_chunk_is_named_and_the_rest_can_be_read(tmp_path, intact, array, how):
    path = shutil.copytree(intact, tmp_path / "s.zarr")
    damage(chunk_file(path, array), how)
    reader = AtomicDataZarrReader(path)
    with pytest.raises(CorruptChunkError, match=rf"s\.zarr: array '{array}', chunk \d+ .*cannot be read"):
        list(reader)
    with pytest.warns(UserWarning, match=r"skipped \d+ structure\(s\) in damaged chunks"):
        rest = list(reader.frames(on_error="skip"))
    assert 100 < len(rest) < 200
    for data in rest:
        assert_equal(data, structure(data.info["number"]))


def test_damaged_shard_is_named(tmp_path):
    write_zarr(tmp_path / "s.zarr", [structure(i) for i in range(400)], chunk_bytes=256, chunks_per_shard=4)
    damage(chunk_file(tmp_path / "s.zarr", "node/positions"), "bit flip")
    with pytest.raises(CorruptChunkError, match="array 'node/positions', chunk"):
        AtomicDataZarrReader(tmp_path / "s.zarr")[:]


@pytest.mark.parametrize("how", ["truncated", "no record", "half a record"])
def test_damaged_root_is_named_by_readers_and_writers(tmp_path, how):
    path = tmp_path / "s.zarr"
    write_zarr(path, [structure(1), structure(2)])
    text = (path / "zarr.json").read_text()
    root = json.loads(text)
    if how == "no record":
        del root["attributes"]["nvalchemi"]
    elif how == "half a record":
        del root["attributes"]["nvalchemi"]["signatures"]
    (path / "zarr.json").write_text(text[:100] if how == "truncated" else json.dumps(root))
    for use in (AtomicDataZarrReader, AtomicDataZarrWriter):
        with pytest.raises(ValueError, match=r"s\.zarr"):
            use(path)


def test_frames_of_a_system_come_by_its_steps(tmp_path):
    frames = [structure(i) for i in range(6)]
    for frame, (system, step) in zip(frames[1:], [(4, 2), (0, 0), (4, 0), (0, 1), (4, 1)], strict=True):
        frame.system_id, frame.system_step = torch.tensor([[system]]), torch.tensor([[step]])
    write_zarr(tmp_path / "s.zarr", frames)
    reader = AtomicDataZarrReader(tmp_path / "s.zarr")
    assert reader.system_ids() == [0, 4]
    # Frame 0 belongs to no system, although its row holds a 0.
    assert reader.trajectory_index(0).tolist() == [2, 4]
    assert [frame.info["number"] for frame in reader.trajectory(4)] == [3, 5, 1]
    assert [frame.info["number"] for frame in read(tmp_path / "s.zarr", system_id=4)] == [3, 5, 1]
    assert reader.read(reader.trajectory_index(4)).system_step[:, 0].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"s\.zarr has no frame of system_id 7"):
        reader.trajectory(7)
    with pytest.raises(ValueError, match="not both"):
        read(tmp_path / "s.zarr", 0, system_id=4)


def test_two_frames_of_one_step_are_no_trajectory(tmp_path):
    frames = [structure(i) for i in range(5)]
    for frame, (system, step) in zip(frames, [(0, 1), (1, 1), (0, 3), (0, 3), (0, 4)], strict=True):
        frame.system_id, frame.system_step = torch.tensor([[system]]), torch.tensor([[step]])
    write_zarr(tmp_path / "s.zarr", frames)
    reader = AtomicDataZarrReader(tmp_path / "s.zarr")
    assert reader.trajectory_index(1).tolist() == [1]
    assert reader.last_steps() == {0: 4, 1: 1}
    with pytest.raises(ValueError, match=r"s\.zarr: frames 2 and 3 are both step 3 of system_id 0"):
        reader.trajectory(0)


def test_message_about_a_damaged_root_has_no_raw_bytes(tmp_path):
    write_zarr(tmp_path / "s.zarr", [structure(1)])
    (tmp_path / "s.zarr" / "zarr.json").write_bytes(b"{\xff\xfe" * 50)
    with pytest.raises(CorruptChunkError, match="UnicodeDecodeError: 'utf-8' codec") as error:
        AtomicDataZarrReader(tmp_path / "s.zarr")
    assert "\\xff" not in str(error.value)


def test_store_without_systems_has_no_trajectories(store):
    assert AtomicDataZarrReader(store).system_ids() == []


def test_chunk_of_zeros_that_is_lost_does_not_read_as_zeros(tmp_path):
    data = [AtomicData(positions=torch.zeros(4, 3), atomic_numbers=torch.ones(4).long()) for _ in range(40)]
    with AtomicDataZarrWriter(tmp_path / "s.zarr", chunk_bytes=256) as writer:
        writer.write(data[:20])
    with AtomicDataZarrWriter(tmp_path / "s.zarr", chunk_bytes=256) as writer:
        writer.write(data[20:])
    for chunk in (tmp_path / "s.zarr/node/positions/c").rglob("*"):
        if chunk.is_file():
            chunk.unlink()
            break
    with pytest.raises(CorruptChunkError, match="no such chunk"):
        AtomicDataZarrReader(tmp_path / "s.zarr")[:]


def test_record_is_json_that_says_what_counts(store):
    record = json.loads((store / "zarr.json").read_text())["attributes"]["nvalchemi"]
    assert record["num_frames"] == 50
    assert record["fields"]["forces"] == {"level": "node", "dtype": "float32", "shape": [3], "scalar": False}


# ---------------------------------------------------------------------- read() and write()
def test_read_and_write_know_zarr(tmp_path):
    path = tmp_path / "s.zarr"
    assert write(path, (structure(i) for i in range(6))) == 6
    assert write(str(path), structure(6), append=True) == 1
    assert [data.info["number"] for data in read(path)] == list(range(7))
    assert [data.info["number"] for data in read(path, "1:-1:2")] == [1, 3, 5]
    assert read(path, -1).info["number"] == 6
    assert_equal(read(path, 3), structure(3, dtype=torch.float32))
    with pytest.raises(IndexError, match="no frame 7"):
        read(path, 7)
    damage(path / "node/positions/c/0/0", "bit flip")
    with pytest.raises(CorruptChunkError, match="array 'node/positions', chunk 0"):
        read(path)


def test_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match=r"pip install 'nvalchemi\[zarr\]'"):
        AtomicDataZarrWriter(tmp_path / "s.zarr")
