"""Runs to report on."""

import json
import re

import numpy as np
import pytest
import torch
from ase.build import bulk

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models.lj import LennardJonesModelWrapper


@pytest.fixture
def argon():
    return LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)


@pytest.fixture
def crystals():
    """Function: rattled argon crystals, float64, by the numbers of their cells."""

    def make(*cells, rattle=0.1, seed=0) -> list[AtomicData]:
        rng = np.random.default_rng(seed)
        structures = []
        for k, n in enumerate(cells):
            atoms = bulk("Ar", "fcc", 5.3, cubic=True).repeat((n, 1, 1))
            atoms.positions += rng.normal(0, rattle, atoms.positions.shape)
            data = AtomicData.from_atoms(atoms, dtype=torch.float64)
            data.info["name"] = f"argon-{k}"
            structures.append(data)
        return structures

    return make


@pytest.fixture
def batch(crystals):
    """Three rattled crystals of 4, 8 and 4 atoms."""
    return Batch.from_data_list(crystals(1, 2, 1))


class Recorder:
    """A reporter that keeps what it is given."""

    def __init__(self):
        self.states, self.stages = [], []

    def report(self, ctx, stage, state):
        self.states.append(state)
        self.stages.append(stage)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def page_data():
    """Function: what a page shows, as plain values."""

    def read(path) -> dict:
        text = path.read_text(encoding="utf-8")
        return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))

    return read
