"""Structures for the tests of models: low symmetry, so that no force or stress component is zero by accident."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.io import read

from nvalchemi.data import AtomicData, Batch
from nvalchemi.neighbors import compute_neighbors

DATA_FILES = Path(__file__).parent.parent / "data_files"


def _displaced(structures, seed, amplitude=0.05):
    random = np.random.default_rng(seed)
    for atoms in structures:
        atoms.positions += random.normal(0.0, amplitude, atoms.positions.shape)
    return structures


@pytest.fixture
def make_batch():
    """Batch of ASE structures, with the neighbour list of a model where one is given."""

    def make(structures, model=None, dtype=torch.float64):
        batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=dtype) for atoms in structures])
        if model is not None and model.model_config.needs_neighborlist:
            compute_neighbors(batch, config=model.model_config.neighbor_config)
        return batch

    return make


@pytest.fixture
def crystals():
    """Three small strained crystals with displaced atoms."""
    structures = _displaced([bulk("Si"), bulk("NaCl", "rocksalt", 5.64), bulk("Cu", cubic=True)], seed=3)
    random = np.random.default_rng(4)
    for atoms in structures:
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + random.normal(0, 0.02, (3, 3))), scale_atoms=True)
    return structures


@pytest.fixture
def molecules():
    return _displaced([molecule(name) for name in ("H2O", "CH3CH2OH", "C6H6")], seed=5)


@pytest.fixture(scope="module")
def all_crystals():
    """The 33 experimental structures with atoms displaced as at room temperature."""
    # At twice this amplitude forces reach 10 eV/Å, where float32 models are themselves only good to 1e-4 eV/Å.
    return _displaced(read(DATA_FILES / "crystals.extxyz", ":"), seed=6, amplitude=0.025)
