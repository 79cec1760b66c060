"""What an import may bring in: a user of one part does not wait for the libraries of the others."""

import os
import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "numba",
    "ase",
    "zarr",
    "rich",
    "typer",
    "matplotlib",
    "pydantic",
    "sevenn",
    "chgnet",
    "scipy",
    "pandas",
)


def modules_after(statement: str) -> set[str]:
    """Top-level names in ``sys.modules`` of a fresh interpreter that ran `statement`."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTEST_"))}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return set(result.stdout.split())


def test_importing_the_package_imports_nothing_heavy():
    assert modules_after("import nvalchemi").isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "module", ["data", "neighbors", "models", "models.base", "hooks", "dynamics", "dynamics.hooks"]
)
def test_subpackages_leave_optional_and_compiled_libraries_alone(module):
    allowed = {"torch", "pydantic", "scipy"}
    assert modules_after(f"import nvalchemi.{module}").isdisjoint(set(HEAVY) - allowed)


def test_command_line_package_is_light_until_a_command_runs():
    assert modules_after("import nvalchemi.cli").isdisjoint(HEAVY)
