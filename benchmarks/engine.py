"""Overhead of the engine and of hooks, µs per step, with a model and an integrator that do nothing."""

import json
import statistics
import time

import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import BaseDynamics, DynamicsStage
from nvalchemi.models.base import BaseModelMixin, ModelConfig

STEPS, REPEATS = 5000, 7


class NoModel(nn.Module, BaseModelMixin):
    def __init__(self, batch):
        super().__init__()
        self.model_config = ModelConfig(outputs={"energy", "forces"}, supports_pbc=True)
        self.result = {
            "energy": torch.zeros_like(batch.system_id, dtype=torch.float64),
            "forces": torch.zeros_like(batch.positions),
        }

    def forward(self, data):
        return self.result


class NoHook:
    def __init__(self, frequency=1):
        self.frequency, self.stage = frequency, DynamicsStage.AFTER_STEP

    def __call__(self, ctx, stage):
        pass


def measure(hooks):
    atoms = AtomicData(
        positions=torch.zeros(8, 3, dtype=torch.float64),
        atomic_numbers=torch.full((8,), 18),
        system_id=torch.zeros(1, 1, dtype=torch.int64),
    )
    batch = Batch.from_data_list([atoms])
    engine = BaseDynamics(NoModel(batch), hooks=hooks)
    engine.run(batch, 1000)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        engine.run(batch, STEPS)
        times.append((time.perf_counter() - start) / STEPS * 1e6)
    return statistics.median(times)


def report(name, value, target):
    line = {"name": name, "size": 8, "threads": 1, "value": round(value, 3), "unit": "µs/step"}
    print(
        json.dumps(
            {**line, "ratio": round(value / target, 3), "against": f"target {target} µs"}, ensure_ascii=False
        )
    )


def main():
    torch.set_num_threads(1)
    bare = measure([])
    one = measure([NoHook()])
    report("engine/bare", bare, 8.0)
    report("engine/first hook that fires", one - bare, 1.5)
    report("engine/further hook that fires", (measure([NoHook() for _ in range(21)]) - one) / 20, 0.4)
    report("engine/100 hooks not due", measure([NoHook(1000) for _ in range(100)]) - bare, 3.0)


if __name__ == "__main__":
    main()
