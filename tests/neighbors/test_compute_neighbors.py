"""Special structures, options, tables that are used again, and errors of the neighbour search."""

import numpy as np
import pytest
import torch
from ase.build import bulk
from pydantic import ValidationError

from nvalchemi.data import AtomicData, Batch
from nvalchemi.neighbors import (
    NeighborConfig,
    NeighborListFormat,
    compute_neighbors,
    max_displacement_exceeds,
    neighbor_matrix,
)

METHODS = pytest.mark.parametrize("method", ["numba", "torch"])


def molecule(positions, **fields) -> AtomicData:
    positions = torch.as_tensor(positions, dtype=torch.float64).reshape(-1, 3)
    return AtomicData(
        positions=positions, atomic_numbers=torch.ones(len(positions), dtype=torch.int64), **fields
    )


def crystal(positions, cell, pbc=(True, True, True)) -> AtomicData:
    cell = torch.as_tensor(cell, dtype=torch.float64).reshape(1, 3, 3)
    return molecule(positions, cell=cell, pbc=torch.tensor([list(pbc)]))


def argon(cubic: bool) -> AtomicData:
    return AtomicData.from_atoms(bulk("Ar", "fcc", a=5.26, cubic=cubic), dtype=torch.float64)


def distances(batch: Batch) -> torch.Tensor:
    i, j = batch.neighbor_list.T
    d = batch.positions[j] - batch.positions[i]
    if "cell" in batch:
        d = d + torch.einsum(
            "ec,ecd->ed", batch.neighbor_list_shifts.to(d.dtype), batch.cell[batch.batch_idx[i]]
        )
    return d.norm(dim=-1)


WATER = [[0.0, 0.0, 0.119262], [0.0, 0.763239, -0.477047], [0.0, -0.763239, -0.477047]]  # ASE's g2 geometry


@METHODS
@pytest.mark.parametrize("cubic", [True, False])
def test_fcc_argon_has_78_neighbours(method, cubic):
    batch = Batch.from_data_list([argon(cubic)])
    compute_neighbors(batch, 8.5, method=method)
    assert torch.bincount(batch.neighbor_list[:, 0]).tolist() == [78] * batch.num_nodes
    assert distances(batch).max() < 8.5


@METHODS
def test_water_with_a_dummy_cell(method):
    batch = Batch.from_data_list([crystal(WATER, np.eye(3), (False, False, False))])
    compute_neighbors(batch, 2.0, method=method)
    assert torch.equal(batch.neighbor_list_shifts, torch.zeros(6, 3, dtype=torch.int32))
    found = distances(batch).sort().values
    torch.testing.assert_close(found[:4], torch.full((4,), 0.9686, dtype=torch.float64), atol=5e-5, rtol=0)
    torch.testing.assert_close(found[4:], torch.full((2,), 1.5265, dtype=torch.float64), atol=5e-5, rtol=0)


@METHODS
def test_molecule_without_cell_may_be_anywhere(method):
    here, there = (Batch.from_data_list([molecule(torch.tensor(WATER) + move)]) for move in (0.0, -50.0))
    for batch in (here, there):
        compute_neighbors(batch, 2.0, method=method)
    assert torch.equal(here.neighbor_list, there.neighbor_list)
    assert len(here.neighbor_list) == 6


@METHODS
def test_whole_number_of_cells_away_the_vectors_are_the_same(method):
    inside = argon(cubic=True)
    outside = inside.clone()
    moves = torch.tensor([[0, 0, 0], [130, 0, 0], [0, -7, 0], [1, 2, -300]], dtype=torch.float64)
    outside.positions += moves @ inside.cell[0]
    first, second = Batch.from_data_list([inside]), Batch.from_data_list([outside])
    for batch in (first, second):
        compute_neighbors(batch, 6.0, method=method)
    assert (
        torch.bincount(second.neighbor_list[:, 0]).tolist()
        == torch.bincount(first.neighbor_list[:, 0]).tolist()
    )
    torch.testing.assert_close(
        distances(first).sort().values, distances(second).sort().values, atol=1e-9, rtol=0
    )
    # Shifts that do not fit in int8 are kept in a wider type, not wrapped round.
    compute_neighbors(second, 6.0, method=method, format="matrix")
    assert int(second.neighbor_matrix_shifts.abs().max()) > 127
    compute_neighbors(first, 6.0, method=method, format="matrix")
    assert first.neighbor_matrix_shifts.dtype == torch.int8


