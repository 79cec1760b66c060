"""Same set of pairs as ASE's neighbour list, on random structures of every kind of cell."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.neighborlist import neighbor_list as ase_neighbor_list
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch
from nvalchemi.neighbors import compute_neighbors, neighbor_list, neighbor_matrix

Pair = tuple[int, int, int, int, int]


@st.composite
def structures(draw) -> Atoms:
    """Random triclinic cell of either handedness, possibly thin, with atoms up to hundreds of cells outside."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(0, 8))
    cell = rng.normal(size=(3, 3))
    cell *= draw(st.sampled_from([2.0, 5.0, 12.0])) / np.abs(np.linalg.det(cell)) ** (1 / 3)
    if draw(st.booleans()):
        cell[draw(st.integers(0, 2))] *= -1  # the other handedness
    thin = draw(st.sampled_from([1.0, 0.2]))
    cell[draw(st.integers(0, 2))] *= thin
    pbc = [draw(st.booleans()) for _ in range(3)]
    heights = np.abs(np.linalg.det(cell)) / np.linalg.norm(np.cross(cell[[1, 2, 0]], cell[[2, 0, 1]]), axis=1)
    assume(heights.min() > 0.25)  # ASE's own search takes minutes on needle-like cells
    positions = rng.random((n, 3)) @ cell + rng.normal(size=(n, 3)) * draw(st.sampled_from([0.0, 3.0, 200.0]))
    if n > 1 and draw(st.booleans()):
        positions[1] = positions[0]  # duplicates
    for axis in range(3):
        if not pbc[axis] and draw(st.booleans()):
            cell[axis] = 0.0  # no vector along an axis that is not periodic
    return Atoms(numbers=[18] * n, positions=positions, cell=cell, pbc=pbc)


def to_batch(atoms_list: list[Atoms]) -> Batch:
    return Batch.from_data_list(
        [
            AtomicData(
                positions=torch.tensor(atoms.positions).reshape(-1, 3),
                atomic_numbers=torch.tensor(atoms.numbers),
                cell=torch.tensor(atoms.cell.array).unsqueeze(0),
                pbc=torch.tensor(atoms.pbc).unsqueeze(0),
            )
            for atoms in atoms_list
        ]
    )


def reference(atoms_list: list[Atoms], cutoff: float) -> list[Pair]:
    pairs: list[Pair] = []
    first = 0
    for atoms in atoms_list:
        if len(atoms):
            i, j, S = ase_neighbor_list("ijS", atoms, cutoff)
            pairs += [
                (first + a, first + b, *s) for a, b, s in zip(i.tolist(), j.tolist(), S.tolist(), strict=True)
            ]
        first += len(atoms)
    return sorted(pairs)


def half(pairs: list[Pair]) -> list[Pair]:
    return [p for p in pairs if p[0] < p[1] or (p[0] == p[1] and p[2:] > (0, 0, 0))]


def read_coo(batch: Batch) -> list[Pair]:
    pairs, shifts = batch.neighbor_list, batch.neighbor_list_shifts
    assert bool((pairs[:, 0].diff() >= 0).all()), "not sorted by i"
    graph = batch.batch_idx[pairs[:, 0]]
    edge_numbers = torch.arange(len(pairs))
    assert bool((edge_numbers >= batch.edge_ptr[graph]).all())
    assert bool((edge_numbers < batch.edge_ptr[graph + 1]).all())
    return sorted((*p, *s) for p, s in zip(pairs.tolist(), shifts.tolist(), strict=True))


def read_matrix(batch: Batch) -> list[Pair]:
    found: list[Pair] = []
    for i in range(batch.num_nodes):
        n = int(batch.num_neighbors[i])
        row, shifts = batch.neighbor_matrix[i], batch.neighbor_matrix_shifts[i]
        assert bool((row[n:] == batch.num_nodes).all())
        assert not bool(shifts[n:].any())
        found += [(i, j, *s) for j, s in zip(row[:n].tolist(), shifts[:n].tolist(), strict=True)]
    return sorted(found)


READERS = {"coo": read_coo, "matrix": read_matrix}


@pytest.mark.parametrize("method", ["numba", "torch"])
@pytest.mark.parametrize("format_", ["coo", "matrix"])
@settings(max_examples=60, deadline=None)
@given(atoms_list=st.lists(structures(), min_size=1, max_size=3), cutoff=st.floats(0.5, 5.0))
def test_same_pairs_as_ase(method, format_, atoms_list, cutoff):
    batch, expected = to_batch(atoms_list), reference(atoms_list, cutoff)
    compute_neighbors(batch, cutoff, format=format_, method=method)
    assert READERS[format_](batch) == expected
    compute_neighbors(batch, cutoff, format=format_, method=method, half_list=True)
    found = READERS[format_](batch)
    assert found == half(expected)
    assert 2 * len(found) == len(expected)


@pytest.mark.parametrize("method", ["numba", "torch"])
@settings(max_examples=40, deadline=None)
@given(atoms_list=st.lists(structures(), min_size=2, max_size=3), cutoff=st.floats(0.5, 5.0))
def test_list_of_a_structure_does_not_depend_on_the_batch(method, atoms_list, cutoff):
    together = to_batch(atoms_list)
    compute_neighbors(together, cutoff, method=method)
    for g, atoms in enumerate(atoms_list):
        alone = to_batch([atoms])
        compute_neighbors(alone, cutoff, method=method)
        rows = slice(int(together.edge_ptr[g]), int(together.edge_ptr[g + 1]))
        first = int(together.batch_ptr[g])
        # Equal in order too, not only as sets: sums over neighbours are then equal to the last bit.
        assert torch.equal(together.neighbor_list[rows] - first, alone.neighbor_list)
        assert torch.equal(together.neighbor_list_shifts[rows], alone.neighbor_list_shifts)


@pytest.mark.parametrize("method", ["numba", "torch"])
@pytest.mark.parametrize("number", [2, 3, 4, 5, 8])
def test_both_directions_of_a_pair_at_the_cutoff_itself(method, number):
    """Distances that equal the cutoff to the last bits: in or out, but (i, j, S) never without (j, i, −S)."""
    rng = np.random.default_rng(number)
    a = 1.1
    rotation, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    cell = torch.tensor(3 * a * rotation)
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3) * a
    positions = torch.tensor(grid @ rotation + rng.normal(size=3))
    pairs, shifts, _ = neighbor_list(
        positions,
        torch.tensor([0, 27]),
        cell.unsqueeze(0),
        torch.ones(1, 3, dtype=torch.bool),
        a * number**0.5,
        method=method,
    )
    found = {(*p, *s) for p, s in zip(pairs.tolist(), shifts.tolist(), strict=True)}
    assert found == {(j, i, -a, -b, -c) for i, j, a, b, c in found}


@pytest.mark.parametrize("half_list", [False, True])
def test_result_does_not_depend_on_the_number_of_threads(half_list):
    rng = np.random.default_rng(1)
    atoms = Atoms("Ar300", positions=rng.random((300, 3)) * 15, cell=[15, 15, 15], pbc=[True, True, False])
    batch = to_batch([atoms, atoms[:7]])
    arguments = (batch.positions, batch.batch_ptr, batch.cell, batch.pbc, 4.0)
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(
                (
                    *neighbor_list(*arguments, half_list=half_list, method="numba"),
                    *neighbor_matrix(*arguments, half_list=half_list, method="numba"),
                )
            )
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
