"""The same command again resumes a run that was stopped."""

import os
import signal
from pathlib import Path

import ase.io
import pytest
import torch

from nvalchemi.dynamics import BaseDynamics
from nvalchemi.dynamics.restart import read_state, write_state

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


CHANGES = {
    "fmax": (["--fmax", 0.01], "--fmax 0.01 (was 0.05)"),
    "cell": (["--cell"], "--cell was not given"),
    "optimizer": (["--optimizer", "lbfgs"], "--optimizer lbfgs (was fire)"),
}


def files_now(tmp_path):
    return {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


@pytest.mark.parametrize("case", CHANGES)
def test_state_begun_with_another_option_is_refused(command, crystals, tmp_path, case):
    run = ("relax", crystals, "--model", "lj-argon", "-o", "end.extxyz", "--restart", "run.ckpt")
    assert command(*run).code == 0
    before = files_now(tmp_path)
    options, message = CHANGES[case]
    result = command(*run, *options, "--report", "report.html")
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert files_now(tmp_path) == before
    assert command(*run, "--steps", 600, "--device", "cpu").code == 0


def test_state_of_another_structure_with_the_same_elements_is_refused(command, crystals, tmp_path):
    assert command(*arguments("relax", crystals, 100)).code == 0
    small, large = ase.io.read(crystals, ":")
    small.positions[2] += 0.05
    other = tmp_path / "other.extxyz"
    ase.io.write(other, [small, large])
    result = command(*arguments("relax", other, 100))
    assert result.code == 2
    assert f"other structures: small ({other}, frame 0)" in result.err
    assert "large" not in result.err
    crystals.write_bytes(other.read_bytes())
    result = command(*arguments("relax", crystals, 100))
    assert (result.code, "with other atoms, positions or cell" in result.err) == (2, True)


def test_state_of_another_model_or_command_is_refused(command, crystals):
    from nvalchemi.models.painn import PaiNN

    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        PaiNN(hidden_dim=4, num_layers=1, cutoff=4.0).export_model(f"{name}.safetensors")
    run = ("--steps", 2, "--restart", "run.ckpt", "-q")
    first = command("relax", crystals, "--model", "a.safetensors", *run, "-o", "end.extxyz")
    assert first.code in (0, 1), first.err
    other = command("relax", crystals, "--model", "b.safetensors", *run, "-o", "end.extxyz")
    assert (other.code, "--model b.safetensors (was a.safetensors)" in other.err) == (2, True)
    Path("b.safetensors").replace("a.safetensors")
    other = command("relax", crystals, "--model", "a.safetensors", *run, "-o", "end.extxyz")
    assert (other.code, "with other weights then" in other.err) == (2, True)
    md = command("md", crystals, "--model", "a.safetensors", "--temperature", 10, *run)
    assert (md.code, "`nvalchemi relax`, not md" in md.err) == (2, True)


def test_another_temperature_is_a_warning_and_another_time_step_an_error(command, crystals):
    assert command(*arguments("md", crystals, 4)).code == 0
    with pytest.warns(UserWarning, match="temperature 70.0 \\(was 60.0\\)"):
        assert command(*arguments("md", crystals, 6), "--temperature", 70).code == 0
    result = command(*arguments("md", crystals, 8), "--dt", 2)
    assert (result.code, "--dt 2.0 (was 4.0)" in result.err) == (2, True)


def test_state_that_does_not_say_what_began_it_is_warned_of(command, crystals):
    assert command(*arguments("md", crystals, 4)).code == 0
    path = Path("run.ckpt")
    state = read_state(path)
    state["engine"]["hooks"] = [hook for hook in state["engine"]["hooks"] if hook[0] != "RunRecord"]
    write_state(path, state)
    with pytest.warns(UserWarning, match="run.ckpt does not say with which options"):
        assert command(*arguments("md", crystals, 6)).code == 0


def test_info_tells_what_began_a_state(command, crystals):
    assert command(*arguments("md", crystals, 4)).code == 0
    text = " ".join(command("info", "run.ckpt").out.split())
    assert "made 4 steps begun by nvalchemi md, model lj-argon, ensemble nvt, dt 4.0" in text
    assert "RunRecord" not in text


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
