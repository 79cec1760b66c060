"""Datasets give the same structures whatever they are kept in; splits and samplers repeat."""

import pickle
import sys
from itertools import pairwise

import ase.db
import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datasets import Dataset, InMemoryDataset, MultiDataset, StructureDataset, split
from nvalchemi.data.io import write
from nvalchemi.data.loader import DataLoader
from nvalchemi.data.samplers import (
    BalancedSampler,
    BudgetBatcher,
    FixedBatcher,
    ShuffleSampler,
    WeightedSampler,
)
from nvalchemi.data.zarr import write_zarr


def structure(i: int) -> AtomicData:
    n = 1 + i % 5
    return AtomicData(
        positions=torch.arange(3.0 * n).reshape(n, 3) + i,
        atomic_numbers=torch.full((n,), 1 + i % 3),
        energy=float(-i),
        info={"number": i},
    )


@pytest.fixture(params=["zarr", "extxyz", "db", "aselmdb", "memory", "subset", "multi"])
def dataset(request, tmp_path) -> StructureDataset:
    data = [structure(i) for i in range(20)]
    match request.param:
        case "zarr":
            write_zarr(tmp_path / "s.zarr", data)
            return Dataset(tmp_path / "s.zarr")
        case "extxyz":
            write(tmp_path / "s.extxyz", data)
            return Dataset(tmp_path / "s.extxyz")
        case "db" | "aselmdb":
            if request.param == "aselmdb":
                pytest.importorskip("ase_db_backends", reason="LMDB comes with the package ase-db-backends")
            with ase.db.connect(tmp_path / f"s.{request.param}") as connection:
                for frame in [structure(99), *data]:
                    connection.write(frame.to_atoms(), number=frame.info["number"])
                del connection[1]
            return Dataset(tmp_path / f"s.{request.param}")
        case "subset":
            return InMemoryDataset([*data, *data]).select(range(19, -1, -1)).select(range(19, -1, -1))
        case "multi":
            return MultiDataset({"a": InMemoryDataset(data[:7]), "b": InMemoryDataset(data[7:])})
        case _:
            return InMemoryDataset(data)


def test_same_structures_from_every_source(dataset):
    assert len(dataset) == 20
    for i in (0, 6, 7, 19, -1):
        assert torch.equal(dataset[i].positions, structure(i % 20).positions)
        assert dataset[i].info["number"] == i % 20
    with pytest.raises(IndexError, match="structure 20 is out of range"):
        dataset[20]


def test_batches_in_the_order_asked_for(dataset):
    index = [19, 3, 8, 3, 0]
    batch = dataset[index]
    expected = Batch.from_data_list([structure(i) for i in index])
    assert torch.equal(batch.positions, expected.positions)
    assert torch.equal(batch.energy, expected.energy)
    assert [info["number"] for info in batch.info] == index
    assert sum(part.num_graphs for part in dataset.iter_batches(6)) == 20


def test_sizes_are_known_without_edges(dataset):
    assert dataset.num_nodes().tolist() == [1 + i % 5 for i in range(20)]
    assert dataset.get_metadata(7) == (3, 0)


def test_a_pickled_dataset_reads_the_same(dataset):
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy[11].positions, dataset[11].positions)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_reads_every_source_in_worker_processes_too(dataset, workers):
    # Read here first: connections that this process holds must not reach the others.
    assert dataset[0].num_nodes == 1
    loader = DataLoader(dataset, 4, shuffle=True, num_workers=workers)
    found = [info["number"] for batch in loader for info in batch.info]
    assert found == ShuffleSampler(20).order(0).tolist()
    assert dataset[1].num_nodes == 2


def test_missing_lmdb_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ase_db_backends", None)
    (tmp_path / "s.aselmdb").touch()
    with pytest.raises(ImportError, match=r"nvalchemi\[lmdb\]"):
        Dataset(tmp_path / "s.aselmdb")


def test_stored_edges_are_counted():
    data = structure(2)
    data.add_edge_property("neighbor_list", torch.tensor([[0, 1], [1, 0]]))
    assert InMemoryDataset([data]).get_metadata(0) == (3, 2)


def test_labels_of_a_calculator_come_from_a_database(tmp_path):
    atoms = bulk("Cu", cubic=True)
    atoms.calc = SinglePointCalculator(atoms, energy=-3.0, forces=np.ones((4, 3)), stress=np.arange(6.0))
    ase.db.connect(tmp_path / "s.db").write(atoms)
    data = Dataset(tmp_path / "s.db", dtype=torch.float64)[0]
    assert data.energy.item() == -3.0
    assert data.stress[0].tolist() == [[0.0, 5.0, 4.0], [5.0, 1.0, 3.0], [4.0, 3.0, 2.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "1\n\nH 0 0 0\nnot a number\n\nH 0 0 0\n",
            "frame 1: expected a number of atoms, found 'not a number'",
        ),
        ("1\n\nH 0 0 0\n3\n\nH 0 0 0\n", "frame 1: truncated, 3 atoms announced, 2 line"),
        ("1\n\nH 0 0 0\n1\n", "frame 1: truncated, 1 atoms announced, 2 line"),
    ],
)
def test_broken_xyz_file_is_refused_by_frame(tmp_path, text, message):
    (tmp_path / "s.xyz").write_text(text)
    with pytest.raises(ValueError, match=message):
        Dataset(tmp_path / "s.xyz")


