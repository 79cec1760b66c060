"""The installed command in a process of its own, in a terminal and in a pipe."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

COMMAND = str(Path(sys.executable).with_name("nvalchemi"))


def run_in_terminal(*arguments: object, interrupt_after: bytes | None = None) -> tuple[int, str]:
    """Exit code and screen output; types Ctrl-C when `interrupt_after` has appeared."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(COMMAND, ["nvalchemi", *map(str, arguments)])
    screen = b""
    while True:
        try:
            screen += os.read(terminal, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if interrupt_after is not None and interrupt_after in screen:
            os.write(terminal, b"\x03")
            interrupt_after = None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), screen.decode()


def test_progress_is_shown_in_a_terminal_and_ctrl_c_leaves_results(crystals):
    code, screen = run_in_terminal(
        "md", crystals, "--model", "lj-argon", "--temperature", 40, "--steps", 10**8, "-o", "end.extxyz",
        interrupt_after=b" K",  # the temperature behind the bar
    )  # fmt: skip
    assert code == 130, screen
    assert "interrupted after" in screen
    assert Path("end.extxyz").stat().st_size > 0


def test_lines_of_a_training_stand_above_the_bar(crystals):
    frames = [atoms for atoms in ase.io.read(crystals, ":") for _ in range(5)]
    for atoms in frames:
        atoms.calc = SinglePointCalculator(atoms, energy=-0.3, forces=np.zeros((len(atoms), 3)))
    ase.io.write("labelled.extxyz", frames)
    Path("config.yaml").write_text(
        "data: {train: labelled.extxyz}\nmodel: {name: painn, hidden_dim: 4, cutoff: 4}\n"
        "training: {epochs: 3}\noutput: {directory: run}\n"
    )
    code, screen = run_in_terminal("train", "config.yaml")
    assert code == 0, screen
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", screen).replace("\n", "\r").split("\r")
    assert [line.split(":")[0] for line in lines if "validation 0" in line or "MAE energy" in line] == [
        f"epoch {k}" for k in (1, 2, 3)
    ]


def test_convert_and_check_show_progress_in_a_terminal(crystals):
    code, screen = run_in_terminal("convert", crystals, "out.extxyz")
    assert code == 0
    assert "frame" in screen.partition("out.extxyz")[0]
    code, screen = run_in_terminal("check", crystals)
    assert "structure " in screen.partition("argon.extxyz")[0]
    code, screen = run_in_terminal("convert", crystals, "out.extxyz", "--overwrite", "--quiet")
    assert (code, screen.strip()) == (0, "out.extxyz: 2 structures")


def test_ctrl_c_while_a_model_is_loaded_is_one_line():
    program = (
        "import os, signal, sys\n"
        "from nvalchemi.models import catalog\n"
        "catalog.load_model = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
        "import ase.io, ase; ase.io.write('in.extxyz', ase.Atoms('Ar'))\n"
        "sys.argv = ['nvalchemi', 'relax', 'in.extxyz', '--model', 'lj-argon', '-o', 'out.extxyz']\n"
        "from nvalchemi.cli import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "nvalchemi: interrupted\n")


def test_quiet_shows_no_progress_in_a_terminal(crystals):
    code, screen = run_in_terminal(
        "md", crystals, "--model", "lj-argon", "--temperature", 40, "--steps", 5, "--quiet"
    )
    assert (code, screen) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["relax", "absent.xyz", "--model", "lj-argon", "-o", "out.xyz"], 2, "no such file"),
        (["no-such-command"], 2, "no-such-command"),
    ],
)
def test_mistakes_end_without_a_traceback(arguments, code, message):
    result = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
