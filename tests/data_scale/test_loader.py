"""The loader yields every structure once, in an order that only the seed decides, and can be stopped anywhere."""

from itertools import chain

import numpy as np
import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datasets import Dataset, InMemoryDataset, MultiDataset, as_dataset
from nvalchemi.data.loader import DataLoader
from nvalchemi.data.samplers import BalancedSampler, FixedBatcher
from nvalchemi.data.zarr import write_zarr


def structure(i: int) -> AtomicData:
    n = 1 + i % 4
    return AtomicData(
        positions=torch.full((n, 3), float(i)),
        atomic_numbers=torch.ones(n).long(),
        energy=float(i),
        info={"n": i},
    )


@pytest.fixture
def dataset(tmp_path):
    write_zarr(tmp_path / "s.zarr", [structure(i) for i in range(50)], chunk_bytes=512)
    return Dataset(tmp_path / "s.zarr")


def flat(batches) -> list[int]:
    return list(chain.from_iterable(batches))


def seen(loader) -> list[list[int]]:
    return [batch.energy.flatten().long().tolist() for batch in loader]


def test_every_structure_once_and_another_order_each_epoch(dataset):
    loader = DataLoader(dataset, 8, shuffle=True)
    first, second = seen(loader), seen(loader)
    assert len(loader) == len(first) == 7
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(50))
    assert first != second
    assert first == seen(DataLoader(dataset, 8, shuffle=True))
    assert first != seen(DataLoader(dataset, 8, shuffle=True, seed=1))


def test_batches_are_batches(dataset):
    batch = next(iter(DataLoader(dataset, 8)))
    assert isinstance(batch, Batch)
    expected = Batch.from_data_list([structure(i) for i in range(8)])
    assert torch.equal(batch.positions, expected.positions)
    assert [info["n"] for info in batch.info] == list(range(8))


def jitter(data: AtomicData) -> AtomicData:
    data.positions += torch.rand_like(data.positions)
    return data


def double(batch: Batch) -> Batch:
    batch.energy *= 2
    return batch


