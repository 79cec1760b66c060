import csv
import json
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk


def md(command, *arguments):
    return command("md", *arguments, "--model", "lj-argon")


def set_velocities(atoms, seed):
    """Velocities of about 50 K."""
    atoms.set_velocities(np.random.default_rng(seed).normal(scale=0.01, size=(len(atoms), 3)))


def rows_of(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_log_trajectory_and_end_hold_every_structure(command, crystals):
    result = md(
        command, crystals, "--ensemble", "nve", "--temperature", 40, "--dt", 4, "--steps", 40,
        "--log", "md.csv", "--log-every", 10, "--traj", "md.extxyz", "--traj-every", 20, "-o", "end.extxyz",
    )  # fmt: skip
    assert result.code == 0, result.err
    rows = rows_of("md.csv")
    assert [(int(row["step"]), int(row["system_id"])) for row in rows] == [
        (s, k) for s in (0, 10, 20, 30) for k in (0, 1)
    ]
    assert float(rows[-1]["time"]) == pytest.approx(31 * 4.0)
    frames = ase.io.read("md.extxyz", ":")
    assert [(f.info["system_step"], f.info["system_id"]) for f in frames] == [
        (s, k) for s in (1, 21, 40) for k in (0, 1)
    ]
    assert [f.info["name"] for f in frames[:2]] == ["small", "large"]
    for atoms, last in zip(ase.io.read("end.extxyz", ":"), frames[-2:], strict=True):
        assert np.allclose(atoms.positions, last.positions, atol=1e-7)
        assert np.allclose(atoms.get_velocities(), last.get_velocities(), atol=1e-7)
        assert atoms.get_potential_energy() == pytest.approx(last.get_potential_energy(), abs=1e-7)


def test_nvt_prints_mean_temperatures(command, crystals):
    result = md(command, crystals, "--temperature", 50, "--steps", 20)
    assert result.code == 0
    assert "mean T/K" in result.out
    (row,) = [line for line in result.out.splitlines() if "large" in line]
    assert row.split()[4] == "20"
    assert "ΔE total" not in result.out  # the thermostat changes it: it would read as a drift


def test_npt_changes_the_volume_towards_the_pressure(command, crystals):
    run = ["--ensemble", "npt", "--temperature", 20, "--dt", 4, "--steps", 100, "--barostat-time", 400]
    result = md(command, crystals, *run, "--pressure", 2, "-o", "end.extxyz")
    assert result.code == 0, result.err
    for before, after in zip(ase.io.read(crystals, ":"), ase.io.read("end.extxyz", ":"), strict=True):
        assert after.get_volume() < 0.95 * before.get_volume()


def test_nve_prints_the_change_of_the_total_energy(command, crystals):
    result = md(command, crystals, "--ensemble", "nve", "--temperature", 40, "--steps", 20)
    assert result.code == 0
    assert "ΔE total/meV/atom" in result.out
    (row,) = [line for line in result.out.splitlines() if "large" in line]
    assert abs(float(row.split()[-2])) < 0.1


def test_convergence_of_a_relaxation_is_not_claimed_of_later_states(command, crystals):
    frames = ase.io.read(crystals, ":")
    for atoms in frames:
        atoms.info["converged"] = True
    ase.io.write("relaxed.extxyz", frames)
    result = md(
        command, "relaxed.extxyz", "--temperature", 40, "--steps", 2, "--traj", "md.extxyz", "-o", "end.extxyz",
    )  # fmt: skip
    assert result.code == 0, result.err
    for file in ("md.extxyz", "end.extxyz"):
        assert all("converged" not in atoms.info for atoms in ase.io.read(file, ":"))


def test_same_seed_same_path_alone_or_in_a_batch(command, crystals):
    alone = ase.io.read(crystals, 0)
    ase.io.write("alone.extxyz", alone)
    options = ("--temperature", 50, "--steps", 10, "--seed", 7, "--quiet", "-o")
    assert md(command, crystals, *options, "both.extxyz").code == 0
    assert md(command, "alone.extxyz", *options, "one.extxyz").code == 0
    assert np.allclose(
        ase.io.read("both.extxyz", 0).positions, ase.io.read("one.extxyz").positions, atol=1e-7
    )


def test_velocities_of_the_files_are_kept(command):
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True)
    set_velocities(atoms, seed=1)
    ase.io.write("in.traj", atoms)
    assert (
        md(command, "in.traj", "--ensemble", "nve", "--dt", 0.001, "--steps", 1, "-o", "out.traj").code == 0
    )
    assert np.allclose(ase.io.read("out.traj").get_velocities(), atoms.get_velocities(), atol=1e-6)


