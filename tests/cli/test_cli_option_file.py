"""Options from a file, and what commands say of themselves."""

import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
import yaml

from nvalchemi.cli import main
from nvalchemi.cli.errors import InputError

COMMAND = str(Path(sys.executable).with_name("nvalchemi"))


def test_options_of_a_file_are_used_and_those_of_the_command_line_win(command, crystals):
    Path("sub").mkdir()
    Path("sub/relax.yaml").write_text(
        "files: [../argon.extxyz]\nmodel: lj-argon\noutput: out.extxyz\ncell: true\nfmax: 0.01\nsteps: 1\n"
    )
    assert command("relax", "--config", "sub/relax.yaml").code == 1  # one step is not enough
    result = command("relax", "--config", "sub/relax.yaml", "--steps", 200, "--overwrite")
    assert result.code == 0, result.err
    assert "ΔV/%" in result.out  # --cell
    assert len(ase.io.read("sub/out.extxyz", ":")) == 2


def test_file_of_init_holds_every_option_and_runs(command, crystals):
    assert command("init", "md", crystals, "--model", "lj-argon").code == 0
    written = yaml.safe_load(Path("md.yaml").read_text())
    assert written["ensemble"] == "nvt"
    assert "# Time step, fs.\ndt: 1.0\n" in Path("md.yaml").read_text()
    result = command("md", "--config", "md.yaml", "--steps", 3)
    assert result.code == 0, result.err
    assert Path("end.extxyz").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tempreature: 3", "tempreature: no such key, did you mean 'temperature'?"),
        ("ensemble: nvd", "ensemble: 'nvd' is none of nve, nvt, npt"),
        ("dt: fast", "dt: must be a valid number"),
        ("steps: 0", "--steps"),
    ],
)
def test_mistake_in_a_file_is_named(command, crystals, line, message):
    Path("md.yaml").write_text(f"files: [argon.extxyz]\nmodel: lj-argon\ntemperature: 30\nsteps: 1\n{line}\n".replace(
        "steps: 1\nsteps: 0", "steps: 0"
    ))  # fmt: skip
    result = command("md", "--config", "md.yaml")
    assert result.code == 2
    assert message in result.err
    if not message.startswith("--"):
        assert "md.yaml:5: " in result.err


@pytest.mark.parametrize("kind", ["relax", "md"])
def test_show_hooks_lists_stages_and_runs_nothing(command, crystals, kind):
    steps = ("--temperature", 30, "--steps", 5) if kind == "md" else ()
    result = command(
        kind, crystals, "--model", "lj-argon", *steps, "-o", "out.extxyz", "--log", "log.csv", "--show-hooks"
    )
    assert result.code == 0, result.err
    rows = [line.split() for line in result.out.splitlines()]
    assert rows[0] == ["stage", "order", "hook", "frequency"]
    assert ["BEFORE_COMPUTE", "1", "NeighborListHook", "1"] in rows
    assert [row[0] for row in rows if "LoggingHook" in row] == ["AFTER_STEP"]
    assert not Path("out.extxyz").exists()
    assert not Path("log.csv").exists()


def test_report_names_the_structures(command, crystals):
    result = command("relax", crystals, "--model", "lj-argon", "-o", "out.extxyz", "--report", "r.html", "-q")
    assert result.code == 0, result.err
    page = Path("r.html").read_text()
    assert '"small"' in page
    assert '"large"' in page


def test_relaxed_structures_get_no_momenta(command, crystals):
    assert command("relax", crystals, "--model", "lj-argon", "-o", "out.extxyz", "-q").code == 0
    assert "momenta" not in Path("out.extxyz").read_text()
    moving = ase.io.read(crystals, 0)
    moving.set_velocities(np.full((4, 3), 0.01))
    ase.io.write("moving.extxyz", moving)
    assert command("relax", "moving.extxyz", "--model", "lj-argon", "-o", "still.extxyz", "-q").code == 0
    assert "momenta" not in Path("still.extxyz").read_text()


def test_debugging_shows_where_a_mistake_was_noticed(monkeypatch):
    monkeypatch.setenv("NVALCHEMI_DEBUG", "1")
    with pytest.raises(InputError, match="no such file"):
        main(["info", "absent.xyz"])


def test_completion_knows_the_commands():
    result = subprocess.run(
        [COMMAND],
        capture_output=True,
        text=True,
        check=False,
        env={
            "_NVALCHEMI_COMPLETE": "complete_bash",
            "COMP_WORDS": "nvalchemi re",
            "COMP_CWORD": "1",
            "PATH": "",
        },
    )
    assert result.stdout.split() == ["relax"]
