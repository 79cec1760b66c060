"""An engine of one's own: Monte Carlo moves, with stages of its own and hooks that were written for any engine.

An engine is a class with an enum of stages, a step number, and calls of its hooks between its own work. The hooks
here come with the package: a bias that holds the argon crystal's first atom near its site, wrapping into the cell,
the neighbour list, and the time that each part of a step takes. None of them knows this engine.

The enum has BEFORE_COMPUTE and AFTER_COMPUTE, where the neighbour list and the bias stand by default; the others
are told their stage when they are registered.
"""

from enum import Enum
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from ase.build import bulk

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch
from nvalchemi.hooks import (
    BiasedPotentialHook,
    HookRegistryMixin,
    NeighborListHook,
    StageTimingHook,
    WrapPeriodicHook,
)
from nvalchemi.models.lj import LennardJonesModelWrapper

OUTPUT = Path("examples/output/03")


class MonteCarloStage(Enum):
    PROPOSE = 0
    BEFORE_COMPUTE = 1
    AFTER_COMPUTE = 2
    DECIDE = 3
    DONE = 4


class MonteCarlo(HookRegistryMixin):
    """Metropolis sampling; each step displaces all atoms of every structure a little and accepts or not."""

    _stage_type = MonteCarloStage

    def __init__(self, model, temperature, max_move, seed=0):
        self.model, self.kT, self.max_move = model, units.kB * temperature, max_move
        self.random = torch.Generator().manual_seed(seed)
        self.step_count = 0
        self.accepted = 0

    def run(self, batch, n_steps):
        batch.energy = torch.zeros(batch.num_graphs, 1, dtype=batch.dtype)
        batch.forces = torch.zeros_like(batch.positions)
        with self._hooks_opened():
            self.evaluate(batch)
            for _ in range(n_steps):
                self.step(batch)

    def step(self, batch):
        old_energy = batch.energy.clone()
        self._call_hooks(MonteCarloStage.PROPOSE, batch)
        move = self.max_move * (
            2 * torch.rand(batch.positions.shape, generator=self.random, dtype=batch.dtype) - 1
        )
        batch.positions.add_(move)
        self.evaluate(batch)
        self._call_hooks(MonteCarloStage.DECIDE, batch)
        likelihood = torch.exp(-(batch.energy - old_energy) / self.kT)
        rejected = torch.rand(batch.num_graphs, 1, generator=self.random, dtype=batch.dtype) > likelihood
        batch.positions.sub_(move * rejected[batch.batch_idx])
        batch.energy.copy_(torch.where(rejected, old_energy, batch.energy))
        self.accepted += int((~rejected).sum())
        self._call_hooks(MonteCarloStage.DONE, batch)
        self.step_count += 1

    def evaluate(self, batch):
        self._call_hooks(MonteCarloStage.BEFORE_COMPUTE, batch)
        outputs = self.model(batch)
        batch.energy.copy_(outputs["energy"])
        batch.forces.copy_(outputs["forces"])
        self._call_hooks(MonteCarloStage.AFTER_COMPUTE, batch)


class EnergyHook:
    """Keep the energy per atom of every structure after each step, [B], in eV."""

    frequency, stage = 1, MonteCarloStage.DONE

    def __init__(self) -> None:
        self.energies: list[torch.Tensor] = []

    def __call__(self, ctx, stage) -> None:
        self.energies.append(ctx.batch.energy[:, 0] / ctx.batch.num_nodes_per_graph)


def main() -> None:
    structures = [
        AtomicData.from_atoms(bulk("Ar", "fcc", a, cubic=True).repeat(2), dtype=torch.float64)
        for a in (5.3, 5.4, 5.5)
    ]
    batch = Batch.from_data_list(structures)
    sites = batch.positions[batch.batch_ptr[:-1]].clone()
    spring = 0.05  # eV/Å²

    def hold_first_atom(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        first = batch.batch_ptr[:-1]
        away = batch.positions[first] - sites
        # The atom may have been wrapped to the other side of the cell.
        away -= (torch.round(away.unsqueeze(1) @ torch.linalg.inv(batch.cell)) @ batch.cell).squeeze(1)
        forces = torch.zeros_like(batch.forces)
        forces[first] = -spring * away
        return 0.5 * spring * away.square().sum(1, keepdim=True), forces

    model = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=7.1)
    engine = MonteCarlo(model, temperature=40.0, max_move=0.03)
    timing = StageTimingHook()
    neighbors = NeighborListHook(model.model_config.neighbor_config, skin=1.0)
    energies = EnergyHook()
    engine.register_hook(timing)
    engine.register_hook(WrapPeriodicHook(), stage=MonteCarloStage.PROPOSE)
    engine.register_hook(neighbors)
    engine.register_hook(BiasedPotentialHook(hold_first_atom))
    engine.register_hook(energies)
    print(engine.describe_hooks())
    engine.run(batch, n_steps=1000)

    share = engine.accepted / (engine.step_count * batch.num_graphs)
    print(
        f"\n{engine.step_count} steps, {share:.0%} of the moves accepted, {neighbors.num_builds} neighbour searches"
    )
    print("\na/Å    E/atom in eV")
    for a, energy, atoms in zip((5.3, 5.4, 5.5), batch.energy[:, 0], batch.num_nodes_per_graph, strict=True):
        print(f"{a:4.2f}  {energy / atoms:9.5f}")
    print("\nmean time in ms")
    for interval, row in timing.summary().items():
        print(f"{interval:32s} {1e3 * row['mean']:.3f}")

    OUTPUT.mkdir(parents=True, exist_ok=True)
    plt.figure(figsize=(6, 3))
    plt.plot(1e3 * torch.stack(energies.energies), linewidth=0.8)
    plt.legend(["a = 5.3 Å", "a = 5.4 Å", "a = 5.5 Å"])
    plt.xlabel("Monte Carlo step")
    plt.ylabel("energy / meV per atom")
    plt.tight_layout()
    plt.savefig(OUTPUT / "picture.png", dpi=80)
    print(f"\nthe energies over the run: {OUTPUT}/picture.png")


if __name__ == "__main__":
    main()