@METHODS
@pytest.mark.parametrize("format_", ["coo", "matrix"])
def test_no_atoms_one_atom_and_two_at_the_same_place(method, format_):
    batch = Batch.from_data_list(
        [molecule(np.zeros((0, 3))), molecule([[1.0, 2, 3]]), molecule([[1.0, 1, 1], [1, 1, 1]])]
    )
    compute_neighbors(batch, 3.0, method=method, format=format_)
    if format_ == "coo":
        assert batch.neighbor_list.tolist() == [[1, 2], [2, 1]]
        assert batch.edge_ptr.tolist() == [0, 0, 0, 2]
    else:
        assert batch.num_neighbors.tolist() == [0, 1, 1]
        assert batch.neighbor_matrix[:, 0].tolist() == [3, 2, 1]


@METHODS
@pytest.mark.parametrize("format_", ["coo", "matrix"])
def test_batch_without_atoms(method, format_):
    batch = Batch.from_data_list([molecule(np.zeros((0, 3)))])
    compute_neighbors(batch, 3.0, method=method, format=format_)
    if format_ == "coo":
        assert batch.neighbor_list.shape == (0, 2)
        assert batch.edge_ptr.tolist() == [0, 0]
    else:
        assert batch.num_neighbors.shape == (0,)


@METHODS
def test_molecules_and_crystals_in_one_batch(method):
    fcc = argon(cubic=False)
    batch = Batch.from_data_list([molecule(WATER), fcc, molecule(WATER)])
    compute_neighbors(batch, 2.0, method=method)
    assert batch.edge_ptr.tolist() == [0, 6, 6, 12]
    compute_neighbors(batch, 8.5, method=method)
    assert batch.edge_ptr.tolist() == [0, 6, 84, 90]


@METHODS
def test_memory_is_bounded_for_atoms_very_far_apart(method):
    batch = Batch.from_data_list(
        [molecule([[0.0, 0, 0], [1e6, -1e6, 1e6], [1e6 + 1, -1e6, 1e6], [1e200, 0, 0]])]
    )
    compute_neighbors(batch, 3.0, method=method)
    assert batch.neighbor_list.tolist() == [[1, 2], [2, 1]]


@METHODS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_of_the_positions_is_that_of_the_batch(method, dtype):
    batch = Batch.from_data_list([argon(cubic=True)]).to(dtype=dtype)
    compute_neighbors(batch, 8.5, method=method, format="matrix")
    assert batch.num_neighbors.tolist() == [78] * 4
    assert (batch.neighbor_matrix.dtype, batch.num_neighbors.dtype) == (torch.int32, torch.int32)


# ---------------------------------------------------------------------- options
def test_config_sets_cutoff_skin_format_and_half():
    batch = Batch.from_data_list([argon(cubic=False)])
    compute_neighbors(batch, config=NeighborConfig(cutoff=3.0, skin=1.0, format="matrix", half_list=True))
    assert batch.num_neighbors.tolist() == [6]
    with pytest.raises(ValueError, match="not both"):
        compute_neighbors(batch, 3.0, config=NeighborConfig(cutoff=3.0))
    with pytest.raises(ValueError, match="cutoff or a config"):
        compute_neighbors(batch)


@pytest.mark.parametrize("cutoff", [0.0, -1.0, float("nan"), float("inf")])
def test_cutoff_must_be_positive_and_finite(cutoff):
    with pytest.raises(ValueError, match="cutoff must be a positive number"):
        compute_neighbors(Batch.from_data_list([argon(cubic=True)]), cutoff)
    with pytest.raises(ValidationError):
        NeighborConfig(cutoff=cutoff)


