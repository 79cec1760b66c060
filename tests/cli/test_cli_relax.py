import os
import re
import signal
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.constraints import FixBondLength

from nvalchemi.dynamics import BaseDynamics


def relax(command, *arguments):
    return command("relax", *arguments, "--model", "lj-argon")


def test_relaxes_atoms_and_cells_of_all_structures_to_one_minimum(command, crystals):
    result = relax(command, crystals, "--cell", "--fmax", 0.001, "-o", "out.extxyz")
    assert result.code == 0, result.err
    small, large = ase.io.read("out.extxyz", ":")
    assert [small.info["name"], large.info["name"]] == ["small", "large"]
    assert [small.info["converged"], large.info["converged"]] == [True, True]
    # Both start from distorted cells of different density and size; the crystal has one minimum.
    assert small.get_volume() / 4 == pytest.approx(large.get_volume() / 8, rel=2e-3)
    assert small.get_potential_energy() / 4 == pytest.approx(large.get_potential_energy() / 8, abs=1e-5)
    for atoms in (small, large):
        assert np.linalg.norm(atoms.get_forces(), axis=1).max() < 0.001
        assert np.abs(atoms.get_stress()).max() < 1e-4


def test_without_cell_option_cells_stay(command, crystals):
    assert relax(command, crystals, "-o", "out.extxyz").code == 0
    for before, after in zip(ase.io.read(crystals, ":"), ase.io.read("out.extxyz", ":"), strict=True):
        assert np.array_equal(before.cell, after.cell)
        assert not np.allclose(before.positions, after.positions)


def test_table_has_one_line_per_structure_and_the_measured_constants(command):
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True)
    atoms.info.update(name="argon", a_exp=5.311)
    ase.io.write("in.extxyz", atoms)
    result = relax(command, "in.extxyz", "--cell", "-o", "out.extxyz")
    (row,) = [line for line in result.out.splitlines() if "argon" in line]
    relaxed = ase.io.read("out.extxyz").cell.lengths()[0]
    assert f"{relaxed:.4f}" in row
    assert "5.311" in row
    assert row.split()[-1] == "yes"


def test_largest_force_of_the_table_is_that_of_the_criterion(command):
    # No atom of this crystal feels a force, and its cell is far too large.
    ase.io.write("in.extxyz", bulk("Ar", "fcc", a=5.6, cubic=True))
    result = relax(command, "in.extxyz", "--cell", "--fmax", 0.001, "--steps", 1, "-o", "out.extxyz")
    assert result.code == 1
    heading, row = result.out.splitlines()
    assert float(row.split()[heading.split().index("fmax/eV/Å")]) > 0.001


def test_piped_output_has_no_progress_and_no_escape_codes(command, crystals):
    result = relax(command, crystals, "-o", "out.extxyz")
    assert result.err == ""
    assert "\x1b" not in result.out


