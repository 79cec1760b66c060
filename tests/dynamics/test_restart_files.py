"""Restart files: whole or not at all, checked, never executed, the last two kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ase.build import bulk
from safetensors.torch import load_file, save_file

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE, initialize_velocities
from nvalchemi.dynamics import restart as restart_module
from nvalchemi.dynamics.restart import RestartError, RestartFile, read_state, write_state
from nvalchemi.models.lj import LennardJonesModelWrapper


def make_batch() -> Batch:
    batch = Batch.from_data_list(
        [AtomicData.from_atoms(bulk("Ar", "fcc", 5.3, cubic=True), dtype=torch.float64)]
    )
    initialize_velocities(batch, 80.0)
    return batch


def make_engine() -> NVE:
    return NVE(LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5), dt=5.0)


def positions_after(n_steps: int) -> torch.Tensor:
    return make_engine().run(make_batch(), n_steps).positions


@pytest.fixture
def path():
    """File of a run of 20 steps; the state before the last is that of step 15."""
    make_engine().run(make_batch(), 20, restart="run.ckpt", save_every=5)
    return Path("run.ckpt")


def test_state_comes_back_as_it_was(path):
    state = {
        "numbers": [1, 2.5, float("inf"), None, True],
        "nested": {"tuple": (1, 2), 3: "three"},
        "tensors": [
            torch.arange(3),
            torch.zeros(0, 3),
            torch.tensor(True),
            torch.ones(2, dtype=torch.bfloat16),
        ],
        "dtype": torch.int64,
    }
    write_state(Path("state"), state)
    found = read_state(Path("state"))
    for a, b in zip(found.pop("tensors"), state.pop("tensors"), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert found == state


def test_file_is_safetensors_that_other_programs_can_read(path):
    tensors = load_file(path)
    state = json.loads(tensors["state.json"].numpy().tobytes())
    assert state["steps"] == 20
    assert torch.equal(
        tensors[state["engine"]["batch"]["fields"]["positions"]["values"]["name"]], positions_after(20)
    )


def test_the_last_two_states_are_kept_and_nothing_else(path):
    assert sorted(p.name for p in Path().iterdir()) == ["run.ckpt", "run.ckpt.previous"]
    assert [read_state(Path(p.name))["steps"] for p in (path, Path("run.ckpt.previous"))] == [20, 15]


def test_missing_folders_are_made():
    make_engine().run(make_batch(), 1, restart="deep/er/run.ckpt")
    assert Path("deep/er/run.ckpt").exists()


# ---------------------------------------------------------------------- damage
def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def flip_a_bit_of_the_positions(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def flip_a_bit_of_the_header(path):
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)


def replace_by_text(path):
    path.write_text("8\nsome structure that a user keeps here\n")


def replace_by_foreign_safetensors(path):
    save_file({"weight": torch.zeros(3)}, path)


def replace_by_a_later_version(path):
    save_file(
        {"state.json": torch.zeros(2, dtype=torch.uint8)},
        path,
        {"format": restart_module.FORMAT, "version": "2"},
    )


DAMAGE = [
    truncate, empty, flip_a_bit_of_the_positions, flip_a_bit_of_the_header, replace_by_text,
    replace_by_foreign_safetensors, replace_by_a_later_version,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_damaged_or_foreign_file_is_passed_over_for_the_one_before_with_a_warning(path, damage):
    damage(path)
    batch = make_batch()
    with pytest.warns(UserWarning, match=r"run\.ckpt.*taking the state before it, run\.ckpt\.previous"):
        make_engine().run(batch, 23, restart=path, save_every=100)
    assert torch.equal(batch.positions, positions_after(23))
    # The damaged file was replaced, not kept in the place of the good one.
    assert [read_state(Path(p.name))["steps"] for p in (path, Path("run.ckpt.previous"))] == [23, 15]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_without_one_before_it_is_an_error_that_names_the_file_and_touches_nothing(path, damage):
    Path("run.ckpt.previous").unlink()
    damage(path)
    before = path.read_bytes()
    with pytest.raises(RestartError, match=r"run\.ckpt"):
        make_engine().run(make_batch(), 23, restart=path)
    assert path.read_bytes() == before


def test_both_damaged_is_an_error_that_names_both(path):
    truncate(path)
    empty(Path("run.ckpt.previous"))
    with pytest.raises(RestartError, match=r"run\.ckpt .*run\.ckpt\.previous"):
        make_engine().run(make_batch(), 23, restart=path)


def test_every_bit_counts(path):
    """No single flipped bit goes unnoticed: a sample of places over the whole file."""
    content = path.read_bytes()
    for position in range(0, len(content), len(content) // 97):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        Path("changed").write_bytes(changed)
        with pytest.raises(RestartError):
            read_state(Path("changed"))


def test_reading_runs_no_code(path):
    class Bomb:
        def __reduce__(self):
            return os.system, ("touch exploded",)

    Path("run.ckpt.previous").unlink()
    torch.save({"format": Bomb()}, path)
    with pytest.raises(RestartError):
        make_engine().run(make_batch(), 1, restart=path)
    assert not Path("exploded").exists()


def test_failed_save_leaves_the_last_state(path, monkeypatch):
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(restart_module, "_force_to_disk", full)
    with pytest.raises(OSError, match="No space left"):
        make_engine().run(make_batch(), 30, restart=path, save_every=5)
    assert path.read_bytes() == before
    assert not Path("run.ckpt.tmp").exists()


# ---------------------------------------------------------------------- which run of a program
def test_program_with_two_runs_is_resumed_in_the_second():
    def program(first, second):
        engine, batch = make_engine(), make_batch()
        engine.run(batch, first, restart="run.ckpt", save_every=4)
        engine.run(batch, second, restart="run.ckpt", save_every=4)
        return engine, batch

    program(10, 7)
    steps = []

    class Counting(NVE):
        def pre_update(self, batch):
            steps.append(self.step_count)
            super().pre_update(batch)

    engine, batch = make_engine(), make_batch()
    engine.__class__ = type("NVE", (Counting,), {})
    engine.run(batch, 10, restart="run.ckpt", save_every=4)
    assert steps == []
    engine.run(batch, 12, restart="run.ckpt", save_every=4)
    assert steps == [17, 18, 19, 20, 21]
    assert torch.equal(batch.positions, positions_after(22))


@pytest.mark.parametrize("every", [0, -1, True])
def test_save_every_must_be_a_positive_int(every):
    with pytest.raises(ValueError, match="save_every"):
        make_engine().run(make_batch(), 1, restart="run.ckpt", save_every=every)


def test_file_that_is_not_there_yet_is_no_state():
    assert RestartFile("nothing.ckpt", 1).read() is None


# ---------------------------------------------------------------------- kill -9
PROGRAM = """
import os, signal, sys, threading
import torch
from ase.build import bulk
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import DynamicsStage, FIRE, NVTLangevin, initialize_velocities, restart
from nvalchemi.dynamics.hooks import EnergyDriftMonitorHook, LoggingHook, SnapshotHook
from nvalchemi.dynamics.sinks import ExtxyzTrajectory
from nvalchemi.models.lj import LennardJonesModelWrapper