def test_config_is_checked_and_frozen():
    config = NeighborConfig(cutoff=5.0, format="matrix")
    assert config.format is NeighborListFormat.MATRIX
    for wrong in ({"skin": -0.1}, {"skin": float("nan")}, {"format": "csr"}, {"cutof": 3.0}):
        with pytest.raises(ValidationError):
            NeighborConfig(**{"cutoff": 5.0, **wrong})
    with pytest.raises(ValidationError):
        config.cutoff = 6.0  # pyright: ignore[reportAttributeAccessIssue]


@METHODS
def test_max_neighbors_is_a_minimum_and_never_cuts(method):
    batch = Batch.from_data_list([argon(cubic=False)])
    compute_neighbors(batch, 8.5, format="matrix", max_neighbors=8, method=method)
    assert batch.num_neighbors.tolist() == [78]
    assert batch.neighbor_matrix.shape[1] >= 78
    compute_neighbors(batch, 8.5, format="matrix", max_neighbors=200, method=method)
    assert batch.neighbor_matrix.shape == (1, 200)


def test_unknown_method():
    with pytest.raises(ValueError, match="unknown method"):
        compute_neighbors(Batch.from_data_list([argon(cubic=True)]), 3.0, method="fast")  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------- tables used again
def test_tables_are_overwritten_in_place_until_a_row_is_too_long():
    batch = Batch.from_data_list([argon(cubic=True)])
    compute_neighbors(batch, 8.5, format="matrix")
    tables = (batch.neighbor_matrix, batch.num_neighbors, batch.neighbor_matrix_shifts)
    compute_neighbors(batch, 5.0, format="matrix", in_place=True)
    assert all(old is new for old, new in zip(tables, _tables(batch), strict=True))
    assert batch.num_neighbors.tolist() == [12] * 4
    assert bool((batch.neighbor_matrix[:, 12:] == 4).all())
    compute_neighbors(batch, 12.0, format="matrix", in_place=True)
    assert batch.neighbor_matrix is not tables[0]
    fresh = batch.clone()
    compute_neighbors(fresh, 12.0, format="matrix")
    assert torch.equal(fresh.num_neighbors, batch.num_neighbors)


def test_tables_widen_their_shifts_when_atoms_have_drifted_far():
    batch = Batch.from_data_list([argon(cubic=True)])
    compute_neighbors(batch, 5.0, format="matrix")
    before = batch.num_neighbors.clone()
    batch.positions[2] += 500 * batch.cell[0, 1]
    compute_neighbors(batch, 5.0, format="matrix", in_place=True)
    assert batch.neighbor_matrix_shifts.dtype == torch.int32
    assert int(batch.neighbor_matrix_shifts.abs().max()) in (500, 501)
    assert torch.equal(batch.num_neighbors, before)


def test_without_in_place_earlier_tables_are_not_touched():
    batch = Batch.from_data_list([argon(cubic=True)])
    compute_neighbors(batch, 8.5, format="matrix")
    old = batch.neighbor_matrix
    copy = old.clone()
    compute_neighbors(batch, 5.0, format="matrix")
    assert torch.equal(old, copy)


def test_tables_of_another_layout_are_replaced():
    batch = Batch.from_data_list([argon(cubic=True)])
    out = (
        torch.zeros(4, 96, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, 96, 3, dtype=torch.int8),
    )
    new = neighbor_matrix(batch.positions, batch.batch_ptr, batch.cell, batch.pbc, 8.5, out=out)
    assert new[0] is not out[0]
    assert new[1].tolist() == [78] * 4


def _tables(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.neighbor_matrix, batch.num_neighbors, batch.neighbor_matrix_shifts


# ---------------------------------------------------------------------- displacement
def test_displacement_is_that_of_the_atom_that_moved_most():
    x = torch.zeros(3000, 3, dtype=torch.float64)
    y = x.clone()
    y[2500] = torch.tensor([0.3, 0.0, 0.4])
    assert max_displacement_exceeds(y, x, 0.499)
    assert not max_displacement_exceeds(y, x, 0.501)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_position_that_is_not_a_number_has_moved(value):
    x = torch.zeros(5, 3)
    y = x.clone()
    y[4, 1] = value
    assert max_displacement_exceeds(y, x, 1.0)


# ---------------------------------------------------------------------- errors
@METHODS
@pytest.mark.parametrize(
    ("cell", "pbc", "words"),
    [
        ([[3, 0, 0], [0, 3, 0], [0, 0, 0]], (True, True, True), "volume 0 Å³ with pbc (T, T, T)"),
        ([[3, 0, 0], [6, 0, 0], [0, 0, 9]], (True, True, False), "volume 0 Å³ with pbc (T, T, F)"),
        ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], (True, False, False), "volume 0 Å³ with pbc (T, F, F)"),
        ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], (True, True, True), "is degenerate"),
    ],
)
def test_degenerate_cell_is_refused_and_named(method, cell, pbc, words):
    batch = Batch.from_data_list([argon(cubic=False), crystal([[0.0, 0, 0]], cell, pbc)])
    batch.system_id = torch.tensor([[4], [17]])
    with pytest.raises(ValueError, match="graph 1") as error:
        compute_neighbors(batch, 3.0, method=method)
    assert words in str(error.value)
    assert "(system_id 17)" in str(error.value)