def test_nve_agrees_with_velocity_verlet_of_ase(command):
    from ase.calculators.lj import LennardJones
    from ase.md.verlet import VelocityVerlet

    atoms = bulk("Ar", "fcc", a=5.4, cubic=True).repeat(2)
    set_velocities(atoms, seed=3)
    ase.io.write("in.traj", atoms)
    assert (
        md(command, "in.traj", "--ensemble", "nve", "--dt", 5, "--steps", 10, "-o", "out.traj", "-q").code
        == 0
    )
    atoms.calc = LennardJones(epsilon=0.0104, sigma=3.40, rc=8.5, smooth=False)
    VelocityVerlet(atoms, timestep=5 * units.fs).run(10)
    assert np.allclose(ase.io.read("out.traj").positions, atoms.positions, atol=1e-7)


def test_jsonl_log_has_an_object_per_row(command, crystals):
    assert md(command, crystals, "--temperature", 50, "--steps", 1, "--log", "md.jsonl").code == 0
    rows = [json.loads(line) for line in Path("md.jsonl").read_text().splitlines()]
    assert [row["system_id"] for row in rows] == [0, 1]
    assert rows[0]["volume"] == pytest.approx(5.35**3)


def test_overwrite_replaces_log_and_trajectory(command, crystals):
    options = (
        "--temperature",
        50,
        "--steps",
        2,
        "--log",
        "md.csv",
        "--log-every",
        1,
        "--traj",
        "md.extxyz",
        "-q",
    )
    assert md(command, crystals, *options).code == 0
    assert md(command, crystals, *options).code == 2
    assert md(command, crystals, *options, "--overwrite").code == 0
    assert len(rows_of("md.csv")) == 4
    assert len(ase.io.read("md.extxyz", ":")) == 4


def test_overlapping_atoms_are_named_before_the_run(command, crystals, tmp_path):
    overlap = Atoms("Ar2", [[0, 0, 0], [0, 0, 0]], info={"name": "overlap"})
    ase.io.write("overlap.traj", overlap)
    result = md(command, crystals, "overlap.traj", "--temperature", 10, "--steps", 2, "--log", "md.csv")
    assert result.code == 2
    assert "overlap (overlap.traj, frame 0)" in result.err
    assert not (tmp_path / "md.csv").exists()


def nan_energy_of_the_second(monkeypatch, step):
    from nvalchemi.models.lj import LennardJonesModelWrapper

    forward = LennardJonesModelWrapper.forward

    def forward_with_nan(self, data):
        outputs = dict(forward(self, data))
        if "system_step" in data and data.num_graphs > 1 and int(data.system_step[1]) == step:
            outputs["energy"][1] = np.nan
        return outputs

    monkeypatch.setattr(LennardJonesModelWrapper, "forward", forward_with_nan)


