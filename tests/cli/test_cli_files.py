import ase.io
import numpy as np
import pytest
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator

from nvalchemi.cli import main


@pytest.fixture
def labelled():
    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    atoms.info["name"] = "salt"
    forces = np.zeros((8, 3))
    forces[3] = (0.3, 0.0, 0.4)
    atoms.calc = SinglePointCalculator(atoms, energy=-27.2, forces=forces, stress=[0.01, 0.01, 0.01, 0, 0, 0])
    return atoms


def test_info_says_what_is_in_a_file(command, labelled):
    ase.io.write("in.extxyz", [labelled, labelled, molecule("H2O")])
    result = command("info", "in.extxyz")
    assert result.code == 0
    text = " ".join(result.out.split())
    for words in (
        "frames 3",
        "Cl4Na4 ×2, H2O ×1",
        "H 2, O 1, Na 8, Cl 8",
        "TTT ×2, FFF ×1",
        "energy per atom, eV -3.4",
        "largest force, eV/Å 0.5",
        "pressure −tr σ/3, eV/Å³ -0.01",
        "forces node [n, 3] in 2 of 3 frames",
        "name info in 2 of 3 frames",
    ):
        assert words in text


def test_info_lists_arrays_that_are_no_field(command, labelled):
    labelled.set_array("site_kind", np.array(["a", "b"] * 4))
    ase.io.write("in.extxyz", [labelled, molecule("H2O")])
    result = command("info", "in.extxyz")
    assert result.code == 0
    text = " ".join(result.out.split())
    assert "site_kind node [n] in 1 of 2 frames" in text
    assert "arrays info" not in text


def test_info_on_a_broken_file_names_the_frame(command, labelled, tmp_path):
    ase.io.write("in.extxyz", [labelled, labelled])
    path = tmp_path / "in.extxyz"
    path.write_text("\n".join(path.read_text().splitlines()[:-3]))
    result = command("info", "in.extxyz")
    assert result.code == 2
    assert "frame 1" in result.err
    assert len(result.err.splitlines()) == 1


def test_convert_keeps_frames_labels_and_info(command, labelled):
    second = labelled.copy()
    second.calc = labelled.calc
    ase.io.write("in.extxyz", [labelled, second])
    assert command("convert", "in.extxyz", "out.traj").code == 0
    frames = ase.io.read("out.traj", ":")
    assert len(frames) == 2
    assert frames[0].info["name"] == "salt"
    assert frames[0].get_potential_energy() == pytest.approx(-27.2)
    assert np.array_equal(frames[0].get_forces(), labelled.get_forces())
    assert np.array_equal(frames[0].positions, labelled.positions)


def test_convert_takes_an_index(command, labelled):
    frames = [labelled, labelled.repeat((2, 1, 1)), labelled.repeat((3, 1, 1))]
    ase.io.write("in.traj", frames)
    assert command("convert", "in.traj", "last.cif", "--index", "-1").code == 0
    assert len(ase.io.read("last.cif")) == 24


def test_convert_names_an_index_that_chooses_nothing(command, labelled):
    ase.io.write("in.extxyz", labelled)
    result = command("convert", "in.extxyz", "out.extxyz", "--index", "5:")
    assert result.code == 2
    assert "in.extxyz: --index 5: chooses no frame" in result.err


def test_convert_to_a_single_frame_format_refuses_several(command, labelled, tmp_path):
    ase.io.write("in.traj", [labelled, labelled])
    result = command("convert", "in.traj", "POSCAR")
    assert result.code == 2
    assert not (tmp_path / "POSCAR").exists()


def test_convert_leaves_the_old_file_when_the_input_is_broken(command, labelled, tmp_path):
    ase.io.write("in.extxyz", [labelled, labelled])
    path = tmp_path / "in.extxyz"
    path.write_text("\n".join(path.read_text().splitlines()[:-3]))
    (tmp_path / "out.extxyz").write_text("mine")
    result = command("convert", "in.extxyz", "out.extxyz", "--overwrite")
    assert result.code == 2
    assert "frame 1" in result.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.extxyz", "out.extxyz"]
    assert (tmp_path / "out.extxyz").read_text() == "mine"


def test_convert_can_skip_broken_frames(command, labelled, tmp_path):
    ase.io.write("in.extxyz", [labelled, labelled])
    path = tmp_path / "in.extxyz"
    path.write_text("\n".join(path.read_text().splitlines()[:-3]))
    with pytest.warns(UserWarning, match="skipped 1 frame"):
        result = command("convert", "in.extxyz", "out.extxyz", "--skip-broken")
    assert result.code == 0
    assert len(ase.io.read("out.extxyz", ":")) == 1


def test_models_lists_what_can_be_used(command):
    result = command("models")
    assert result.code == 0
    rows = {line.split()[0]: line.split()[1] for line in result.out.splitlines() if line.split()}
    assert rows["lj-argon"] == "yes"
    assert rows["7net-0"] == "yes"
    assert "cpu:" in result.out


def test_models_names_the_extra_of_a_missing_package(command, monkeypatch):
    from nvalchemi.models import catalog

    monkeypatch.setattr(catalog, "is_installed", lambda package: False)
    (row,) = [line for line in command("models").out.splitlines() if line.startswith("chgnet ")]
    assert row.split()[1] == "no"
    assert "nvalchemi[chgnet]" in row


def test_help_says_in_whole_sentences_what_the_commands_do(command):
    result = command("--help")
    assert result.code == 0
    assert "List the potentials." in result.out
    assert "..." not in result.out.partition("Commands:")[2]


def test_version_is_printed(command):
    import nvalchemi

    assert command("--version").out.strip() == nvalchemi.__version__


def test_missing_typer_is_named_with_its_extra(command, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "nvalchemi.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"nvalchemi\[cli\]"):
        main(["models"])


def test_check_says_whether_a_file_is_fit_to_train_on(command, labelled):
    other = labelled.copy()
    other.rattle(0.05, seed=1)
    stress = [0.01, 0.01, 0.01, 0, 0, 0]
    other.calc = SinglePointCalculator(other, energy=-27.1, forces=np.full((8, 3), 0.1), stress=stress)
    ase.io.write("good.extxyz", [labelled, other])
    result = command("check", "good.extxyz")
    assert (result.code, result.out.splitlines()[-1]) == (0, "fit to train on")
    other.calc.results["forces"][2, 0] = np.nan
    ase.io.write("bad.extxyz", [labelled, other])
    result = command("check", "bad.extxyz")
    assert result.code == 1
    assert "not fit to train on" in result.out
    assert command("check", "absent.extxyz").code == 2
