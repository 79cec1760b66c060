"""Batches: joining, selecting, splitting, edges, neighbour fields, moving."""

import copy
import pickle

import numpy as np
import pytest
import torch

from nvalchemi.data import AtomicData, Batch


def structure(n, **fields):
    positions = torch.arange(3.0 * n).reshape(n, 3)
    return AtomicData(positions, torch.arange(1, n + 1), **fields)


@pytest.fixture
def batch():
    """Four graphs of 1, 2, 0 and 3 atoms."""
    return Batch.from_data_list([structure(n, energy=float(n), info={"n": n}) for n in (1, 2, 0, 3)])


def test_structure_of_a_batch(batch):
    assert (batch.num_graphs, len(batch), batch.num_nodes, batch.num_edges) == (4, 4, 6, 0)
    assert batch.batch_ptr.tolist() == [0, 1, 3, 3, 6]
    assert batch.batch_idx.tolist() == [0, 1, 1, 3, 3, 3]
    assert batch.num_nodes_per_graph.tolist() == [1, 2, 0, 3]
    assert batch.edge_ptr.tolist() == [0, 0, 0, 0, 0]
    assert batch.energy.tolist() == [[1], [2], [0], [3]]
    assert [info["n"] for info in batch.info] == [1, 2, 0, 3]
    assert "4 graphs, 6 atoms, 0 edges" in repr(batch)


def test_a_batch_is_not_made_by_its_constructor():
    with pytest.raises(TypeError, match="from_data_list"):
        Batch()


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [([], ValueError, "at least one structure"), ([structure(1), 1], TypeError, "element 1 is a int")],
)
def test_joining_refuses(parts, error, message):
    with pytest.raises(error, match=message):
        Batch.from_data_list(iter(parts))


# ---------------------------------------------------------------------- selection
@pytest.mark.parametrize(
    "index", [3, -1, np.int64(3), np.array(3), torch.tensor(3), torch.tensor(-1, dtype=torch.int32)]
)
def test_an_integer_gives_a_structure(batch, index):
    data = batch[index]
    assert isinstance(data, AtomicData)
    assert data.num_nodes == 3
    assert data.energy.item() == 3
    assert data.info == {"n": 3}


@pytest.mark.parametrize(
    ("index", "chosen"),
    [
        (slice(1, 3), [2, 0]),
        (slice(None, None, -1), [3, 0, 2, 1]),
        (slice(-1, 9), [3]),
        (slice(0, 0), []),
        ([0, 3], [1, 3]),
        ((0, 3), [1, 3]),
        (range(3, 1, -1), [3, 0]),
        ([-1, 0, 0], [3, 1, 1]),
        ([], []),
        ([True, False, False, True], [1, 3]),
        (np.array([3, 1]), [3, 2]),
        (np.array([3, 1], dtype=np.int32), [3, 2]),
        (np.array([False, True, True, False]), [2, 0]),
        (torch.tensor([2, 2], dtype=torch.uint8), [0, 0]),
        (torch.tensor([True, False, True, False]), [1, 0]),
        (torch.tensor([]), []),
        (torch.zeros(4, dtype=torch.bool), []),
    ],
    ids=str,
)
def test_everything_else_gives_a_batch(batch, index, chosen):
    picked = batch[index]
    assert isinstance(picked, Batch)
    assert picked.num_nodes_per_graph.tolist() == chosen
    assert picked.energy.flatten().tolist() == chosen
    assert [info["n"] for info in picked.info] == chosen
    assert picked.positions.shape == (sum(chosen), 3)
    picked.positions += 1
    assert batch.positions[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (4, IndexError, r"graph 4 is out of range: Batch\(4 graphs, 6 atoms\)"),
        (-5, IndexError, "graph -5 is out of range"),
        ([0, 9], IndexError, "graph 9 is out of range"),
        ([-9, 0], IndexError, "graph -9 is out of range"),
        (True, TypeError, "not by a bool"),
        (torch.tensor([0.0]), IndexError, r"integer or boolean index, got \[1\] of torch.float32"),
        (np.array(1.0), IndexError, r"got \[\] of torch.float64"),
        (torch.tensor(True), IndexError, r"mask over graphs must have shape \[4\], got \[\]"),
        ([True, False], IndexError, r"mask over graphs must have shape \[4\], got \[2\]"),
        (np.ones(5, dtype=bool), IndexError, r"shape \[4\], got \[5\]"),
        (torch.tensor([[0, 1]]), IndexError, r"1-D integer or boolean index, got \[1, 2\]"),
        ("energies", KeyError, "no field 'energies'"),
    ],
)
def test_selection_refuses(batch, index, error, message):
    with pytest.raises(error, match=message):
        batch[index]


