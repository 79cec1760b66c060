"""A small run of dynamics for hooks that work in any workflow."""

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE
from nvalchemi.models.lj import LennardJonesModelWrapper


@pytest.fixture
def dimers():
    """Function: two argon dimers, float64."""

    def make() -> Batch:
        return Batch.from_data_list(
            [
                AtomicData(
                    positions=torch.tensor([[0.0, 0.0, 0.0], [bond, 0.0, 0.0]], dtype=torch.float64),
                    atomic_numbers=torch.tensor([18, 18]),
                )
                for bond in (3.7, 3.9)
            ]
        )

    return make


@pytest.fixture
def argon_dynamics():
    """Function: constant-energy dynamics of LJ argon with given hooks."""

    def make(hooks) -> NVE:
        return NVE(LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5), dt=1.0, hooks=hooks)

    return make
