"""A hook of one's own: follow the bond of a dimer while it vibrates.

A hook is any object with a frequency, a stage and a call. This one reads the batch after every second step;
the engine gives it the structures, all at once, and the number of the step.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE, DynamicsStage
from nvalchemi.hooks import DynamicsContext
from nvalchemi.models.lj import LennardJonesModelWrapper

OUTPUT = Path("examples/output/02")


class BondLengthHook:
    """Record the distance of the first two atoms of every structure, shape [B], in Å."""

    def __init__(self, frequency: int = 1) -> None:
        self.frequency = frequency
        self.stage = DynamicsStage.AFTER_STEP
        self.steps: list[int] = []
        self.lengths: list[torch.Tensor] = []

    def __call__(self, ctx: DynamicsContext, stage: DynamicsStage) -> None:
        first = ctx.batch.batch_ptr[:-1]
        bond = ctx.batch.positions[first + 1] - ctx.batch.positions[first]
        self.steps.append(ctx.step_count)
        self.lengths.append(bond.norm(dim=1))


def main() -> None:
    sigma, epsilon = 3.40, 0.0104  # argon
    minimum = 2 ** (1 / 6) * sigma
    dimers = [
        AtomicData(
            positions=torch.tensor([[0.0, 0.0, 0.0], [stretch * minimum, 0.0, 0.0]], dtype=torch.float64),
            atomic_numbers=torch.tensor([18, 18]),
        )
        for stretch in (1.00, 1.02, 1.05)
    ]
    bonds = BondLengthHook(frequency=2)
    model = LennardJonesModelWrapper(epsilon=epsilon, sigma=sigma, cutoff=8.5)
    batch = Batch.from_data_list(dimers)
    NVE(model, dt=10.0, hooks=[bonds]).run(batch, n_steps=400)

    lengths = torch.stack(bonds.lengths)
    print("start/Å  shortest/Å  longest/Å")
    for dimer, shortest, longest in zip(dimers, lengths.amin(dim=0), lengths.amax(dim=0), strict=True):
        start = (dimer.positions[1] - dimer.positions[0]).norm()
        print(f"{start:7.3f}  {shortest:10.3f}  {longest:9.3f}")

    OUTPUT.mkdir(parents=True, exist_ok=True)
    plt.figure(figsize=(6, 3))
    plt.plot(0.01 * torch.tensor(bonds.steps), lengths)
    plt.xlabel("time / ps")
    plt.ylabel("Ar–Ar / Å")
    plt.tight_layout()
    plt.savefig(OUTPUT / "picture.png", dpi=80)
    print(f"the bonds over time: {OUTPUT}/picture.png")


if __name__ == "__main__":
    main()