@pytest.mark.parametrize("index", [1.0, np.float64(1), None, {0}, ..., [0.0]], ids=str)
def test_selection_refuses_what_is_no_index(batch, index):
    # The checked annotations of the test suite answer before the package does; both with a TypeError or IndexError.
    with pytest.raises((TypeError, IndexError)):
        batch[index]


def test_iteration_gives_the_structures(batch):
    assert [data.num_nodes for data in batch] == [1, 2, 0, 3]
    assert Batch.from_data_list(batch).positions.tolist() == batch.positions.tolist()
    assert list(batch[[]]) == []


def test_a_structure_taken_out_is_a_view_and_its_clone_is_not(batch):
    batch[3].positions[0] = 7.0
    assert batch.positions[3].tolist() == [7, 7, 7]
    batch[3].clone().positions[0] = 8.0
    assert batch.positions[3].tolist() == [7, 7, 7]


def test_select_range_gives_views(batch):
    part = batch.select_range(1, 4)
    assert part.batch_ptr.tolist() == [0, 2, 2, 5]
    part.positions.zero_()
    assert batch.positions[1:].eq(0).all()
    assert batch.select_range(2, 2).num_graphs == 0


@pytest.mark.parametrize(("start", "stop"), [(3, 1), (-1, 4), (0, 5)])
def test_select_range_refuses(batch, start, stop):
    with pytest.raises(IndexError, match=f"graphs {start} to {stop} are no range"):
        batch.select_range(start, stop)


def test_an_empty_batch_is_a_batch(batch):
    empty = batch[[]]
    assert (empty.num_graphs, empty.num_nodes) == (0, 0)
    assert empty.to_data_list() == []
    assert empty.clone().batch_idx.shape == (0,)
    assert Batch.from_data_list([empty, batch]).num_graphs == 4
    assert empty[[]].num_graphs == 0


# ---------------------------------------------------------------------- joining
def test_append_adds_at_the_end_in_place(batch):
    batch.append(structure(2, energy=2.0, info={"n": 2}))
    batch.append(batch)
    assert batch.num_nodes_per_graph.tolist() == [1, 2, 0, 3, 2] * 2
    assert len(batch.info) == 10


def test_a_failed_append_changes_nothing(batch):
    with pytest.raises(ValueError, match="'energy' is missing in graph 4 of 5"):
        batch.append(structure(2))
    assert batch.num_graphs == 4


def test_missing_velocities_are_an_error_or_a_fill_and_never_dropped():
    parts = [structure(2, velocities=torch.ones(2, 3)), structure(1), structure(3)]
    with pytest.raises(ValueError, match="'velocities' is missing in graphs 1, 2 of 3"):
        Batch.from_data_list(parts)
    filled = Batch.from_data_list(parts, missing="fill")
    assert filled.velocities[:2].eq(1).all()
    assert filled.velocities[2:].isnan().all()


def test_an_unknown_way_to_treat_missing_fields():
    with pytest.raises((ValueError, TypeError), match="missing"):
        Batch.from_data_list([structure(1, energy=1.0), structure(1)], missing="drop")


def test_fill_values_by_kind():
    first = structure(1, charge=1, spin=torch.tensor([[0.5]]))
    first.add_node_property("mask", [True])
    first.add_system_property("scale", 2.0)
    batch = Batch.from_data_list([structure(2), first], missing="fill")
    assert batch.charge.tolist() == [[0], [1]]
    assert batch.spin.isnan().tolist() == [[True], [False]]
    assert batch.mask.tolist() == [False, False, True]
    assert batch.scale.isnan().tolist() == [True, False]
    assert batch[1].scale.shape == ()


def test_mixed_periodicity():
    slab = structure(2, cell=torch.eye(3) * 5, pbc=[True, True, False])
    batch = Batch.from_data_list([structure(1), slab])
    assert batch.pbc.tolist() == [[False] * 3, [True, True, False]]
    assert not batch.cell[0].any()
    assert "cell" not in Batch.from_data_list([structure(1), structure(2)])


def test_fixed_atoms_join_free_ones():
    batch = Batch.from_data_list([structure(1), structure(2, atom_categories=[1, 0])])
    assert batch.atom_categories.tolist() == [0, 1, 0]


def test_integer_and_fractional_charges_join():
    batch = Batch.from_data_list([structure(1, charge=1), structure(1, charge=0.5), structure(1, charge=0)])
    assert batch.charge.tolist() == [[1.0], [0.5], [0.0]]


