"""The Warp backend finds what the compiled kernel finds (on Warp's CPU device where there is no GPU)."""

import numpy as np
import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.neighbors import compute_neighbors
from nvalchemi.neighbors._warp import is_installed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
installed = pytest.mark.skipif(
    not is_installed(), reason="nvalchemi-toolkit-ops (extra cuda) is not installed"
)


def mixed_batch() -> Batch:
    rng = np.random.default_rng(0)
    structures = []
    for n, size, pbc in [
        (5, 3.0, (1, 1, 1)),
        (0, 4, (1, 1, 1)),
        (1, 2.5, (1, 1, 1)),
        (30, 9, (1, 0, 1)),
        (8, 0, (0, 0, 0)),
    ]:
        cell = (np.eye(3) + rng.uniform(-0.3, 0.3, (3, 3))) * size
        cell[0] *= rng.choice([-1, 1])
        structures.append(
            AtomicData(
                positions=torch.tensor(rng.normal(size=(n, 3)) * 6),
                atomic_numbers=torch.ones(n, dtype=torch.int64),
                cell=torch.tensor(cell).unsqueeze(0),
                pbc=torch.tensor([pbc], dtype=torch.bool),
            )
        )
    return Batch.from_data_list(structures)


def rows(batch: Batch) -> list[list[int]]:
    return sorted(torch.cat([batch.neighbor_list, batch.neighbor_list_shifts], dim=-1).tolist())


@installed
@pytest.mark.parametrize("half_list", [False, True])
@pytest.mark.parametrize("cutoff", [2.0, 4.0, 9.0])
def test_same_pairs_as_the_compiled_kernel(cutoff, half_list):
    batch = mixed_batch()
    compute_neighbors(batch, cutoff, half_list=half_list, method="numba")
    expected = rows(batch)
    batch = batch.to(DEVICE)
    compute_neighbors(batch, cutoff, half_list=half_list, method="warp")
    assert bool((batch.neighbor_list[:, 0].diff() >= 0).all())
    assert rows(batch) == expected


@installed
def test_no_atoms_and_bad_structures():
    batch = mixed_batch()[1:2].to(DEVICE)
    compute_neighbors(batch, 3.0, method="warp", format="matrix")
    assert batch.num_neighbors.shape == (0,)
    batch = mixed_batch().to(DEVICE)
    batch.positions[2, 0] = float("nan")
    with pytest.raises(ValueError, match="position of atom 2 of graph 0 is not finite"):
        compute_neighbors(batch, 3.0, method="warp")


@pytest.mark.skipif(is_installed(), reason="nvalchemi-toolkit-ops is installed")
def test_missing_package_names_the_extra():
    with pytest.raises(ModuleNotFoundError, match=r"nvalchemi\[cuda\]"):
        compute_neighbors(mixed_batch(), 3.0, method="warp")