@pytest.mark.parametrize("ending", ["", "\n", "\n\n  \n"])
def test_end_of_xyz_file_does_not_matter(tmp_path, ending):
    (tmp_path / "s.xyz").write_text("1\n\nH 0 0 0\n2\n\nH 0 0 0\nH 0 0 1" + ending)
    assert Dataset(tmp_path / "s.xyz").num_nodes().tolist() == [1, 2]


def test_xyz_index_does_not_depend_on_how_the_file_is_cut_up(tmp_path, monkeypatch):
    write(tmp_path / "s.extxyz", [structure(i) for i in range(20)])
    for size in (1, 7, 100):
        monkeypatch.setattr("nvalchemi.data.sources._SCAN_BYTES", size)
        dataset = Dataset(tmp_path / "s.extxyz")
        assert [data.info["number"] for data in dataset] == list(range(20))


def test_xyz_file_that_changed_is_not_read_by_the_old_index(tmp_path):
    write(tmp_path / "s.extxyz", [structure(0)])
    dataset = Dataset(tmp_path / "s.extxyz")
    write(tmp_path / "s.extxyz", [structure(4), structure(5)])
    with pytest.raises(ValueError, match="has changed since it was opened"):
        dataset[0]


def test_labels_under_another_name_are_told_with_their_number(tmp_path):
    data = [structure(i) for i in range(4)]
    for frame in data[1:]:
        frame.info["REF_energy"] = frame.energy.item()
        frame.remove_key("energy")
    write(tmp_path / "s.extxyz", data)
    with pytest.warns(
        UserWarning,
        match=r"3 of 4 frames have no energy under the key 'energy'; 3 have 'REF_energy' \(energy_key=…",
    ):
        Dataset(tmp_path / "s.extxyz")
    with pytest.warns(UserWarning, match=r"1 of 4 frames have no energy under the key 'REF_energy'"):
        dataset = Dataset(tmp_path / "s.extxyz", energy_key="REF_energy")
    assert dataset[2].energy.item() == -2.0


def test_unknown_kind_and_missing_file(tmp_path):
    (tmp_path / "a.cif").write_text("data_x")
    with pytest.raises(ValueError, match=r"a dataset is a \.zarr store"):
        Dataset(tmp_path / "a.cif")
    with pytest.raises(FileNotFoundError, match="no such file"):
        Dataset(tmp_path / "b.extxyz")


def test_changing_what_comes_out_of_memory_does_not_change_the_dataset():
    dataset = InMemoryDataset([structure(1)])
    dataset[0].forces = torch.zeros(2, 3)
    dataset[0].info["seen"] = True
    dataset[[0]].info[0]["seen"] = True
    dataset[0].positions.zero_()
    assert torch.equal(dataset[0].positions, structure(1).positions)
    assert "forces" not in dataset[0]
    assert dataset[0].info == {"number": 1}


def test_parts_of_a_multi_dataset_are_told_apart():
    multi = MultiDataset(
        {"a": InMemoryDataset([structure(0)]), "b": InMemoryDataset([structure(1), structure(2)])}
    )
    assert [info["dataset"] for info in multi[[2, 0, 1]].info] == ["b", "a", "b"]
    assert multi.locate(2) == (1, 1)
    assert multi.lengths == [1, 2]


# ---------------------------------------------------------------------- splits
def test_random_split_is_whole_disjoint_and_repeats():
    dataset = InMemoryDataset([structure(i) for i in range(20)])
    parts = split(dataset, {"train": 0.7, "val": 0.2, "test": 0.1}, seed=3)
    assert [len(part) for part in parts.values()] == [14, 4, 2]
    assert sorted(np.concatenate([part.indices for part in parts.values()]).tolist()) == list(range(20))
    again = split(dataset, {"train": 0.7, "val": 0.2, "test": 0.1}, seed=3)
    assert all((parts[name].indices == again[name].indices).all() for name in parts)
    other = split(dataset, {"train": 0.7, "val": 0.2, "test": 0.1}, seed=4)
    assert not np.array_equal(parts["train"].indices, other["train"].indices)