@pytest.mark.parametrize(
    ("name", "first", "second", "message"),
    [
        (
            "u",
            torch.zeros(2, 3),
            torch.zeros(2, 4),
            r"'u' has different shapes.*: \[3\] in graph 0; \[4\] in graph 1",
        ),
        (
            "u",
            torch.zeros(2),
            torch.zeros(2).double(),
            "'u' has different dtypes: torch.float32 in graph 0; torch.float64 in",
        ),
    ],
)
def test_fields_that_do_not_fit_are_named_with_their_graphs(name, first, second, message):
    parts = [structure(2), structure(2)]
    for part, values in zip(parts, (first, second), strict=True):
        part.add_node_property(name, values)
    with pytest.raises(ValueError, match=message):
        Batch.from_data_list(parts)


def test_devices_that_do_not_fit_are_named():
    with pytest.raises(
        ValueError, match="'positions' is on different devices: cpu in graph 0; meta in graph 1"
    ):
        Batch.from_data_list([structure(1), structure(1).to("meta")])


def test_one_name_at_two_levels_is_an_error():
    first, second = structure(1), structure(1)
    first.add_node_property("u", torch.zeros(1))
    second.add_system_property("u", torch.zeros(1))
    with pytest.raises(ValueError, match="'u' is of level 'node'"):
        Batch.from_data_list([first, second])


def test_the_order_of_fields_does_not_matter():
    first, second = structure(1, energy=1.0, charge=1), structure(1, charge=2, energy=2.0)
    batch = Batch.from_data_list([first, second])
    assert batch.energy.tolist() == [[1], [2]]
    assert batch.charge.tolist() == [[1], [2]]


def test_charge_and_spin_survive_join_select_append():
    states = [(0, 1), (1, 2), (-1, 2)]
    batch = Batch.from_data_list([structure(1, charge=q, spin=s) for q, s in states])
    picked = batch[[2, 0]]
    picked.append(batch[1])
    assert picked.charge.flatten().tolist() == [-1, 0, 1]
    assert picked.spin.flatten().tolist() == [2, 1, 2]
    # E = charge² is a model that sees nothing else.
    assert batch.charge.square().flatten().tolist() == [0, 1, 1]


# ---------------------------------------------------------------------- fields
def test_adding_and_replacing_fields(batch):
    batch.add_key("weight", torch.ones(4, 1), "system")
    batch.weight = torch.zeros(4, 2)
    batch.forces = torch.zeros(6, 3)
    assert batch.level("forces") == "node"
    assert batch[1].weight.shape == (1, 2)
    batch.remove_key("weight")
    assert "weight" not in batch


@pytest.mark.parametrize(
    ("key", "values", "level", "message"),
    [
        (
            "energy",
            torch.zeros(3, 1),
            None,
            r"'energy' of Batch\(4 graphs, 6 atoms\).*\[num_systems, 1\] with 4 rows, got \[3, 1\]",
        ),
        ("forces", torch.zeros(6), None, r"'forces'.*\[num_nodes, 3\] with 6 rows, got \[6\]"),
        ("forces", np.zeros((6, 3)), None, "'forces' must be a torch.Tensor, not ndarray"),
        ("forces", torch.zeros(6, 3, dtype=torch.int64), None, "'forces'.*kind float, got torch.int64"),
        ("forces", torch.zeros(6, 3, device="meta"), None, "'forces' is on meta"),
        ("u", torch.zeros(6), None, "say its level"),
        ("u", torch.zeros(()), "system", r"'u'.*got \[\]"),
        ("u", torch.zeros(3), "edge", "no edges yet.*set_edges"),
    ],
)
def test_adding_a_field_refuses(batch, key, values, level, message):
    with pytest.raises(ValueError, match=message):
        batch.add_key(key, values, level)


def test_a_scalar_stays_a_scalar_until_it_is_replaced_by_a_vector():
    parts = [structure(1), structure(2)]
    for k, part in enumerate(parts):
        part.add_system_property("scale", float(k))
    batch = Batch.from_data_list(parts)
    assert batch.scale.tolist() == [0, 1]
    assert batch[[1, 0]][0].scale.shape == ()
    batch.scale = torch.zeros(2, 3)
    assert batch[0].scale.shape == (1, 3)
    assert Batch.from_data_list(list(batch)).scale.shape == (2, 3)