kind, when = sys.argv[1:]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class KillInStep:
    frequency, stage = 1, DynamicsStage.AFTER_STEP

    def __call__(self, ctx, stage):
        if kind == "step" and ctx.step_count == int(when):
            die()


calls = {}


def killing(function, name, after):
    def wrapped(*args, **kwargs):
        calls[name] = calls.get(name, 0) + 1
        now = kind == name and calls[name] == int(when)
        if now and not after:
            die()
        result = function(*args, **kwargs)
        if now and after:
            die()
        return result

    return wrapped


# Within a save: before the new file is on the disk; between the renames; when all is done.
restart._force_to_disk = killing(restart._force_to_disk, "write", after=False)
os.replace = killing(os.replace, "rename", after=True)
if kind == "timer":
    threading.Timer(float(when), die).start()

batch = Batch.from_data_list(
    [AtomicData.from_atoms(bulk("Ar", "fcc", a, cubic=True), dtype=torch.float64) for a in (5.3, 5.4)]
)
initialize_velocities(batch, 60.0)
engine = NVTLangevin(
    LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5), dt=5.0, temperature=60.0, friction=0.01,
    hooks=[LoggingHook(log_path="md.csv"), SnapshotHook(ExtxyzTrajectory("md.extxyz"), 3), KillInStep()],
)
engine.run(batch, 300, restart="md.ckpt", save_every=10)
torch.save({name: batch[name] for name in batch.keys()}, "end.pt")
"""


def start(folder, *arguments) -> int:
    """Return code of the program, run in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "program.py", *map(str, arguments)],
        cwd=folder,
        env=environment,
        timeout=300,
        check=False,
    ).returncode


@pytest.mark.slow
def test_killed_at_any_moment_and_started_again_it_ends_as_if_nothing_had_happened(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, "never", 0) == 0
    # "write" counts every fsync (of logs, too), "rename" both renames of a save.
    for kind, when in [
        ("write", 2),
        ("step", 27),
        ("rename", 7),
        ("write", 23),
        ("rename", 8),
        ("step", 188),
    ]:
        assert start(killed, kind, when) == -9, (kind, when)
        if (killed / "md.ckpt").exists() or (killed / "md.ckpt.previous").exists():
            file = RestartFile(killed / "md.ckpt", 1)
            assert file.read() is not None
    # At most ten steps are made again: the last state is that of step 180.
    assert read_state(killed / "md.ckpt")["steps"] == 180
    start(killed, "timer", 3.0)
    assert start(killed, "never", 0) == 0
    for name in ("md.csv", "md.extxyz"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    ends = [torch.load(folder / "end.pt", weights_only=True) for folder in (whole, killed)]
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