@pytest.mark.parametrize("kind", ["md", "relax"])
def test_structure_that_fails_on_the_way_is_marked_and_the_others_go_on(command, crystals, monkeypatch, kind):
    nan_energy_of_the_second(monkeypatch, 2)
    own = ["--temperature", 10] if kind == "md" else ["--fmax", 1e-9]
    result = command(
        kind, crystals, "--model", "lj-argon", *own, "--steps", 5, "-o", "end.extxyz", "--report", "report.html"
    )  # fmt: skip
    assert result.code == 1
    warning, error = result.err.splitlines()
    assert warning.startswith("nvalchemi: warning: large (")
    assert "1 of 2 structures failed: large" in error
    assert "frame 1): step 2: energy is not finite" in error
    assert "graph" not in result.err
    small, large = ([line for line in result.out.splitlines() if name in line] for name in ("small", "large"))
    assert small[0].split()[4] == "5"
    assert "failed: step 2: energy is not finite" in large[0]
    assert "nan" not in large[0].replace("finite", "")
    alive, dead = ase.io.read("end.extxyz", ":")
    assert alive.calc is not None
    assert np.isfinite(alive.get_potential_energy())
    assert "failure" not in alive.info
    assert dead.info["failure"] == "step 2: energy is not finite"
    assert dead.calc is None


def test_zarr_trajectory_is_gone_on_with_and_split_by_system(command, crystals):
    options = ("--temperature", 50, "--traj", "md.zarr", "--traj-every", 2, "--restart", "run.state", "-q")
    assert md(command, crystals, "--steps", 4, *options).code == 0
    assert md(command, crystals, "--steps", 8, *options, "--overwrite").code == 0
    assert command("convert", "md.zarr", "large.extxyz", "--system", 1).code == 0
    steps = [atoms.info["system_step"] for atoms in ase.io.read("large.extxyz", ":")]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 8)
    again = md(command, crystals, "--steps", 2, "--temperature", 50, "--traj", "md.zarr")
    assert (again.code, "--overwrite" in again.err) == (2, True)


def test_atoms_closer_than_a_bond_are_warned_of(command):
    close = Atoms("Ar2", [[0, 0, 0], [0, 0, 1.2]], info={"name": "close"})
    ase.io.write("in.extxyz", [bulk("Ar", "fcc", a=5.3, cubic=True), close])
    result = md(command, "in.extxyz", "--temperature", 1, "--steps", 1, "--dt", 1e-6, "-q")
    assert result.code == 0
    assert result.err.count("\n") == 1
    assert "close (in.extxyz, frame 1) 1.20 Å" in result.err


BAD = {
    "npt without temperature": (["--ensemble", "npt"], "--temperature"),
    "npt with an infinite pressure": (
        ["--ensemble", "npt", "--temperature", 50, "--pressure", "inf"],
        "pressure",
    ),
    "nvt without temperature": (["--ensemble", "nvt"], "--temperature"),
    "nve without any velocities": (["--ensemble", "nve"], "--temperature"),
    "negative temperature": (["--temperature", -1], "temperature"),
    "infinite temperature": (["--temperature", "inf"], "temperature"),
    "time step of zero": (["--temperature", 50, "--dt", 0], "dt"),
    "negative friction": (["--temperature", 50, "--friction", -0.1], "friction"),
    "trajectory of unknown kind": (["--temperature", 50, "--traj", "a.nothing"], "a.nothing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_end_with_one_line_and_no_file(command, crystals, case, tmp_path):
    arguments, message = BAD[case]
    result = md(command, crystals, "--steps", 5, *arguments, "-o", "out.extxyz", "--log", "md.csv")
    assert result.code == 2
    assert len(result.err.splitlines()) == 1, result.err
    assert message in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["argon.extxyz"]


def test_element_that_the_potential_does_not_know_leaves_old_files_alone(command, tmp_path):
    ase.io.write("in.extxyz", [bulk("Ar", "fcc", a=5.3, cubic=True), bulk("Kr", "fcc", a=5.6, cubic=True)])
    for name in ("md.csv", "md.extxyz", "out.extxyz"):
        (tmp_path / name).write_text("mine")
    result = md(
        command, "in.extxyz", "--temperature", 50, "--steps", 5, "--overwrite",
        "--log", "md.csv", "--traj", "md.extxyz", "-o", "out.extxyz",
    )  # fmt: skip
    assert result.code == 2
    assert "Kr4 (in.extxyz, frame 1): no Lennard-Jones parameters for atomic number 36;" in result.err
    assert [(tmp_path / name).read_text() for name in ("md.csv", "md.extxyz", "out.extxyz")] == ["mine"] * 3
