"""Data-parallel training: two gloo processes started by torchrun do what one process does with all the data."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datasets import InMemoryDataset
from nvalchemi.data.loader import DataLoader as BatchLoader
from nvalchemi.models.demo import DemoModelWrapper
from nvalchemi.training import (
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    TrainingStrategy,
    ValidationConfig,
)
from nvalchemi.training.hooks import DDPHook, GradientAccumulationHook, GradientClipHook
from nvalchemi.training.hooks.ddp import divide

HERE = str(Path(__file__).parent)
PREAMBLE = f"""
import json, os, sys
sys.path.insert(0, {HERE!r})
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from conftest import Slope, batch_of, mean_energy, molecules, slope_strategy
from nvalchemi.data import Batch
from nvalchemi.models.demo import DemoModelWrapper
from nvalchemi.training import (
    EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStage, TrainingStrategy, ValidationConfig,
)
from nvalchemi.training.hooks import (
    CheckpointHook, DDPHook, EMAHook, GradientAccumulationHook, GradientClipHook, SpikeSkipHook,
)


def report(**values):
    with open(f"rank{{dist.get_rank()}}.json", "w") as file:
        json.dump(values, file)


def weights(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
"""


def reports():
    return [json.loads(Path(f"rank{rank}.json").read_text()) for rank in range(2)]


# ---------------------------------------------------------------------- in processes of their own
def test_two_ranks_with_a_force_loss_equal_one_process_with_both_halves(toys):
    code = (
        PREAMBLE
        + """
torch.manual_seed(0)
model = DemoModelWrapper()
strategy = TrainingStrategy(
    model, OptimizerConfig(torch.optim.SGD, {"lr": 0.1}), EnergyMSELoss() + ForceMSELoss(balanced=True), num_steps=1,
    hooks=[DDPHook(), GradientClipHook(0.5), EMAHook(decay=0.5)],
)
strategy.run(molecules(2))
report(weights=weights(model), counters=strategy.counters())
"""
    )
    toys.run_script(code, processes=2)
    first, second = reports()
    assert first["weights"] == second["weights"]
    assert (first["counters"]["step_count"], first["counters"]["global_step_count"]) == (1, 2)
    torch.manual_seed(0)
    model = DemoModelWrapper()
    strategy = TrainingStrategy(
        model, OptimizerConfig(torch.optim.SGD, {"lr": 0.1}), EnergyMSELoss() + ForceMSELoss(balanced=True),
        num_steps=1,
    )  # fmt: skip
    strategy.register_hook(GradientClipHook(0.5))
    strategy.run([Batch.from_data_list([d for batch in toys.molecules(2) for d in batch.to_data_list()])])
    whole = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(torch.tensor(first["weights"]), whole, rtol=1e-5, atol=1e-7)


def test_student_learns_from_a_teacher_that_is_not_trained_on_the_loader_of_this_package(toys):
    """Three batches on two ranks: each makes two steps per epoch, and only the student is wrapped."""
    code = (
        PREAMBLE
        + """
from nvalchemi.data import DataLoader, InMemoryDataset

def distil(models, batch):
    labels = models["teacher"](batch)["energy"].detach()
    out = models["student"](batch)
    return {"energy": out["energy"] - labels + batch.energy}

torch.manual_seed(0)
models = {"teacher": DemoModelWrapper(), "student": DemoModelWrapper()}
data = [d for batch in molecules(3) for d in batch.to_data_list()]
strategy = TrainingStrategy(
    models, {"student": OptimizerConfig(torch.optim.SGD, {"lr": 0.1})}, EnergyMSELoss(), num_epochs=2,
    training_fn=distil, hooks=[DDPHook()],
    validation_config=ValidationConfig(DataLoader(InMemoryDataset(data), batch_size=3)),
)
strategy.run(DataLoader(InMemoryDataset(data), batch_size=3, shuffle=True))
report(
    weights=weights(models["student"]), steps=strategy.step_count, validation=strategy.last_validation,
    wrapped=[key for key, model in strategy._called_models.items() if model is not models[key]],
)
"""
    )
    toys.run_script(code, processes=2)
    first, second = reports()
    assert first == second
    assert first["steps"] == 4
    assert first["wrapped"] == ["student"]


def test_gradients_are_exchanged_once_per_window_and_all_ranks_skip_alike(toys):
    code = (
        PREAMBLE
        + """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

calls = []


def counting(state, bucket):
    calls.append(1)
    return allreduce_hook(state, bucket)


class Count:
    frequency, stage = 1, TrainingStage.BEFORE_TRAINING

    def __call__(self, ctx, stage):
        ctx.models["main"].register_comm_hook(None, counting)


strategy = slope_strategy([DDPHook(), Count(), GradientAccumulationHook(2)], lr=1.0, w=0.0)
strategy.run([batch_of(x) for x in (1, 3, 2, 4, 10, 20)])  # ranks: 1, 2, 10 and 3, 4, 20
accumulated, exchanges = strategy.models.w.item(), len(calls)

graphs = slope_strategy([DDPHook(), GradientAccumulationHook(2, reduction="graphs")], lr=1.0, w=0.0)
graphs.run([batch_of(1.0), batch_of(2.0, 2.0, 2.0), batch_of(1.0, 1.0), batch_of(5.0, 5.0)])

spike = SpikeSkipHook(loss_factor=2.0, min_history=2)
skipping = slope_strategy([DDPHook(), spike], lr=0.01)
rank = dist.get_rank()
skipping.run([batch_of(x) for x in (1, 1, 1, 1, 1, 50, 1, 1)])  # the fifth pair is bad on rank 1 only
report(
    accumulated=accumulated, exchanges=exchanges, graphs=graphs.models.w.item(),
    skipped=spike.n_skipped, w=skipping.models.w.item(),
)
"""
    )
    toys.run_script(code, processes=2)
    first, second = reports()
    assert first == second
    assert first["exchanges"] == 2
    assert first["accumulated"] == pytest.approx(-(2.5 + 15.0))
    assert first["graphs"] == pytest.approx(-(1.0 + 6.0 + 2.0 + 10.0) / 8)
    assert first["skipped"] == 1


def test_window_that_is_open_at_the_save_is_continued_by_every_rank_with_its_own_gradients(toys):
    code = (
        PREAMBLE
        + """
structures = [d for batch in molecules(6, size=4) for d in batch.to_data_list()]


class SaveInsideWindow:
    frequency, stage = 1, TrainingStage.AFTER_BATCH

    def __call__(self, ctx, stage):
        if ctx.batch_count == 5:
            ctx.workflow.save_checkpoint("inside")


def make(*hooks):
    torch.manual_seed(0)
    return TrainingStrategy(
        DemoModelWrapper(), OptimizerConfig("Adam"), EnergyMSELoss() + ForceMSELoss(), num_epochs=2,
        hooks=[DDPHook(), GradientAccumulationHook(3), SpikeSkipHook(loss_factor=5.0), *hooks],
    )


def loader():
    return DataLoader(structures, 2, shuffle=True, collate_fn=Batch.from_data_list)


whole = make(SaveInsideWindow())
whole.run(loader())
parts = make()
parts.restore_checkpoint("inside")
count, steps = parts.batch_count, parts.step_count
gradients = next(parts.update_hooks()).state_dict()["gradients"]
parts.run(loader())
report(
    same=weights(whole.models) == weights(parts.models), weights=weights(whole.models), at=[count, steps],
    gradients=torch.cat([g.flatten() for g in gradients if g is not None]).tolist(),
)
"""
    )
    toys.run_script(code, processes=2)
    first, second = reports()
    assert first["at"] == second["at"] == [5, 1]
    assert first["gradients"] != second["gradients"]
    assert first["weights"] == second["weights"]
    assert first["same"]
    assert second["same"]


def test_errors_of_two_ranks_are_added_up_with_groups_that_only_one_has_seen(toys):
    code = (
        PREAMBLE
        + """
from nvalchemi.data import AtomicData
from nvalchemi.training import ErrorMetrics

dist.init_process_group("gloo")
graphs = []
for number, name in enumerate(["bulk", "slab", "bulk", "cluster", "bulk"]):
    data = AtomicData(
        positions=torch.zeros(2, 3), atomic_numbers=[1, 8], energy=[[float(number)]], forces=torch.full((2, 3), 0.1)
    )
    data.info["config_type"] = name
    graphs.append(data)


def metrics(part):
    result = ErrorMetrics(per_element=True, group_by="config_type")
    if part:
        batch = Batch.from_data_list(part)
        result.update({"energy": torch.zeros(len(part), 1), "forces": torch.zeros(2 * len(part), 3)}, batch)
    return result


share = metrics(graphs[dist.get_rank() :: 2])
share.reduce_across_ranks()
empty = metrics(graphs if dist.get_rank() == 0 else [])
empty.reduce_across_ranks()
whole = metrics(graphs)
report(
    counts=[m.counts() for m in (share, empty, whole)], values=[m.compute() for m in (share, empty, whole)]
)
dist.destroy_process_group()
"""
    )
    toys.run_script(code, processes=2)
    first, second = reports()
    assert first == second
    share, empty, whole = first["counts"]
    assert share == empty == whole
    assert whole["energy"] == 5
    assert whole["energy/config_type=cluster"] == 1
    for values in first["values"][:2]:
        assert values == pytest.approx(first["values"][2], rel=1e-12)


def test_validation_counts_every_structure_once_and_checkpoints_are_written_once_and_resume(toys):
    code = (
        PREAMBLE
        + """
structures = [d for batch in molecules(4, size=3) for d in batch.to_data_list()]
valid = [d for batch in molecules(1, size=5, seed=3) for d in batch.to_data_list()]


def make(epochs):
    torch.manual_seed(0)
    data = DataLoader(valid, 2, collate_fn=Batch.from_data_list)
    return TrainingStrategy(
        DemoModelWrapper(), OptimizerConfig(torch.optim.Adam), EnergyMSELoss() + ForceMSELoss(), num_epochs=epochs,
        hooks=[DDPHook(), CheckpointHook("run", step_interval=1)],
        validation_config=ValidationConfig(validation_data=data),
    )


def loader():
    return DataLoader(structures, 2, shuffle=True, collate_fn=Batch.from_data_list)


whole = make(2)
whole.run(loader())
parts = make(2)
parts.restore_checkpoint("run/step-4")
parts.run(loader())
report(
    same=weights(whole.models) == weights(parts.models), weights=weights(whole.models),
    validation=whole.last_validation, saved=sorted(os.listdir("run")),
)
"""
    )
    toys.run_script(code, processes=2)
    first, second = reports()
    assert first == second
    assert first["same"]
    assert first["saved"] == [f"step-{n}" for n in range(1, 7)]
    model = DemoModelWrapper()
    nn.utils.vector_to_parameters(torch.tensor(first["weights"]), model.parameters())
    config = ValidationConfig(validation_data=toys.molecules(1, size=5, seed=3))
    single = TrainingStrategy(
        model,
        OptimizerConfig(torch.optim.Adam),
        EnergyMSELoss() + ForceMSELoss(),
        num_epochs=1,
        validation_config=config,
    )
    summary = single.validate()
    for name in ("energy_mae", "energy_rmse", "forces_mae", "forces_rmse"):
        assert first["validation"][name] == pytest.approx(summary[name], rel=1e-5)
    assert first["validation"]["components"]["energy_mse"] == pytest.approx(
        summary["components"]["energy_mse"], rel=1e-5
    )


# ---------------------------------------------------------------------- dividing the data
@pytest.fixture
def as_rank(monkeypatch):
    def set_rank(number, size):
        for name, value in (("rank", number), ("world_size", size)):
            monkeypatch.setattr(f"nvalchemi.training.hooks.ddp.{name}", lambda value=value: value)
        monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: number)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: size)

    return set_rank


def shares(as_rank, data, size, evenly, epoch=0):
    found = []
    for number in range(size):
        as_rank(number, size)
        part = divide(data, evenly=evenly)
        if hasattr(part, "sampler") and hasattr(part.sampler, "set_epoch"):
            part.sampler.set_epoch(epoch)
        found.append([int(x) for batch in part for x in batch])
    return found


def test_10_samples_on_4_ranks_are_shuffled_anew_each_epoch_and_padded_for_training(as_rank):
    loader = DataLoader(range(10), batch_size=2, shuffle=True)
    first, second = (shares(as_rank, loader, 4, evenly=True, epoch=e) for e in (0, 1))
    assert [len(share) for share in first] == [3, 3, 3, 3]
    assert {x for share in first for x in share} == set(range(10))
    assert first != second


def test_10_samples_on_4_ranks_are_10_for_validation(as_rank):
    found = shares(as_rank, DataLoader(range(10), batch_size=2), 4, evenly=False)
    assert sorted(x for share in found for x in share) == list(range(10))


def test_list_of_batches_is_dealt_out(as_rank):
    data = [[i] for i in range(5)]
    assert shares(as_rank, data, 2, evenly=True) == [[0, 2, 4], [1, 3, 0]]
    assert shares(as_rank, data, 2, evenly=False) == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize("evenly", [True, False])
def test_loader_of_this_package_is_dealt_out(as_rank, evenly):
    atoms = [AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[z]) for z in range(1, 6)]
    found = []
    for number in range(2):
        as_rank(number, 2)
        loader = BatchLoader(InMemoryDataset(atoms), batch_size=1)
        for _ in range(2):  # every run divides; twice is once
            assert divide(loader, evenly=evenly) is loader
        found.append([int(batch.atomic_numbers) for batch in loader])
    assert found == [[1, 3, 5], [2, 4, 1] if evenly else [2, 4]]


def test_loader_that_is_divided_otherwise_is_refused(as_rank):
    as_rank(0, 2)
    atoms = [AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[1])]
    with pytest.raises(ValueError, match="among 3 ranks"):
        divide(BatchLoader(InMemoryDataset(atoms), world_size=3), evenly=True)


def test_data_that_cannot_be_divided_are_refused(as_rank):
    as_rank(0, 2)
    with pytest.raises(TypeError, match=r"generator cannot be divided"):
        divide((x for x in [1]), evenly=True)
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 4, 4)
    with pytest.raises(TypeError, match="sampler of its own"):
        divide(DataLoader(range(4), sampler=sampler), evenly=True)


def test_without_torchrun_the_hook_does_nothing(toys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    strategy = toys.slope_strategy([DDPHook(), GradientAccumulationHook(1)])
    strategy.run([toys.batch_of(1.0)])
    assert not torch.distributed.is_initialized()
    assert strategy.models.w.item() == pytest.approx(0.9)


def test_sharded_models_are_refused(toys):
    """FSDP2 is not supported, and says so."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"'main' is sharded .FSDP"):
            toys.slope_strategy(model=model)
    finally:
        torch.distributed.destroy_process_group()