@pytest.mark.parametrize("source", ["zarr", "memory"])
def test_number_of_processes_changes_nothing(dataset, source):
    if source == "memory":
        dataset = InMemoryDataset(dataset)
    results = []
    for workers in (0, 1, 2):
        loader = DataLoader(
            dataset, 8, shuffle=True, num_workers=workers, transforms=[jitter], batch_transforms=[double]
        )
        results.append([[(batch.energy, batch.positions) for batch in loader] for _ in range(2)])
    for result in results[1:]:
        for epoch, reference in zip(result, results[0], strict=True):
            for found, expected in zip(epoch, reference, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert results[0][0][0][0].max() > 50


def test_batches_of_worker_processes_are_complete(tmp_path):
    data = []
    for i in range(12):
        frame = structure(i)
        frame.add_edge_property("neighbor_list", torch.full((i % 3, 2), 0))
        frame.add_node_property("flag", torch.arange(1 + i % 4) % 2 == 0)
        frame.add_node_property("nothing", torch.zeros(1 + i % 4, 0))
        frame.add_system_property("gap", torch.tensor(float(i), dtype=torch.float64))
        data.append(frame)
    here, there = (list(DataLoader(InMemoryDataset(data), 5, num_workers=n)) for n in (0, 1))
    for found, expected in zip(there, here, strict=True):
        assert found.keys() == expected.keys()
        assert torch.equal(found.batch_ptr, expected.batch_ptr)
        assert torch.equal(found.edge_ptr, expected.edge_ptr)
        assert found.info == expected.info
        for name in expected.keys():
            assert found[name].dtype == expected[name].dtype
            assert found.level(name) == expected.level(name)
            assert torch.equal(found[name], expected[name])
        assert found[-1]["gap"].shape == ()


def test_transforms_leave_the_random_state_of_the_caller_alone(dataset):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(DataLoader(dataset, 8, transforms=[jitter]))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gives_the_batches_that_were_left(dataset, workers):
    def loader():
        return DataLoader(dataset, 8, shuffle=True, num_workers=workers, transforms=[jitter])

    whole = loader()
    expected = [batch.positions for _ in range(2) for batch in whole]
    stopped = loader()
    found = []
    for batch in stopped:
        found.append(batch.positions)
        if len(found) == 3:
            break
    state = stopped.state_dict()
    assert state == {"epoch": 0, "batch": 3, "batches": len(stopped), "seed": 0}
    resumed = loader()
    resumed.load_state_dict(state)
    found += [batch.positions for batch in resumed]
    found += [batch.positions for batch in resumed]
    assert len(found) == len(expected) == 14
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_position_at_the_end_of_an_epoch_is_the_next_epoch(dataset):
    loader = DataLoader(dataset, 8, shuffle=True)
    list(loader)
    assert loader.state_dict() == {"epoch": 1, "batch": 0, "batches": len(loader), "seed": 0}


def test_loop_that_was_left_starts_again(dataset):
    loader = DataLoader(dataset, 8, shuffle=True)
    first = next(iter(loader))
    assert torch.equal(next(iter(loader)).energy, first.energy)


def test_position_of_another_seed_is_refused(dataset):
    with pytest.raises(ValueError, match="taken with seed 1, this loader has seed 0"):
        DataLoader(dataset).load_state_dict({"epoch": 0, "batch": 1, "seed": 1})


def test_position_inside_an_epoch_of_another_number_of_batches_is_refused(dataset):
    loader = DataLoader(dataset, batch_size=2)
    next(iter(loader))
    with pytest.raises(ValueError, match="batch size"):
        DataLoader(dataset, batch_size=1).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("world_size", [2, 3, 4, 30])
@pytest.mark.parametrize("shuffle", [False, True])
def test_divided_evenly_all_ranks_have_the_same_number_and_nothing_is_left_out(dataset, world_size, shuffle):
    shares = []
    for rank in range(world_size):
        loader = DataLoader(dataset, batch_size=1, shuffle=shuffle)
        loader.divide(rank, world_size, even=True)
        shares.append([int(i) for indices in loader.batches(0) for i in indices])
        assert (loader.rank, loader.world_size, len(loader)) == (rank, world_size, len(shares[-1]))
    assert {len(share) for share in shares} == {-(-len(dataset) // world_size)}
    assert {i for share in shares for i in share} == set(range(len(dataset)))


def test_rank_outside_the_group_is_refused(dataset):
    with pytest.raises(ValueError, match="rank 2 of 2"):
        DataLoader(dataset).divide(2, 2)


def test_ranks_share_an_epoch(dataset):
    ranks = [seen(DataLoader(dataset, 4, shuffle=True, rank=rank, world_size=4)) for rank in range(4)]
    assert sorted(flat(flat(ranks))) == list(range(50))
    even = [
        seen(DataLoader(dataset, 4, shuffle=True, drop_last=True, rank=rank, world_size=4))
        for rank in range(4)
    ]
    assert [len(batches) for batches in even] == [3, 3, 3, 3]


def test_budget_of_atoms(dataset):
    batches = list(DataLoader(dataset, shuffle=True, max_atoms=20))
    assert max(batch.num_nodes for batch in batches) <= 20
    assert sum(batch.num_graphs for batch in batches) == 50
    edges = np.full(50, 10)
    assert [b.num_graphs for b in DataLoader(dataset, max_edges=40, num_edges=edges)] == [4] * 12 + [2]


def test_balanced_parts():
    multi = MultiDataset(
        [InMemoryDataset([structure(i) for i in range(30)]), InMemoryDataset([structure(99)])]
    )
    loader = DataLoader(multi, 4, sampler=BalancedSampler(multi.lengths))
    assert flat(seen(loader)).count(99) in (15, 16)


def test_fields_that_only_some_have():
    lone = structure(1)
    lone.remove_key("energy")
    dataset = InMemoryDataset([structure(0), lone])
    with pytest.raises(ValueError, match="energy"):
        list(DataLoader(dataset, 2))
    assert next(iter(DataLoader(dataset, 2, missing="fill"))).energy.isnan().tolist() == [[False], [True]]


def test_floating_point_type_of_the_batches(dataset):
    assert next(iter(DataLoader(dataset, dtype=torch.float64))).positions.dtype == torch.float64
    assert next(iter(DataLoader(dataset))).positions.dtype == torch.float32


def test_store_larger_than_its_cache_is_shuffled_in_windows(tmp_path):
    write_zarr(tmp_path / "s.zarr", [structure(i) for i in range(400)], chunk_bytes=128)
    dataset = Dataset(tmp_path / "s.zarr", cache_bytes=1024)
    assert dataset.frames_per_chunk is not None
    order = flat(seen(DataLoader(dataset, 8, shuffle=True)))
    assert sorted(order) == list(range(400))
    assert order != list(range(400))


@pytest.mark.parametrize("form", [list, tuple, Batch.from_data_list, InMemoryDataset])
def test_structures_need_no_dataset_around_them(form):
    loader = DataLoader(form([structure(i) for i in range(5)]), 2)
    assert seen(loader) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("train.xyz", r"got str: Dataset\('train.xyz'\) opens"),
        (structure(0), "got AtomicData$"),
    ],
)
def test_what_holds_no_structures_is_refused(data, words):
    with pytest.raises(TypeError, match=words):
        as_dataset(data)


def test_sampler_and_shuffle_exclude_each_other(dataset):
    with pytest.raises(ValueError, match="either sampler or shuffle"):
        DataLoader(dataset, shuffle=True, sampler=BalancedSampler([50]))


@pytest.mark.parametrize("batch_size", [1.5, 2.0, True, 0, "4", None])
def test_batch_size_is_a_whole_number(batch_size):
    batcher = FixedBatcher.__new__(FixedBatcher)
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1"):
        FixedBatcher.__init__.__wrapped__(batcher, batch_size)  # without the type checks of the tests


def test_drop_last_that_leaves_nothing_is_refused():
    data = [structure(i) for i in range(4)]
    with pytest.raises(ValueError, match="4 structures, fewer than one batch of 5"):
        DataLoader(data, batch_size=5, drop_last=True)
    loader = DataLoader(data, batch_size=3, drop_last=True)
    with pytest.raises(ValueError, match="one batch of 3 on each of 2 ranks"):
        loader.divide(0, 2)
    assert len(list(loader)) == 1


def _fails_at_two(data):
    if data.info["n"] == 2:
        raise KeyError("spam")
    return data


def _fails(batch):
    raise KeyError("spam")


def test_exception_of_a_transform_names_the_structure():
    data = [structure(i) for i in range(4)]
    with pytest.raises(KeyError, match="spam") as error:
        list(DataLoader(data, batch_size=3, transforms=[_fails_at_two]))
    assert error.value.__notes__ == ["raised by a transform of structure 2"]
    with pytest.raises(KeyError, match="structure 2"):
        list(DataLoader(data, batch_size=3, transforms=[_fails_at_two], num_workers=1))
    with pytest.raises(KeyError) as error:
        list(DataLoader(data, batch_size=3, batch_transforms=[_fails]))
    assert "structures [0, 1, 2]" in error.value.__notes__[0]