# ---------------------------------------------------------------------- edges
def test_edges_are_batch_global_inside_and_local_outside():
    dimer = structure(2, neighbor_list=[[0, 1], [1, 0]], neighbor_list_shifts=np.zeros((2, 3), dtype=int))
    lone = structure(1, neighbor_list=[], neighbor_list_shifts=[])
    batch = Batch.from_data_list([dimer, lone, dimer])
    assert batch.neighbor_list.tolist() == [[0, 1], [1, 0], [3, 4], [4, 3]]
    assert batch.edge_ptr.tolist() == [0, 2, 2, 4]
    assert batch.num_edges_per_graph.tolist() == [2, 0, 2]
    for index in (0, 2):
        assert batch[index].neighbor_list.tolist() == [[0, 1], [1, 0]]
    assert batch[1].neighbor_list.shape == (0, 2)
    assert batch[[2, 1]].neighbor_list.tolist() == [[0, 1], [1, 0]]
    assert batch[[1, 2]].neighbor_list.tolist() == [[1, 2], [2, 1]]
    assert batch.select_range(1, 3).neighbor_list.tolist() == [[1, 2], [2, 1]]
    assert batch.select_range(1, 3).edge_ptr.tolist() == [0, 0, 2]


def test_a_batch_without_any_edge():
    batch = Batch.from_data_list([structure(1, neighbor_list=[]), structure(1, neighbor_list=[])])
    assert batch.neighbor_list.shape == (0, 2)
    assert batch.edge_ptr.tolist() == [0, 0, 0]
    assert batch[1].num_edges == 0


def test_set_edges_replaces_every_edge_field(batch):
    batch.set_edges(torch.tensor([0, 0, 1, 1, 1]), neighbor_list=torch.tensor([[1, 2]]), weight=torch.ones(1))
    assert batch.level("weight") == "edge"
    batch.add_key("u", torch.ones(1), "edge")
    batch.set_edges(torch.tensor([0, 0, 2, 2, 2]), neighbor_list=torch.tensor([[1, 2], [2, 1]]))
    assert "u" not in batch
    assert batch.num_edges == 2
    assert batch[1].neighbor_list.tolist() == [[0, 1], [1, 0]]
    batch.remove_key("neighbor_list")
    assert batch.edge_ptr.tolist() == [0] * 5
    assert batch[1].num_edges == 0


PAIRS = torch.tensor([[1, 2]])


