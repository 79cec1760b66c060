"""The same command again resumes a run that was stopped."""

import os
import signal
from pathlib import Path

import pytest

from nvalchemi.dynamics import BaseDynamics
from nvalchemi.dynamics.restart import read_state

FILES = ("log.csv", "traj.extxyz", "end.extxyz")


def arguments(kind, crystals, steps):
    common = (
        kind, crystals, "--model", "lj-argon", "--steps", steps, "--log", "log.csv", "-o", "end.extxyz",
        "--restart", "run.ckpt", "--save-every", 10,
    )  # fmt: skip
    if kind == "relax":
        return (*common, "--cell", "--fmax", 1e-4)
    return (
        *common,
        "--log-every",
        3,
        "--temperature",
        60,
        "--dt",
        4,
        "--traj",
        "traj.extxyz",
        "--traj-every",
        7,
    )


def at_step(monkeypatch, step, act):
    """Have ``act`` called once, just before the forces of that step (the first is 1) are computed."""
    compute, left = BaseDynamics.compute, [act]

    def acting(self, batch):
        if left and self.step_count == step - 1:
            left.pop()()
        compute(self, batch)

    monkeypatch.setattr(BaseDynamics, "compute", acting)


def fail():
    raise RuntimeError("out of memory")


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("kind", ["md", "relax"])
@pytest.mark.parametrize(("act", "code"), [(fail, 1), (ctrl_c, 130), (terminate, 143)])
def test_stopped_run_is_gone_on_with(command, crystals, kind, act, code):
    done = command(*arguments(kind, crystals, 30)).code
    files = [name for name in FILES if Path(name).exists()]
    whole = {name: Path(name).read_text() for name in files}
    for path in (*files, "run.ckpt", "run.ckpt.previous"):
        Path(path).unlink()

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 17, act)
        assert command(*arguments(kind, crystals, 30)).code == code
    assert {name: Path(name).read_text() for name in files if Path(name).exists()} != whole
    resumed = command(*arguments(kind, crystals, 30))
    assert resumed.code == done, resumed.err
    assert {name: Path(name).read_text() for name in files} == whole


@pytest.mark.parametrize(("act", "code"), [(ctrl_c, 130), (terminate, 143)])
def test_signal_ends_the_run_behind_the_step_with_its_state_saved(command, crystals, act, code):
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 17, act)
        stopped = command(*arguments("md", crystals, 30))
    assert stopped.code == code
    assert "interrupted after 17 steps" in stopped.err
    assert "the same command goes on from there (run.ckpt)" in stopped.err
    assert read_state(Path("run.ckpt"))["steps"] == 17
    assert Path("end.extxyz").exists()
    assert [row.split(",")[0] for row in Path("log.csv").read_text().splitlines()[-2:]] == ["15", "15"]


def test_handlers_are_as_they_were_after_a_command(command, crystals, monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    at_step(monkeypatch, 5, ctrl_c)
    assert command(*arguments("md", crystals, 10)).code == 130
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_signal_before_the_first_step_writes_no_results(command, crystals, monkeypatch):
    at_step(monkeypatch, 1, ctrl_c)  # at the first forces, before there is a step
    stopped = command(*arguments("md", crystals, 10))
    assert stopped.code == 130
    assert "before the first step" in stopped.err
    assert not Path("log.csv").exists()


def test_mean_temperature_is_that_of_the_whole_run(command, crystals):
    table = command(*arguments("md", crystals, 30)).out
    for path in Path().iterdir():
        if path.is_file() and path.name != crystals.name:
            path.unlink()
    assert command(*arguments("md", crystals, 20)).code == 0
    assert command(*arguments("md", crystals, 30)).out == table


def test_state_of_other_structures_is_one_line(command, crystals, tmp_path):
    assert command(*arguments("md", crystals, 10)).code == 0
    other = tmp_path / "other.extxyz"
    other.write_text("1\n\nAr 0 0 0\n")
    result = command(*arguments("md", other, 20))
    assert result.code == 2
    assert "other structures" in result.err
    assert len(result.err.splitlines()) == 1


def test_restart_file_that_is_none_is_refused_and_left_alone(command, crystals):
    Path("run.ckpt").write_text("my notes")
    result = command(*arguments("md", crystals, 10))
    assert result.code == 2
    assert "run.ckpt" in result.err
    assert Path("run.ckpt").read_text() == "my notes"
    assert not Path("log.csv").exists()


def test_restart_file_cannot_be_another_output(command, crystals):
    result = command("md", crystals, "--model", "lj-argon", "--steps", 1, "--temperature", 10,
                     "--restart", "same.csv", "--log", "same.csv")  # fmt: skip
    assert result.code == 2
    assert "same file" in result.err
