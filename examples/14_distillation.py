"""Distil a large published potential into a small one that sees no label but the large one's predictions.

Teacher and student are two models of one strategy. ``training_fn`` says how they are used: the teacher evaluates the
batch, its results become the labels, and the student makes the predictions. Only the student has an optimizer.
"""

from pathlib import Path

import torch

from nvalchemi.data import AtomicData, Batch, read
from nvalchemi.data.datasets import InMemoryDataset
from nvalchemi.data.loader import DataLoader
from nvalchemi.models.catalog import load_model
from nvalchemi.models.painn import PaiNN
from nvalchemi.neighbors import compute_neighbors
from nvalchemi.training import (
    EnergyHuberLoss,
    ErrorMetrics,
    ForceL2NormLoss,
    OptimizerConfig,
    TrainingStrategy,
)

CRYSTALS = Path(__file__).parent / "data" / "crystals.extxyz"
NAMES = ("Si-diamond", "Cu-fcc", "Al-fcc", "MgO-rocksalt")
LABELS = {"energy": "teacher_energy", "forces": "teacher_forces"}


def rattled(crystals: list[AtomicData], copies: int, seed: int) -> list[AtomicData]:
    """Copies with displaced atoms; nobody has calculated their energies."""
    generator = torch.Generator().manual_seed(seed)
    structures = []
    for crystal in crystals * copies:
        copy = crystal.clone()
        copy.positions = copy.positions + 0.1 * torch.randn(copy.positions.shape, generator=generator)
        structures.append(copy)
    return structures


def add_teacher_labels(teacher, batch: Batch) -> None:
    compute_neighbors(batch, config=teacher.model_config.neighbor_config)
    for name, value in teacher(batch).items():
        if name in LABELS:
            batch.add_key(LABELS[name], value.detach(), "system" if name == "energy" else "node")


def imitate(models, batch: Batch):
    """Forward pass of the strategy: labels from the teacher, predictions from the student."""
    add_teacher_labels(models["teacher"], batch)
    compute_neighbors(batch, config=models["student"].model_config.neighbor_config)
    return models["student"](batch)


def force_error(student: PaiNN, teacher, structures: list[AtomicData]) -> float:
    """Mean absolute difference of the force components, eV/Å."""
    batch = Batch.from_data_list(structures)
    add_teacher_labels(teacher, batch)
    compute_neighbors(batch, config=student.model_config.neighbor_config)
    metrics = ErrorMetrics(target_keys=LABELS)
    metrics.update(student.eval()(batch), batch)
    return metrics.compute()["forces_mae"]


def main() -> None:
    torch.manual_seed(0)
    crystals = [crystal for crystal in read(CRYSTALS) if crystal.info["name"] in NAMES]
    teacher = load_model("7net-0")
    student = PaiNN(hidden_dim=16, num_layers=2, cutoff=4.0)
    unlabelled, unseen = rattled(crystals, copies=6, seed=1), rattled(crystals, copies=1, seed=2)

    start = Batch.from_data_list(unlabelled[: len(crystals)])
    compute_neighbors(start, config=teacher.model_config.neighbor_config)
    for name, value in teacher(start).items():
        start.add_key(name, value)
    student.fit_reference_energies([start])

    before = force_error(student, teacher, unseen)
    strategy = TrainingStrategy(
        {"student": student, "teacher": teacher},
        {"student": OptimizerConfig(torch.optim.AdamW, {"lr": 1e-2})},
        EnergyHuberLoss(target_key=LABELS["energy"], per_atom=True, delta=0.01)
        + ForceL2NormLoss(target_key=LABELS["forces"]),
        num_epochs=5,
        training_fn=imitate,
        auto_neighbors=False,  # the two models have different cutoffs: training_fn makes the lists
    )
    strategy.run(DataLoader(InMemoryDataset(unlabelled), batch_size=4, shuffle=True))
    after = force_error(student, teacher, unseen)
    print(
        f"{sum(p.numel() for p in teacher.parameters())} → {sum(p.numel() for p in student.parameters())} parameters"
    )
    print(f"forces differ from the teacher's by {before:.3f} eV/Å before and {after:.3f} eV/Å after training")


if __name__ == "__main__":
    main()
