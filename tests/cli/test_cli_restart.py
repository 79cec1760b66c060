"""The same command again resumes a run that was stopped."""

from pathlib import Path

import pytest

from nvalchemi.models.lj import LennardJonesModelWrapper

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


def stop_after(monkeypatch, calls, error):
    """Have the potential fail at its ``calls``-th evaluation."""
    forward, count = LennardJonesModelWrapper.forward, []

    def failing(self, data):
        count.append(1)
        if len(count) == calls:
            raise error
        return forward(self, data)

    monkeypatch.setattr(LennardJonesModelWrapper, "forward", failing)


@pytest.mark.parametrize("kind", ["md", "relax"])
@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
)
def test_stopped_run_is_gone_on_with(command, crystals, kind, error):
    assert command(*arguments(kind, crystals, 60)).code == 0
    files = [name for name in FILES if Path(name).exists()]
    whole = {name: Path(name).read_text() for name in files}
    for path in (*files, "run.ckpt", "run.ckpt.previous"):
        Path(path).unlink()

    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 38, error)
        stopped = command(*arguments(kind, crystals, 60))
    assert stopped.code != 0
    assert {name: Path(name).read_text() for name in files if Path(name).exists()} != whole
    resumed = command(*arguments(kind, crystals, 60))
    assert resumed.code == 0, resumed.err
    assert {name: Path(name).read_text() for name in files} == whole


def test_mean_temperature_is_that_of_the_whole_run(command, crystals):
    table = command(*arguments("md", crystals, 60)).out
    for path in Path().iterdir():
        if path != crystals and path.name != crystals.name:
            path.unlink()
    assert command(*arguments("md", crystals, 40)).code == 0
    assert command(*arguments("md", crystals, 60)).out == table


def test_interruption_says_how_to_go_on(command, crystals, monkeypatch):
    stop_after(monkeypatch, 20, KeyboardInterrupt())
    stopped = command(*arguments("md", crystals, 60))
    assert "the same command goes on from the last state in run.ckpt" in stopped.err


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
