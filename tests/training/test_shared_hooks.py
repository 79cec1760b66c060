"""Hooks that were written for any workflow, in training."""

import json

import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.hooks import StageTimingHook, TorchProfilerHook
from nvalchemi.training import OptimizerConfig, TrainingStrategy


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch):
        return {"energy": self.w * batch.energy}


def train(hooks):
    data = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[1], energy=[[1.0]])
    strategy = TrainingStrategy(
        Slope(),
        OptimizerConfig(torch.optim.SGD, {"lr": 0.1}),
        lambda predictions, batch: predictions["energy"].mean(),
        num_epochs=2,
        hooks=hooks,
    )
    strategy.run([Batch.from_data_list([data]) for _ in range(3)])
    return strategy


def test_timing_measures_every_batch_and_training_goes_on_as_without_it():
    timing = StageTimingHook()
    timed, plain = train([timing]), train([])
    assert timed.step_count == plain.step_count == 6
    assert torch.equal(timed.model_dict["main"].w, plain.model_dict["main"].w)
    summary = timing.summary()
    assert summary["step"]["n"] == 5
    assert summary["BEFORE_BACKWARD -> AFTER_BACKWARD"]["n"] == 5
    assert summary["BEFORE_OPTIMIZER_STEP -> AFTER_OPTIMIZER_STEP"]["n"] == 5


def test_profiler_writes_a_trace_with_the_backward_pass_in_it(tmp_path):
    train([TorchProfilerHook(tmp_path, activities=["cpu"])])
    trace = json.loads((tmp_path / "rank_0" / "torch_0.pt.trace.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum("MulBackward0" in name and "autograd" in name for name in names) >= 6