@pytest.mark.parametrize(
    ("edge_ptr", "fields", "message"),
    [
        (torch.tensor([0, 1]), {"neighbor_list": PAIRS}, r"edge_ptr must have shape \[5\].*got \[2\]"),
        (torch.tensor([0, 0, 1, 1, 1.0]), {"neighbor_list": PAIRS}, "edge_ptr.*got.*float32"),
        (
            torch.tensor([0, 0, 1, 1, 3]),
            {"neighbor_list": PAIRS},
            r"'neighbor_list'.*with 3 rows, got \[1, 2\]",
        ),
        (torch.tensor([0, 0, 1, 1, 1]), {}, "at least one edge field"),
        (
            torch.tensor([0, 0, 1, 1, 1]),
            {"neighbor_list": PAIRS, "u": torch.ones(2)},
            r"'u'.*with 1 rows, got \[2\]",
        ),
        (torch.tensor([0, 0, 1, 1, 1]), {"forces": torch.ones(1, 3)}, "'forces' is of level 'node'"),
        (torch.tensor([0, 0, 1, 1, 1]), {"clone": torch.ones(1)}, "'clone' cannot name a field"),
        (torch.tensor([0, 0, 1, 1, 1]), {"u": torch.ones(1, device="meta")}, "'u' is on meta"),
    ],
)
def test_set_edges_refuses_and_changes_nothing(batch, edge_ptr, fields, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        batch.set_edges(edge_ptr, **fields)
    assert caught.match(message)
    assert batch.edge_ptr.tolist() == [0] * 5


def test_neighbour_lists_that_only_some_have_are_dropped():
    listed = structure(2, neighbor_list=[[0, 1]], neighbor_matrix=[[1], [2]], num_neighbors=[1, 0])
    for parts in ([listed, structure(1)], [structure(1), Batch.from_data_list([listed])]):
        batch = Batch.from_data_list(parts)
        assert not {"neighbor_list", "neighbor_matrix", "num_neighbors"} & set(batch.keys())
        assert batch.num_edges == 0
    assert "neighbor_list" in listed


def test_bonds_of_the_user_are_never_dropped():
    bonded, lone = structure(2), structure(1)
    bonded.add_edge_property("bond_order", torch.ones(1))
    with pytest.raises(ValueError, match="'bond_order' is missing in graph 1 of 2"):
        Batch.from_data_list([bonded, lone])
    batch = Batch.from_data_list([bonded, lone, bonded], missing="fill")
    assert batch.edge_ptr.tolist() == [0, 1, 1, 2]
    assert batch[1].bond_order.shape == (0,)


def matrix_structure(n, width, dtype=torch.int32):
    """Every atom has its successor as the one neighbour; padded with n."""
    matrix = torch.full((n, width), n, dtype=dtype)
    shifts = torch.zeros(n, width, 3, dtype=torch.int8)
    if n > 1:
        matrix[:, 0] = (torch.arange(n) + 1) % n
        shifts[:, 0, 2] = 1
    counts = torch.full((n,), int(n > 1), dtype=torch.int32)
    return structure(n, neighbor_matrix=matrix, neighbor_matrix_shifts=shifts, num_neighbors=counts)


def test_neighbour_matrices_are_widened_and_padded_with_the_number_of_atoms():
    batch = Batch.from_data_list([matrix_structure(2, 1), matrix_structure(1, 3), matrix_structure(3, 2)])
    assert batch.neighbor_matrix.tolist() == [
        [1, 6, 6],
        [0, 6, 6],
        [6, 6, 6],
        [4, 6, 6],
        [5, 6, 6],
        [3, 6, 6],
    ]
    assert batch.neighbor_matrix.dtype == torch.int32
    assert batch.neighbor_matrix_shifts.shape == (6, 3, 3)
    assert batch.neighbor_matrix_shifts.dtype == torch.int8
    assert batch.neighbor_matrix_shifts[:, 1:].eq(0).all()
    expected = {0: [[1, 2, 2], [0, 2, 2]], 1: [[1, 1, 1]], 2: [[1, 3, 3], [2, 3, 3], [0, 3, 3]]}
    for index, matrix in expected.items():
        assert batch[index].neighbor_matrix.tolist() == matrix
        assert batch.to_data_list()[index].neighbor_matrix.tolist() == matrix
    assert batch[[2, 0]].neighbor_matrix.tolist() == [[1, 5, 5], [2, 5, 5], [0, 5, 5], [4, 5, 5], [3, 5, 5]]
    again = Batch.from_data_list([batch, matrix_structure(2, 1)])
    assert again.neighbor_matrix[-2:].tolist() == [[7, 8, 8], [6, 8, 8]]
    assert again.neighbor_matrix[:6].tolist() == [
        [8 if i == 6 else i for i in row] for row in batch.neighbor_matrix.tolist()
    ]


# ---------------------------------------------------------------------- copies and devices
@pytest.mark.parametrize("duplicate", [Batch.clone, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_copies_share_nothing(batch, duplicate):
    other = duplicate(batch)
    other.positions.zero_()
    other.info[0]["n"] = 99
    other.add_key("u", torch.zeros(6), "node")
    assert batch.positions[-1].tolist() == [6, 7, 8]
    assert batch.info[0]["n"] == 1
    assert "u" not in batch


def test_pickling_one_structure_does_not_drag_the_batch_along():
    batch = Batch.from_data_list([structure(100) for _ in range(50)])
    assert len(pickle.dumps(batch[0])) < 2 * len(pickle.dumps(structure(100).clone()))


def test_moving_takes_everything_along(batch):
    batch.set_edges(torch.tensor([0, 0, 1, 1, 1]), neighbor_list=PAIRS)
    _ = batch.batch_idx
    moved = batch.to("meta", torch.float64)
    assert moved.dtype == torch.float64
    tensors = [moved.batch_ptr, moved.batch_idx, moved.edge_ptr, *(t for _, t in moved.items())]
    assert {t.device.type for t in tensors} == {"meta"}
    assert (batch.device.type, batch.dtype) == ("cpu", torch.float32)
    assert Batch.from_data_list([structure(1)], device="meta").device.type == "meta"


def test_describing_a_graph(batch):
    assert batch.describe_graph(1) == "graph 1"
    batch.system_id = torch.tensor([[4], [17], [5], [6]])
    assert batch.describe_graph(1) == "graph 1 (system_id 17)"


def test_labels_wider_than_the_positions_in_some_graphs_are_an_error():
    narrow = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[1], forces=torch.zeros(1, 3))
    wide = Batch.from_data_list([narrow])
    wide.forces = wide.forces.double()
    assert Batch.from_data_list([wide, wide]).forces.dtype == torch.float64
    with pytest.raises(
        ValueError, match=r"'forces' has different dtypes: torch\.float32 in graph 0; torch\.float64"
    ):
        Batch.from_data_list([narrow, wide])
