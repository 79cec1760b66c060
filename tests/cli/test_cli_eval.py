"""Errors of a model on labelled structures; the labels are those of the model itself, changed by known amounts."""

import csv
import json
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator

from nvalchemi import units
from nvalchemi.models.ase import to_ase_calculator
from nvalchemi.models.catalog import load_model


@pytest.fixture
def labelled(tmp_path):
    """Four crystals; energies off by 10 meV per atom, one force component of each by 0.3 eV/Å, pressure by 1 GPa."""
    calculator = to_ase_calculator(load_model("lj-argon"))
    frames = []
    for k, a in enumerate((5.2, 5.3, 5.4, 5.5)):
        atoms = bulk("Ar", "fcc", a=a, cubic=True)
        atoms.rattle(0.05, seed=k)
        atoms.calc = calculator
        energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
        forces[0, 0] += 0.3
        stress[:3] += units.GPa
        atoms.calc = SinglePointCalculator(atoms, energy=energy + 4 * 0.01, forces=forces, stress=stress)
        atoms.info["config_type"] = "dense" if a < 5.35 else "thin"
        frames.append(atoms)
    path = tmp_path / "labelled.extxyz"
    ase.io.write(path, frames)
    return path


def evaluate(command, *arguments):
    return command("eval", "lj-argon", *arguments)


def table(text):
    """Cells of the table by the first word of its rows, which have a heading of up to three words."""
    return {line[:15].strip(): line[15:].split() for line in text.splitlines()[2:] if line}


def test_errors_are_those_that_were_made(command, labelled):
    result = evaluate(command, labelled)
    assert result.code == 0, result.err
    rows = table(result.out)
    assert rows["energy"][:3] == ["40.00", "40.00", "meV"]
    assert rows["energy per atom"][:3] == ["10.00", "10.00", "meV/atom"]
    assert rows["forces"][:3] == ["25.00", f"{300 / np.sqrt(12):.2f}", "meV/Å"]  # one of twelve components
    assert rows["stress"][:3] == ["0.33", f"{np.sqrt(1 / 3):.2f}", "GPa"]  # three of nine


def test_fitted_offsets_take_an_error_that_each_atom_has(command, labelled):
    result = evaluate(command, labelled, "--fit-offsets")
    assert table(result.out)["energy"][:2] == ["0.00", "0.00"]
    assert "subtracted from the labels, eV: Ar 0.0100" in result.out


def test_errors_of_groups_and_elements(command, labelled):
    assert evaluate(command, labelled, "--by", "config_type", "--per-element", "-o", "e.csv", "-q").code == 0
    with open("e.csv") as file:
        rows = {(row["quantity"], row["group"]): row for row in csv.DictReader(file)}
    assert rows["energy", "config_type=dense"]["count"] == "2"
    assert float(rows["energy", "config_type=thin"]["mae"]) == pytest.approx(40)
    assert rows["forces", "element=Ar"] == {**rows["forces", ""], "group": "element=Ar"}


def test_json_holds_everything(command, labelled):
    assert evaluate(command, labelled, "-o", "e.json", "-q").code == 0
    content = json.loads(Path("e.json").read_text())
    assert content["structures"] == 4
    assert content["metrics"]["energy_per_atom_mae"] == pytest.approx(0.01)
    assert content["counts"]["stress"] == 36


def test_page_has_parity_plots_of_every_quantity(command, labelled):
    assert evaluate(command, labelled, "-o", "e.html", "-q").code == 0
    data = (
        Path("e.html")
        .read_text()
        .partition('type="application/json" id="data">')[2]
        .partition("</script>")[0]
    )
    plots = {plot["title"]: plot for plot in json.loads(data)["parity"]}
    assert set(plots) == {"energy per atom", "forces", "stress"}
    assert len(plots["forces"]["x"]) == 48
    assert np.subtract(plots["energy per atom"]["x"], plots["energy per atom"]["y"]) == pytest.approx(
        0.01, abs=1e-6
    )


def test_molecules_and_crystals_are_evaluated_together(command, labelled):
    from ase import Atoms

    molecule = Atoms("Ar2", [[0, 0, 0], [0, 0, 3.8]])
    molecule.calc = SinglePointCalculator(molecule, energy=0.0)
    ase.io.write("all.extxyz", [molecule, *ase.io.read(labelled, ":")])
    assert evaluate(command, "all.extxyz", "-o", "e.json", "-q").code == 0
    counts = json.loads(Path("e.json").read_text())["counts"]
    assert (counts["energy"], counts["stress"], counts["forces"]) == (5, 36, 48)


def test_offsets_that_the_data_leave_open_are_said_to_be(command, labelled):
    from ase import Atoms

    molecule = Atoms("Ar2", [[0, 0, 0], [0, 0, 3.8]])
    molecule.calc = SinglePointCalculator(molecule, energy=1.0)
    ase.io.write("few.extxyz", molecule)
    result = evaluate(command, "few.extxyz", "--fit-offsets")
    assert result.code == 0, result.err
    assert "the fit is underdetermined" in result.err
    assert evaluate(command, labelled, "--fit-offsets").err == ""
    molecule.calc = SinglePointCalculator(molecule, forces=np.zeros((2, 3)))
    ase.io.write("none.extxyz", molecule)
    result = evaluate(command, "none.extxyz", "--fit-offsets")
    assert result.code == 2
    assert "no energies to fit offsets to" in result.err


def test_results_replace_no_input(command, labelled):
    page = Path("data.json")
    ase.io.write(page, ase.io.read(labelled, ":"), format="json")
    before = page.read_bytes()
    result = evaluate(command, page, "-o", page, "--overwrite")
    assert (result.code, page.read_bytes()) == (2, before)
    assert "is an input file" in result.err


KEYS = ("--energy-key", "E", "--forces-key", "F", "--stress-key", "S")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["7net", "{data}"], "did you mean '7net-0'"),
        (["lj-argon", "{data}", *KEYS], "no structure has energy"),
        (["lj-argon", "{data}", "-o", "e.pdf"], "the suffix must be .html, .json, .csv"),
        (["lj-argon", "absent.xyz"], "no such file: absent.xyz"),
        (["lj-argon", "{data}", "--by", "nokey"], "--by nokey: no structure of {data} has it; there is config_type"),
        (["lj-argon", "{data}", "-o", "/proc/e.html"], "/proc is not writable"),
        (["lj-argon"], "give DATA to evaluate on"),
        (["."], "is no checkpoint of `nvalchemi train`"),
    ],
)  # fmt: skip
def test_mistakes_are_named(command, labelled, arguments, words):
    result = command("eval", *(word.replace("{data}", str(labelled)) for word in arguments))
    assert result.code == 2
    assert words.replace("{data}", str(labelled)) in result.err
    assert len(result.err.splitlines()) == 1
