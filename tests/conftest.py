"""Test set-up: shapes and types of annotated functions are checked at run time, in the tests only.

The import hook of jaxtyping rewrites a module when it is first imported, so it is installed here, before any
test imports the package. Left out are ``_kernels`` (a rewritten function cannot be compiled by numba) and
``cli`` (typer reads the annotations itself).
"""

import pkgutil

import beartype.typing  # noqa: F401 - by CHECKER
import pytest
from jaxtyping import install_import_hook

import nvalchemi

UNCHECKED = {"_kernels", "cli"}

# jaxtyping evaluates this string as the decorator. An int is a good float (dt=1), as for every type checker;
# Self cannot be checked from within a method.
CHECKER = """beartype.beartype(conf=beartype.BeartypeConf(
    is_pep484_tower=True,
    hint_overrides=beartype.FrozenDict({beartype.typing.Self: beartype.typing.Any}),
))"""

modules = [module.name for module in pkgutil.iter_modules(nvalchemi.__path__)]
install_import_hook([f"nvalchemi.{name}" for name in modules if name not in UNCHECKED], CHECKER)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    """Every test runs in a directory of its own and leaves no file in the repository or in the user's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NVALCHEMI_CACHE_DIR", str(tmp_path / "cache"))
