"""Compiled functions: when they are compiled, where they are kept, and threads."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nvalchemi
from nvalchemi._kernels.neighbors import displacement_exceeds

PACKAGE = Path(nvalchemi.__file__).parent
STEP = """
import torch
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE
from nvalchemi.models.lj import LennardJonesModelWrapper

dimer = AtomicData(positions=torch.tensor([[0.0, 0, 0], [3.8, 0, 0]]), atomic_numbers=torch.tensor([18, 18]))
batch = NVE(LennardJonesModelWrapper(0.0104, 3.40, 8.5), dt=1.0).run(Batch.from_data_list([dimer]), 1)
assert batch.positions.isfinite().all()
"""
SKIN_TEST = """
import torch
from nvalchemi.neighbors import max_displacement_exceeds
assert max_displacement_exceeds(torch.zeros(2, 3), torch.ones(2, 3), 1.0)
"""


@pytest.fixture
def installed_read_only(tmp_path):
    """Folder with a copy of the package in which nobody, root included, can keep anything beside the kernels."""
    shutil.copytree(PACKAGE, tmp_path / "site" / "nvalchemi", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "site" / "nvalchemi" / "_kernels" / "__pycache__").touch()
    return tmp_path / "site"


def run(code: str, site: Path, **environment: str) -> None:
    keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment = {**keep, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **environment}
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True, env=environment)


def test_read_only_installation_keeps_compiled_functions_in_the_cache_of_the_user(
    installed_read_only, tmp_path
):
    run(STEP, installed_read_only, HOME=str(tmp_path / "home"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert any((tmp_path / "cache").rglob("*lennard_jones_serial*.nbc"))
    assert (installed_read_only / "nvalchemi" / "_kernels" / "__pycache__").is_file()


def test_without_any_place_to_keep_them_functions_are_compiled_anew(installed_read_only, tmp_path):
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "folder")
    run(SKIN_TEST, installed_read_only, HOME=nowhere, XDG_CACHE_HOME=nowhere)


def test_importing_compiles_nothing():
    """Not even numba is imported before the first call."""
    code = (
        "import sys, nvalchemi.dynamics, nvalchemi.models, nvalchemi.hooks; assert 'numba' not in sys.modules"
    )
    run(code, PACKAGE.parent)


def test_few_atoms_are_done_by_one_thread_and_many_by_all():
    threads, called = torch.get_num_threads(), []
    x = np.zeros((displacement_exceeds._min_length, 3))
    x[-1] = 1.0
    serial, parallel = displacement_exceeds.serial, displacement_exceeds.parallel
    try:
        displacement_exceeds.serial = lambda *args: called.append("serial") or serial(*args)
        displacement_exceeds.parallel = lambda *args: called.append("parallel") or parallel(*args)
        for number in (1, 2):
            torch.set_num_threads(number)
            assert displacement_exceeds(x, np.zeros_like(x), 1.0)
            assert not displacement_exceeds(x[:-1], np.zeros_like(x)[:-1], 1.0)
    finally:
        torch.set_num_threads(threads)
        displacement_exceeds.serial, displacement_exceeds.parallel = serial, parallel
    assert called == ["serial", "serial", "parallel", "serial"]