def test_quiet_prints_nothing(command, crystals):
    result = relax(command, crystals, "-o", "out.extxyz", "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_structures_that_do_not_converge_are_written_marked_and_reported(command, crystals):
    result = relax(command, crystals, "--cell", "--fmax", 1e-6, "--steps", 3, "-o", "out.extxyz")
    assert result.code == 1
    assert "2 of 2 not converged" in result.err
    assert "large" in result.err
    assert [atoms.info["converged"] for atoms in ase.io.read("out.extxyz", ":")] == [False, False]


def test_existing_output_is_kept_unless_overwrite_is_given(command, crystals):
    Path("out.extxyz").write_text("mine")
    result = relax(command, crystals, "-o", "out.extxyz")
    assert result.code == 2
    assert "--overwrite" in result.err
    assert Path("out.extxyz").read_text() == "mine"
    assert relax(command, crystals, "-o", "out.extxyz", "--overwrite").code == 0
    assert len(ase.io.read("out.extxyz", ":")) == 2


def test_molecules_and_crystals_share_a_batch(command, crystals):
    dimer = Atoms("Ar2", [[0, 0, 0], [0, 0, 4.0]], info={"name": "dimer"})
    ase.io.write("dimer.xyz", dimer, format="extxyz")
    assert relax(command, crystals, "dimer.xyz", "--fmax", 1e-4, "-o", "out.extxyz").code == 0
    after = ase.io.read("out.extxyz", 2)
    assert after.get_distance(0, 1) == pytest.approx(2 ** (1 / 6) * 3.40, abs=0.01)
    assert not after.cell.any()
    assert not after.pbc.any()


def test_fixed_atoms_stay_fixed_in_the_output(command):
    from ase.constraints import FixAtoms

    atoms = Atoms("Ar3", [[0, 0, 0], [0, 0, 4.2], [0, 4.2, 0]])
    atoms.set_constraint(FixAtoms([0]))
    ase.io.write("in.extxyz", atoms)
    assert relax(command, "in.extxyz", "-o", "out.extxyz").code == 0
    after = ase.io.read("out.extxyz")
    assert np.array_equal(after.positions[0], atoms.positions[0])
    assert [list(c.index) for c in after.constraints] == [[0]]


def test_log_has_a_row_per_structure_and_step(command, crystals):
    assert (
        relax(command, crystals, "--fmax", 1e-9, "--steps", 4, "-o", "out.extxyz", "--log", "log.csv").code
        == 1
    )
    lines = Path("log.csv").read_text().splitlines()
    assert lines[0].startswith("step,time,graph_idx,system_id,status,energy,fmax")
    assert [line.split(",")[0] for line in lines[1:]] == list("00112233")


def test_interrupt_writes_what_there_is(command, crystals, monkeypatch):
    compute = BaseDynamics.compute

    def interrupted_compute(self, batch):
        if self.step_count == 4:
            os.kill(os.getpid(), signal.SIGINT)
        compute(self, batch)

    monkeypatch.setattr(BaseDynamics, "compute", interrupted_compute)
    result = relax(command, crystals, "--fmax", 1e-9, "-o", "out.extxyz", "--log", "log.csv")
    assert result.code == 130
    assert "interrupted" in result.err
    frames = ase.io.read("out.extxyz", ":")
    rows = [line.split(",") for line in Path("log.csv").read_text().splitlines()[-2:]]
    assert f"interrupted after {int(rows[0][0]) + 1} steps" in result.err  # `step` counts from 0
    last = [float(row[5]) for row in rows]
    assert [atoms.get_potential_energy() for atoms in frames] == pytest.approx(last, rel=1e-9)


# ------------------------------------------------------------------------------------------------ bad input
def with_nan(atoms):
    atoms.positions[2, 1] = np.nan
    return atoms


def with_flat_cell(atoms):
    atoms.cell[2] = atoms.cell[0] + atoms.cell[1]
    return atoms


CRYSTAL = bulk("Ar", "fcc", a=5.3, cubic=True)


def with_held_bond(atoms):
    atoms.set_constraint(FixBondLength(0, 1))
    return atoms


BAD_STRUCTURES = {
    "constraint": (with_held_bond(CRYSTAL.copy()), "frame 1.*FixBondLength"),
    "NaN position": (with_nan(CRYSTAL.copy()), "frame 1.*atom 2"),
    "degenerate cell": (with_flat_cell(CRYSTAL.copy()), "frame 1.*degenerate cell"),
    "no atoms": (Atoms(cell=[5, 5, 5], pbc=True), "frame 1.*no atoms"),
    "no cell": (molecule("H2O"), "frame 1.*--cell needs"),
    "slab": (Atoms("Ar", cell=[5, 5, 0], pbc=(True, True, False)), "frame 1.*--cell needs"),
}


@pytest.mark.parametrize("case", BAD_STRUCTURES)
def test_bad_structure_is_named_in_one_line_and_nothing_is_overwritten(command, case):
    bad, message = BAD_STRUCTURES[case]
    ase.io.write("in.traj", [CRYSTAL, bad])
    Path("out.extxyz").write_text("mine")
    result = relax(command, "in.traj", "--cell", "-o", "out.extxyz", "--overwrite")
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert re.search(message, result.err), result.err
    assert Path("out.extxyz").read_text() == "mine"


def write_mixture():
    """One crystal that can be run, and four structures that cannot."""
    ase.io.write("good.extxyz", CRYSTAL)
    overlap = CRYSTAL.copy()
    overlap.positions[1] = overlap.positions[0]
    ase.io.write("bad.traj", [overlap, bulk("Kr", "fcc", a=5.6, cubic=True)])
    ase.io.write("dimer.xyz", Atoms("Ar2", [[0, 0, 0], [0, 0, 4.0]]))
    Path("text.xyz").write_text("this is\nno structure\n")
    return ["bad.traj", "good.extxyz", "dimer.xyz", "text.xyz"]


REASONS = {
    "Ar4 (bad.traj, frame 0)": "not finite; do atoms overlap",
    "Kr4 (bad.traj, frame 1)": "atomic number 36",
    "Ar2 (dimer.xyz, frame 0)": "--cell needs",
    "text.xyz": "",
}


def test_all_structures_that_cannot_be_run_are_named_at_once(command, tmp_path):
    files = write_mixture()
    before = sorted(tmp_path.iterdir())
    outputs = ["-o", "out.extxyz", "--report", "report.html", "--restart", "run.state", "--log", "log.csv"]
    result = relax(command, *files, "--cell", *outputs)
    assert result.code == 2
    first, *lines = result.err.splitlines()
    assert "4 of 5 structures cannot be run; --skip-bad leaves them out" in first
    assert len(lines) == 4
    for label, reason in REASONS.items():
        assert any(line.strip().startswith(f"{label}: ") and reason in line for line in lines), label
    assert sorted(tmp_path.iterdir()) == before


def test_structures_that_cannot_be_run_are_left_out_if_asked(command):
    files = write_mixture()
    result = relax(command, *files, "--cell", "--skip-bad", "-o", "out.extxyz")
    assert result.code == 1
    assert "4 of 5 structures failed: " in result.err
    rows = {line.split()[0 if line.startswith(" ") else 1]: line for line in result.out.splitlines()[1:]}
    assert rows["good"].split()[2] == "Ar4"
    assert rows["good"].endswith("yes")
    for name, reason in zip(("bad@0", "bad@1", "dimer"), REASONS.values(), strict=False):
        assert "failed: " in rows[name]
        assert reason in rows[name]
    (atoms,) = ase.io.read("out.extxyz", ":")
    assert atoms.info["name"] == "good"
    alone = relax(command, "good.extxyz", "--cell", "-o", "alone.extxyz")
    assert alone.code == 0
    assert np.array_equal(ase.io.read("alone.extxyz").positions, atoms.positions)


def test_nothing_is_left_when_all_would_be_skipped(command):
    ase.io.write("in.traj", bulk("Kr", "fcc", a=5.6, cubic=True))
    result = relax(command, "in.traj", "--skip-bad", "-o", "out.extxyz")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert not Path("out.extxyz").exists()


def test_directory_is_named_with_the_way_out(command, tmp_path):
    (tmp_path / "folder").mkdir()
    result = relax(command, "folder", "-o", "out.extxyz")
    assert (result.code, "folder/*" in result.err) == (2, True)


BAD_ARGUMENTS = {
    "absent file": (["absent.xyz", "-o", "out.extxyz"], "no such file"),
    "not a structure file": (["text.xyz", "-o", "out.extxyz"], "text.xyz"),
    "binary garbage": (["garbage.traj", "-o", "out.extxyz"], "garbage.traj"),
    "empty file": (["empty.extxyz", "-o", "out.extxyz"], "empty.extxyz"),
    "unknown model": (["ok.extxyz", "--model", "8net", "-o", "out.extxyz"], "8net"),
    "unknown device": (["ok.extxyz", "--device", "abacus", "-o", "out.extxyz"], "abacus"),
    "unknown output format": (["ok.extxyz", "-o", "out.nothing"], "out.nothing"),
    "format without frames": (["two.extxyz", "-o", "POSCAR"], "holds one structure"),
    "absent output directory": (["ok.extxyz", "-o", "absent/out.extxyz"], "absent"),
    "output is input": (["ok.extxyz", "-o", "ok.extxyz", "--overwrite"], "input"),
    "log like output": (["ok.extxyz", "-o", "a.csv", "--log", "a.csv"], "same file"),
    "unknown log format": (["ok.extxyz", "-o", "out.extxyz", "--log", "a.txt"], "a.txt"),
    "fmax of zero": (["ok.extxyz", "-o", "out.extxyz", "--fmax", "0"], "--fmax"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_end_with_one_line_and_no_file(command, case, tmp_path):
    arguments, message = BAD_ARGUMENTS[case]
    (tmp_path / "text.xyz").write_text("this is\nno structure\n")
    (tmp_path / "garbage.traj").write_bytes(bytes(range(256)))
    (tmp_path / "empty.extxyz").write_text("")
    ase.io.write("ok.extxyz", CRYSTAL)
    ase.io.write("two.extxyz", [CRYSTAL, CRYSTAL])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    arguments = arguments if "--model" in arguments else [*arguments, "--model", "lj-argon"]
    result = command("relax", *arguments)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1, result.err
    assert message in result.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_missing_option_is_bad_usage(command, crystals):
    result = command("relax", crystals, "--model", "lj-argon")
    assert result.code == 2
    assert "--output" in result.err


@pytest.mark.parametrize("optimizer", ["fire2", "lbfgs"])
@pytest.mark.parametrize("cell", [[], ["--cell"]])
def test_other_minimisers_reach_the_same_minimum(command, crystals, optimizer, cell):
    common = ["relax", crystals, "--model", "lj-argon", "--fmax", 1e-4, *cell]
    assert command(*common, "-o", "fire.extxyz").code == 0
    assert command(*common, "--optimizer", optimizer, "-o", "other.extxyz").code == 0
    fire, other = ase.io.read("fire.extxyz", ":"), ase.io.read("other.extxyz", ":")
    for a, b in zip(fire, other, strict=True):
        assert b.get_potential_energy() == pytest.approx(a.get_potential_energy(), abs=1e-6)
