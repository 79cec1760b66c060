"""Fine-tune the published potential CHGNet on energies, forces and stresses of another method.

The labels are those of SevenNet-0 for strained and displaced crystals. The embeddings keep their published values
(freeze_patterns); the rest of the network is trained for some epochs with a small learning rate.
"""

import argparse
from pathlib import Path

import torch

from nvalchemi.data import read
from nvalchemi.data.datasets import InMemoryDataset
from nvalchemi.data.loader import DataLoader
from nvalchemi.models.chgnet import CHGNetWrapper
from nvalchemi.training import (
    EnergyHuberLoss,
    FineTuningStrategy,
    ForceHuberLoss,
    GradientClipHook,
    OptimizerConfig,
    StressHuberLoss,
    ValidationConfig,
)

DATA = Path(__file__).parent / "data" / "crystals_labelled.extxyz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)

    frames = read(options.data)
    training = [frame for k, frame in enumerate(frames) if k % 5]
    validation = frames[::5]
    model = CHGNetWrapper()
    # Energies per atom, forces and stresses in eV, Å: the factors bring their errors to about the same size.
    loss = (
        EnergyHuberLoss(per_atom=True, delta=0.01)
        + ForceHuberLoss(delta=0.01, balanced=True)
        + 100.0 * StressHuberLoss(delta=0.01)
    )
    strategy = FineTuningStrategy(
        model,
        OptimizerConfig(torch.optim.AdamW, {"lr": 3e-4}),
        loss,
        num_epochs=options.epochs,
        freeze_patterns=["*embedding*"],
        hooks=[GradientClipHook(1.0)],
        validation_config=ValidationConfig(
            validation_data=DataLoader(InMemoryDataset(validation), batch_size=6), group_by="config_type"
        ),
    )
    before = strategy.validate()
    strategy.run(DataLoader(InMemoryDataset(training), batch_size=6, shuffle=True))
    after = strategy.last_validation
    for name, unit in (("energy_per_atom_mae", "eV"), ("forces_mae", "eV/Å"), ("stress_mae", "eV/Å³")):
        print(f"{name:<20} {before[name]:.4f} → {after[name]:.4f} {unit}")
    for name in sorted(after):
        if name.startswith("forces_mae/"):
            print(f"{name:<40} {before[name]:.4f} → {after[name]:.4f} eV/Å")
    print(f"loss {before['loss']:.5f} → {after['loss']:.5f}")


if __name__ == "__main__":
    main()