@pytest.mark.parametrize(
    "by", ["formula", "kind", lambda data: data.info["kind"], [i // 4 for i in range(40)]]
)
def test_split_by_group_keeps_groups_whole(by):
    atoms = [molecule("H2O"), molecule("CH4"), molecule("NH3"), molecule("CO")]
    data = []
    for i in range(40):
        frame = AtomicData.from_atoms(atoms[i % 4] if by == "formula" else atoms[0])
        frame.info["kind"] = i % 8
        data.append(frame)
    keys = (
        [i // 4 for i in range(40)]
        if isinstance(by, list)
        else [i % (4 if by == "formula" else 8) for i in range(40)]
    )
    parts = split(InMemoryDataset(data), {"train": 0.75, "val": 0.25}, by=by)
    groups = [{keys[i] for i in part.indices} for part in parts.values()]
    assert groups[0].isdisjoint(groups[1])
    assert 28 <= len(parts["train"]) <= 32
    assert len(parts["train"]) + len(parts["val"]) == 40


@pytest.mark.parametrize("form", [list, Batch.from_data_list])
def test_split_takes_structures_too(form):
    structures, shares = [structure(i) for i in range(10)], {"train": 0.7, "val": 0.3}
    parts, expected = split(form(structures), shares), split(InMemoryDataset(structures), shares)
    assert [len(part) for part in parts.values()] == [7, 3]
    for name, part in parts.items():
        assert part.indices.tolist() == expected[name].indices.tolist()
        assert torch.equal(part[:].positions, expected[name][:].positions)


def test_fractions_must_sum_to_one():
    with pytest.raises(ValueError, match="sum to 1"):
        split(InMemoryDataset([structure(0)]), {"train": 0.9, "val": 0.2})


# ---------------------------------------------------------------------- samplers
@pytest.mark.parametrize("block_size", [None, 1, 7, 1000])
def test_shuffle_is_a_permutation_that_differs_by_epoch(block_size):
    sampler = ShuffleSampler(100, seed=1, block_size=block_size, window=3)
    orders = [sampler.order(epoch) for epoch in (0, 0, 1)]
    assert sorted(orders[0].tolist()) == list(range(100))
    assert (orders[0] == orders[1]).all()
    assert not (orders[0] == orders[2]).all()


def test_blocks_keep_a_window_of_neighbours_together():
    order = ShuffleSampler(10_000, block_size=100, window=4).order(0)
    touched = [len(np.unique(order[start : start + 400] // 100)) for start in range(0, 10_000, 400)]
    # A stretch of one window's length meets two windows at most, and a shifted block lies in two aligned ones.
    assert max(touched) <= 2 * 4 * 2 + 2
    assert len(np.unique(np.diff(order))) > 300


def test_balanced_sampler_gives_shares_without_early_repeats():
    order = BalancedSampler([1000, 10, 50], weights=[1, 1, 2], num_samples=400).order(0)
    part = np.searchsorted([1000, 1010], order, side="right")
    assert np.bincount(part).tolist() == [100, 100, 200]
    assert len(np.unique(order[part == 0])) == 100
    assert np.bincount(order[part == 1] - 1000).tolist() == [10] * 10
    assert np.bincount(order[part == 2] - 1010).tolist() == [4] * 50


def test_weighted_sampler_draws_in_proportion():
    order = WeightedSampler([0, 1, 3], num_samples=40_000).order(0)
    # Four standard deviations of a binomial share of 3/4 in 40,000 draws: 0.0087.
    assert np.bincount(order, minlength=3)[0] == 0
    assert np.bincount(order)[2] / 40_000 == pytest.approx(0.75, abs=0.0087)


def test_budgets_are_kept_and_nothing_is_lost():
    rng = np.random.default_rng(0)
    atoms, edges = rng.integers(1, 40, 500), rng.integers(0, 900, 500)
    order = rng.permutation(500)
    batches = list(BudgetBatcher(atoms, edges, max_atoms=100, max_edges=2000, max_graphs=6).cut(order))
    assert np.concatenate(batches).tolist() == order.tolist()
    for batch, following in pairwise(batches):
        assert atoms[batch].sum() <= 100
        assert edges[batch].sum() <= 2000
        assert len(batch) <= 6
        more = [*batch, following[0]]
        assert atoms[more].sum() > 100 or edges[more].sum() > 2000 or len(more) > 6


def test_structure_above_the_budget_is_named_or_left_out():
    with pytest.raises(ValueError, match="structure 1 has 50 atoms, more than max_atoms=10"):
        list(BudgetBatcher([5, 50, 5], max_atoms=10).cut(np.arange(3)))
    batches = BudgetBatcher([5, 50, 5], max_atoms=10, oversized="skip").cut(np.arange(3))
    assert [batch.tolist() for batch in batches] == [[0, 2]]
    with pytest.raises(ValueError, match=r"none are known: give num_edges=…"):
        BudgetBatcher([5, 5], max_edges=10)


def test_last_batch_is_dropped_on_demand():
    assert [len(batch) for batch in FixedBatcher(3).cut(np.arange(7))] == [3, 3, 1]
    assert [len(batch) for batch in FixedBatcher(3, drop_last=True).cut(np.arange(7))] == [3, 3]
