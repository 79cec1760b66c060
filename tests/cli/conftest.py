"""Commands run in this process; the potential is Lennard-Jones argon, which needs no package and is fast."""

from typing import NamedTuple

import ase.io
import pytest
from ase import Atoms
from ase.build import bulk

from nvalchemi.cli import main


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(capfd):
    """``command("relax", file, …)`` runs ``nvalchemi relax file …``."""

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return Result(ended.value.code or 0, *capfd.readouterr())

    return run


def argon_crystal(a: float, name: str) -> Atoms:
    """Cubic cell of four atoms, one of them off its place."""
    atoms = bulk("Ar", "fcc", a=a, cubic=True)
    atoms.positions[1] += (0.1, 0.05, -0.02)
    atoms.info["name"] = name
    return atoms


@pytest.fixture
def crystals(tmp_path):
    """File with two crystals of argon of different size."""
    path = tmp_path / "argon.extxyz"
    large = argon_crystal(5.2, "large").repeat((2, 1, 1))
    ase.io.write(path, [argon_crystal(5.35, "small"), large])
    return path
