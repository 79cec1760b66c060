"""Interrupt a training run and resume it: the weights end up the same to the bit.

Run A trains for four epochs. Run B writes a checkpoint every 5 steps and is interrupted in the middle of its second
epoch; a new strategy takes up the newest checkpoint, with optimizer, learning rate, averaged weights, place in the data
and random numbers, and finishes the job.
"""

import argparse
import shutil
from pathlib import Path

import torch

from nvalchemi.data import read
from nvalchemi.data.datasets import InMemoryDataset
from nvalchemi.data.loader import DataLoader
from nvalchemi.models.painn import PaiNN
from nvalchemi.training import (
    CheckpointHook,
    EMAHook,
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
)

DATA = Path(__file__).parent / "data" / "ethanol_small.extxyz"


class InterruptAt:
    """Stop as Ctrl-C would, after a given batch."""

    stage = TrainingStage.AFTER_BATCH
    frequency = 1

    def __init__(self, batch_count: int) -> None:
        self.batch_count = batch_count

    def __call__(self, ctx, stage):
        if ctx.batch_count == self.batch_count:
            raise KeyboardInterrupt


def new_model() -> PaiNN:
    torch.manual_seed(0)
    model = PaiNN(hidden_dim=16, num_layers=2)
    model.fit_reference_energies(read(DATA))
    return model


def new_loader() -> DataLoader:
    return DataLoader(InMemoryDataset(read(DATA)), batch_size=15, shuffle=True, seed=3)


def new_strategy(hooks) -> TrainingStrategy:
    return TrainingStrategy(
        new_model(),
        OptimizerConfig(
            torch.optim.AdamW,
            {"lr": 2e-3},
            scheduler_cls=torch.optim.lr_scheduler.ExponentialLR,
            scheduler_kwargs={"gamma": 0.99},
        ),
        EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss(),
        num_epochs=4,
        hooks=hooks,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("examples/output/12"))
    checkpoints = parser.parse_args().output / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)

    uninterrupted = new_strategy([EMAHook(decay=0.9)])
    uninterrupted.run(new_loader())

    saving = CheckpointHook(checkpoint_dir=checkpoints, step_interval=5, keep_last=2)
    try:
        new_strategy([EMAHook(decay=0.9), InterruptAt(17), saving]).run(new_loader())
    except KeyboardInterrupt:
        print(
            "interrupted after batch 17; checkpoints:", *sorted(path.name for path in checkpoints.iterdir())
        )

    resumed = new_strategy([EMAHook(decay=0.9), saving])
    resumed.restore_checkpoint(checkpoints)
    print(f"resumed at step {resumed.step_count}")
    resumed.run(new_loader())

    expected = uninterrupted.inference_models()["main"].state_dict()
    found = resumed.inference_models()["main"].state_dict()
    same = all(torch.equal(found[name], weight) for name, weight in expected.items())
    print(
        f"after {resumed.step_count} steps the averaged weights are {'the same to the bit' if same else 'different'}"
    )
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
