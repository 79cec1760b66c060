"""Overhead of the training strategy over a loop written by hand in plain PyTorch, for a small model.

Each strategy is compared with the bare loop and with a loop that does the same by hand (autocast, averaging,
clipping); the loops use torch's own functions throughout, for the loss too. All run in turn, an epoch each, in one
process, the order turned round every time; times are CPU times and the ratios medians over the rounds, so that other
work on the machine counts as little as possible.
"""

import json
import statistics
import time
from contextlib import nullcontext

import torch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models.demo import DemoModel, DemoModelWrapper
from nvalchemi.training import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import EMAHook, GradientClipHook, MixedPrecisionHook

GRAPHS, ATOMS, BATCHES, ROUNDS = 32, 30, 16, 31
HIDDEN = 160  # the bare loop takes about 6 ms per batch
LOSS = EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss()
CASES = {
    "plain": ((), 1.03),
    "bf16": (("bf16",), 1.04),
    "EMA": (("ema",), 1.04),
    "clip": (("clip",), 1.04),
    "all": (("bf16", "ema", "clip"), 1.06),
}


def batches():
    torch.manual_seed(0)
    return [
        Batch.from_data_list(
            [
                AtomicData(
                    positions=torch.randn(ATOMS, 3),
                    atomic_numbers=torch.randint(1, 9, (ATOMS,)),
                    energy=torch.randn(1, 1),
                    forces=torch.randn(ATOMS, 3),
                )
                for _ in range(GRAPHS)
            ]
        )
        for _ in range(BATCHES)
    ]


def new_model():
    torch.manual_seed(1)
    return DemoModelWrapper(DemoModel(hidden_dim=HIDDEN))


def loss_by_hand(out, batch):
    """LOSS in plain PyTorch."""
    sizes = batch.num_nodes_per_graph.unsqueeze(1)
    energy = F.mse_loss(out["energy"] / sizes, batch.energy / sizes)
    return energy + 10.0 * F.mse_loss(out["forces"], batch.forces)


def by_hand(options, data):
    """One epoch of a hand-written loop."""
    model = new_model().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)) if "ema" in options else None

    def epoch():
        for batch in data:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16) if "bf16" in options else nullcontext():
                loss = loss_by_hand(model(batch), batch)
            loss.backward()
            if "clip" in options:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if averaged is not None:
                averaged.update_parameters(model)

    return epoch


def by_strategy(options, data):
    hooks = {"bf16": MixedPrecisionHook("bf16"), "ema": EMAHook(decay=0.999), "clip": GradientClipHook(1.0)}
    config = OptimizerConfig(torch.optim.Adam, {"lr": 1e-4})
    strategy = TrainingStrategy(
        new_model(), config, LOSS, num_epochs=1, hooks=[hooks[name] for name in options]
    )

    def epoch():
        strategy.num_epochs = strategy.epoch_count + 1
        strategy.run(data)

    return epoch


def main():
    torch.set_num_threads(1)
    data = batches()
    epochs = {"bare": by_hand((), data)}
    for name, (options, _) in CASES.items():
        epochs[f"strategy {name}"] = by_strategy(options, data)
        epochs[f"hand {name}"] = by_hand(options, data)
    times = {name: [] for name in epochs}
    for round_number in range(ROUNDS + 1):
        for name, epoch in list(epochs.items())[:: 1 if round_number % 2 else -1]:
            start = time.process_time()
            epoch()
            if round_number:  # the first warms up
                times[name].append((time.process_time() - start) / BATCHES * 1e3)
    for name, (_, target) in CASES.items():
        ours = times[f"strategy {name}"]
        for other, note in (("bare", f"bare loop (target {target})"), (f"hand {name}", "the same by hand")):
            ratio = statistics.median(a / b for a, b in zip(ours, times[other], strict=True))
            line = {"name": f"training/{name}", "size": f"{GRAPHS} × {ATOMS}", "threads": 1}
            line |= {
                "value": round(statistics.median(ours), 3),
                "unit": "CPU ms/batch",
                "ratio": round(ratio, 3),
            }
            print(json.dumps(line | {"against": note}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
