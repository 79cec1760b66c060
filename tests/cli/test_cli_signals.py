"""Signals to the command in a process of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

# The engine waits in step 20 for a file to appear, so that the signal comes at a known place.
WAITING = """
import os, sys, threading
from nvalchemi.dynamics import BaseDynamics
compute = BaseDynamics.compute
def waiting(self, batch):
    if self.step_count == 19:
        print("waiting", flush=True)
        released = threading.Event()
        while not (released.wait(0.01) or os.path.exists("go on")):
            pass
    compute(self, batch)
BaseDynamics.compute = waiting
from nvalchemi.cli import main
main(sys.argv[1:])
"""


def start(*arguments: object) -> "subprocess.Popen[str]":
    """The command, waiting in a step."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n", process.communicate()[1]
    return process


def md(crystals: Path) -> tuple[object, ...]:
    return (
        "md", crystals, "--model", "lj-argon", "--temperature", 40, "--steps", 10**6, "--restart", "run.ckpt",
        "--log", "log.csv", "--log-every", 1, "-o", "end.extxyz", "--report", "report.html",
    )  # fmt: skip


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_ends_the_run_with_everything_written(crystals, number, code):
    process = start(*md(crystals))
    process.send_signal(number)
    assert process.stderr is not None
    assert "stopping behind this step" in process.stderr.readline()
    Path("go on").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "the same command goes on from there (run.ckpt)" in err
    assert "interrupted after 20 steps" in err
    assert "Traceback" not in err
    assert "mean T/K" in out
    for file in ("run.ckpt", "log.csv", "end.extxyz", "report.html"):
        assert Path(file).stat().st_size > 0


def test_second_signal_kills_at_once(crystals):
    process = start(*md(crystals))
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "stopping behind this step" in process.stderr.readline()
    process.send_signal(signal.SIGINT)  # it still waits in that step
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert not Path("end.extxyz").exists()
    assert Path("run.ckpt").exists()  # of the beginning


CONFIG = """\
data: {train: labelled.extxyz}
model: {name: painn, hidden_dim: 4, num_layers: 1, cutoff: 4}
loss: {energy: 1, forces: 1}
training: {epochs: 100000, batch_size: 4}
output: {directory: run}
"""


def test_training_is_stopped_by_the_signal_that_a_queueing_system_sends(crystals):
    frames = [atoms for atoms in ase.io.read(crystals, ":") for _ in range(5)]
    for atoms in frames:
        atoms.calc = SinglePointCalculator(atoms, energy=-0.3, forces=np.zeros((len(atoms), 3)))
    ase.io.write("labelled.extxyz", frames)
    config = Path("config.yaml")
    config.write_text(CONFIG)
    command = [str(Path(sys.executable).with_name("nvalchemi")), "train", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch 2:"):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    (checkpoint,) = re.findall(r"all of which are saved in (\S+);", err)
    assert (Path(checkpoint) / "manifest.json").exists()
    assert "go on with: nvalchemi train config.yaml --resume" in err
