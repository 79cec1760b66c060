"""Watch runs and read about them afterwards: one hook for relaxation, dynamics and training.

Twelve crystals of argon, squeezed, stretched and rattled, relax with their cells. A broken thirteenth, with two atoms
at one place, is given up without holding up the others. One of the crystals is then run at constant pressure, and a
small PaiNN is trained on frames of ethanol. Each run leaves a page that a browser shows without a network:
relaxation.html, dynamics.html, training.html. The numbers are also shown while the runs go on, in a terminal as a
dashboard that stays in its place.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from ase.build import bulk

from nvalchemi.data import AtomicData, Batch, read
from nvalchemi.data.datasets import InMemoryDataset
from nvalchemi.data.loader import DataLoader
from nvalchemi.dynamics import NPT, ConvergenceHook, FIREVariableCell, initialize_velocities
from nvalchemi.dynamics.hooks import SafetyHook
from nvalchemi.hooks import HTMLReporter, ReportingOrchestrator, RichReporter
from nvalchemi.models.lj import LennardJonesModelWrapper
from nvalchemi.models.painn import PaiNN
from nvalchemi.training import (
    EnergyMAELoss,
    ForceL2NormLoss,
    GradientClipHook,
    OptimizerConfig,
    TrainingStrategy,
    ValidationConfig,
)

ETHANOL = Path(__file__).parent / "data" / "ethanol_small.extxyz"
ARGON = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)


def argon_crystal(a: float, repeat: int, rattle: float) -> AtomicData:
    atoms = bulk("Ar", "fcc", a, cubic=True).repeat(repeat)
    atoms.positions += np.random.default_rng(0).normal(0, rattle, atoms.positions.shape)
    data = AtomicData.from_atoms(atoms, dtype=torch.float64)
    data.info["name"] = f"argon, a = {a:.2f} Å"
    return data


class CountBreaks:
    """A reporter of one's own needs one method: here, how many structures have failed so far."""

    failed = 0.0

    def report(self, ctx, stage, state):
        self.failed = state["failed"]


def relax(path: Path) -> Batch:
    crystals = [argon_crystal(a, 1, 0.1) for a in np.linspace(5.0, 5.6, 12)]
    broken = argon_crystal(5.3, 1, 0.0)
    broken.positions[0] = broken.positions[1]
    broken.info["name"] = "two atoms at one place"
    batch = Batch.from_data_list([*crystals, broken])
    count = CountBreaks()
    report = ReportingOrchestrator([HTMLReporter(path, "Argon crystals"), RichReporter(), count])
    minimiser = FIREVariableCell(
        ARGON, dt=1.0, hooks=[SafetyHook(), report], convergence_hook=ConvergenceHook.from_fmax(0.001)
    )
    minimiser.run(batch, n_steps=200)
    print(f"{len(crystals)} crystals relaxed, {count.failed:.0f} structure given up: {path}")
    for record in report.structures:
        if record.status == "failed":
            print(f"  {record.name}: {record.reason}")
    return batch


def simulate(path: Path) -> None:
    batch = Batch.from_data_list([argon_crystal(5.35, 3, 0.0)])
    initialize_velocities(batch, temperature=80.0, random_seed=1)
    dynamics = NPT(
        ARGON,
        dt=5.0,
        temperature=40.0,
        pressure=0.0,
        thermostat_time=500.0,
        barostat_time=2000.0,
        hooks=[ReportingOrchestrator([HTMLReporter(path, "Argon at 40 K"), RichReporter()], frequency=5)],
    )
    dynamics.run(batch, n_steps=1000)
    print(f"5 ps at constant pressure: {path}")


def train(path: Path) -> None:
    torch.manual_seed(0)
    frames = read(ETHANOL)
    training, validation = frames[:100], frames[100:]
    model = PaiNN(hidden_dim=32)
    model.fit_reference_energies(training)
    strategy = TrainingStrategy(
        model,
        OptimizerConfig(torch.optim.AdamW, {"lr": 2e-3}),
        EnergyMAELoss() + ForceL2NormLoss(),
        num_epochs=5,
        hooks=[
            GradientClipHook(10.0),
            ReportingOrchestrator([HTMLReporter(path, "PaiNN on ethanol"), RichReporter()]),
        ],
        validation_config=ValidationConfig(DataLoader(InMemoryDataset(validation), batch_size=50)),
    )
    strategy.run(DataLoader(InMemoryDataset(training), batch_size=5, shuffle=True))
    error = 1e3 * strategy.last_validation["forces_mae"]
    print(f"trained for {strategy.epoch_count} epochs, force error {error:.0f} meV/Å: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("examples/output/08"))
    output = parser.parse_args().output
    relax(output / "relaxation.html")
    simulate(output / "dynamics.html")
    train(output / "training.html")


if __name__ == "__main__":
    main()
