"""Structures and models of the collected cases: LJ argon has ε = 0.0104 eV, σ = 3.40 Å, cutoff 8.5 Å."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models.lj import LennardJonesModelWrapper


@pytest.fixture
def argon() -> LennardJonesModelWrapper:
    """The potential."""
    return LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)


@pytest.fixture
def crystal():
    """Function: a rattled cubic cell of fcc argon, float64."""

    def make(a: float = 5.3, seed: int = 0, rattle: float = 0.05, repeat: int = 1) -> AtomicData:
        atoms = bulk("Ar", "fcc", a, cubic=True) * (repeat, repeat, repeat)
        atoms.positions += np.random.default_rng(seed).normal(0, rattle, atoms.positions.shape)
        return AtomicData.from_atoms(atoms, dtype=torch.float64)

    return make


@pytest.fixture
def chain():
    """Function: n argon atoms in a row, without a cell, float64."""

    def make(n: int, distance: float = 3.8) -> AtomicData:
        return AtomicData.from_atoms(
            Atoms(f"Ar{n}", positions=[[distance * i, 0, 0] for i in range(n)]), dtype=torch.float64
        )

    return make


@pytest.fixture
def join():
    """Function: a batch of structures."""

    def make(*structures: AtomicData) -> Batch:
        return Batch.from_data_list(list(structures))

    return make