@METHODS
def test_lattice_vector_of_an_axis_that_is_not_periodic_does_not_matter(method):
    slab = [[3, 0, 0], [0, 3, 0], [3, 3, 0]]
    batch = Batch.from_data_list([crystal([[0.0, 0, 0]], slab, (True, True, False))])
    compute_neighbors(batch, 3.1, method=method)
    assert sorted(batch.neighbor_list_shifts.tolist()) == [[-1, 0, 0], [0, -1, 0], [0, 1, 0], [1, 0, 0]]


@METHODS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_position_that_is_not_finite_is_named(method, value):
    batch = Batch.from_data_list([argon(cubic=True), argon(cubic=True)])
    batch.positions[6, 1] = value
    with pytest.raises(ValueError, match="position of atom 2 of graph 1 is not finite"):
        compute_neighbors(batch, 3.0, method=method)


@METHODS
def test_atom_uncountably_many_cells_away_is_named(method):
    batch = Batch.from_data_list([argon(cubic=True)])
    batch.positions[3, 0] = 1e30
    with pytest.raises(ValueError, match="atom 3 of graph 0 is too many cells away"):
        compute_neighbors(batch, 3.0, method=method)


@pytest.mark.parametrize("stretch", [0.02, 0.3], ids=["same width", "table grows"])
def test_searching_some_graphs_in_place_gives_the_list_of_searching_all(stretch):
    atoms = bulk("Ar", "fcc", 5.3, cubic=True)
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms * (2, 2, 2), dtype=torch.float64)] * 3)
    compute_neighbors(batch, 6.0, format="matrix")
    moved = torch.tensor([False, True, False])
    # The middle graph is squeezed, so that its rows get longer; for the second case, longer than the table.
    batch.cell[1] *= 1 - stretch
    batch.positions[moved[batch.batch_idx]] *= 1 - stretch
    untouched = batch.neighbor_matrix[:32].clone()
    alone = batch.clone()
    compute_neighbors(alone, 6.0, format="matrix")
    compute_neighbors(batch, 6.0, format="matrix", in_place=True, graphs=moved)
    assert torch.equal(batch.num_neighbors, alone.num_neighbors)
    for row, n in enumerate(alone.num_neighbors.tolist()):
        assert torch.equal(batch.neighbor_matrix[row, :n], alone.neighbor_matrix[row, :n])
        assert torch.equal(batch.neighbor_matrix_shifts[row, :n], alone.neighbor_matrix_shifts[row, :n])
        assert bool((batch.neighbor_matrix[row, n:] == batch.num_nodes).all())
    assert torch.equal(batch.neighbor_matrix[:32, : untouched.shape[1]], untouched)


def test_graphs_that_are_not_searched_keep_their_rows():
    batch = Batch.from_data_list([AtomicData.from_atoms(bulk("Ar", "fcc", 5.3), dtype=torch.float64)] * 2)
    compute_neighbors(batch, 6.0, format="matrix")
    batch.neighbor_matrix_shifts[1].neg_()
    reversed_shifts = batch.neighbor_matrix_shifts[1].clone()
    compute_neighbors(batch, 6.0, format="matrix", in_place=True, graphs=torch.tensor([True, False]))
    assert torch.equal(batch.neighbor_matrix_shifts[1], reversed_shifts)
