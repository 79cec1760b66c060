"""Join, select and split are each other's inverses, for random structures with random fields."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch

CUSTOM = {
    "user_vectors": ("node", (3,), torch.float64),
    "user_flags": ("node", (), torch.bool),
    "user_counts": ("system", (2,), torch.int64),
    "user_scale": ("system", None, torch.float32),  # a scalar of shape []
    "user_bonds": ("edge", (2, 2), torch.float32),
}
KNOWN = (
    "cell",
    "energy",
    "forces",
    "velocities",
    "stress",
    "charge",
    "tags",
    "neighbor_list",
    "neighbor_matrix",
)


def known_field(name, n, rng):
    edges = int(rng.integers(0, 4)) if n else 0
    values = {
        "cell": rng.normal(size=(3, 3)),
        "energy": rng.normal(),
        "forces": rng.normal(size=(n, 3)),
        "velocities": rng.normal(size=(n, 3)),
        "stress": rng.normal(size=(3, 3)),
        "charge": int(rng.integers(-2, 3)),
        "tags": rng.integers(0, 9, n),
        "neighbor_list": rng.integers(0, max(n, 1), (edges, 2)),
        # n is the padding of a structure of n atoms.
        "neighbor_matrix": rng.integers(0, n + 1, (n, 4)).astype(np.int32),
    }
    return values[name]


def random_structure(n, fields, rng):
    data = AtomicData(
        rng.normal(size=(n, 3)),
        rng.integers(1, 90, n),
        dtype=torch.float64,
        info={"tag": int(rng.integers(1000))},
        **{name: known_field(name, n, rng) for name in fields if name in KNOWN},
    )
    for name in fields:
        if name in CUSTOM:
            level, tail, dtype = CUSTOM[name]
            edges = data.num_edges if "neighbor_list" in data else int(rng.integers(0, 4))
            rows = {"node": n, "edge": edges, "system": 1}[level]
            shape = () if tail is None else (rows, *tail)
            data.add_key(name, torch.as_tensor(rng.integers(0, 2, shape)).to(dtype), level)
    return data


@st.composite
def structures(draw, same_fields=True):
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    some_fields = st.sets(st.sampled_from([*KNOWN, *CUSTOM]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    common = draw(some_fields)
    return [random_structure(n, sorted(common if same_fields else draw(some_fields)), rng) for n in sizes]


def assert_same(a, b, names=None):
    assert a.info == b.info
    for name in names or a.keys():
        assert a.level(name) == b.level(name)
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape, name
        assert torch.equal(a[name], b[name]), name


@settings(deadline=None, max_examples=60)
@given(structures())
def test_splitting_undoes_joining(parts):
    batch = Batch.from_data_list(parts)
    for way in (batch.to_data_list(), list(batch), [batch[i] for i in range(len(parts))]):
        for before, after in zip(parts, way, strict=True):
            assert set(before.keys()) == set(after.keys())
            assert_same(before, after)


@settings(deadline=None, max_examples=60)
@given(structures(), st.data())
def test_selecting_is_joining_the_selected(parts, data):
    batch = Batch.from_data_list(parts)
    chosen = data.draw(st.lists(st.integers(-len(parts), len(parts) - 1)))
    picked = batch.index_select(chosen)
    assert picked.num_graphs == len(chosen)
    for index, after in zip(chosen, picked, strict=True):
        assert_same(parts[index], after)
    if chosen:
        again = Batch.from_data_list([parts[i] for i in chosen])
        assert torch.equal(picked.batch_ptr, again.batch_ptr)
        assert torch.equal(picked.edge_ptr, again.edge_ptr)
        for name, tensor in again.items():
            assert torch.equal(picked[name], tensor), name


@settings(deadline=None, max_examples=60)
@given(structures(), st.data())
def test_ranges_are_selections(parts, data):
    batch = Batch.from_data_list(parts)
    start = data.draw(st.integers(0, len(parts)))
    stop = data.draw(st.integers(start, len(parts)))
    part, copied = batch.select_range(start, stop), batch[start:stop]
    assert torch.equal(part.batch_ptr, copied.batch_ptr)
    assert torch.equal(part.edge_ptr, copied.edge_ptr)
    for name, tensor in copied.items():
        assert torch.equal(part[name], tensor), name


@settings(deadline=None, max_examples=60)
@given(structures(), st.data())
def test_joining_batches_is_joining_their_structures(parts, data):
    cut = data.draw(st.integers(0, len(parts)))
    whole = Batch.from_data_list(parts)
    halves = Batch.from_data_list([whole[:cut], *parts[cut:]])
    assert torch.equal(halves.batch_ptr, whole.batch_ptr)
    assert torch.equal(halves.edge_ptr, whole.edge_ptr)
    for name, tensor in whole.items():
        assert torch.equal(halves[name], tensor), name


@settings(deadline=None, max_examples=60)
@given(structures(same_fields=False))
def test_filling_keeps_what_was_there(parts):
    # A custom edge field and a neighbour list of different lengths cannot meet in one structure, but may in two.
    batch = Batch.from_data_list(parts, missing="fill")
    assert batch.num_nodes_per_graph.tolist() == [part.num_nodes for part in parts]
    for before, after in zip(parts, batch, strict=True):
        for name in set(before.keys()) & set(after.keys()):
            assert before[name].dtype == after[name].dtype
            assert torch.equal(before[name], after[name].reshape(before[name].shape)), name
        lost = set(before.keys()) - set(after.keys())
        assert lost <= {"neighbor_list", "neighbor_matrix"}


@settings(deadline=None, max_examples=40)
@given(structures())
def test_changing_the_precision_and_back_is_exact_from_below(parts):
    batch = Batch.from_data_list(parts).to(dtype=torch.float32)
    again = batch.to(dtype=torch.float64).to(dtype=torch.float32)
    for name, tensor in batch.items():
        assert torch.equal(tensor, again[name])
