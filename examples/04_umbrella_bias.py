"""Umbrella sampling: the free energy of an argon dimer along its distance.

Langevin dynamics by itself rarely sees the repulsive side of the potential or a stretched bond. A harmonic bias
holds each of several copies of the dimer near a distance of its own (a window); all run at once in one batch, and
the bias is one function of the whole batch. The mean pull of each bias gives the slope of the free energy at the mean
distance of its window (umbrella integration, Kästner and Thiel, J. Chem. Phys. 123, 144104, 2005, to first order),
and its integral the profile.

For two atoms the exact answer is known: with the 4π r² of the orientations left out, the free energy along the
distance is the potential itself. It is printed beside the result.
"""

import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import DynamicsStage, NVTLangevin
from nvalchemi.hooks import BiasedPotentialHook, DynamicsContext
from nvalchemi.models.lj import LennardJonesModelWrapper

EPSILON, SIGMA = 0.0104, 3.40  # argon, eV and Å
TEMPERATURE = 60.0  # K
SPRING = 1.0  # eV/Å²
OUTPUT = Path("examples/output/04")


class DistanceHook:
    """Average the distance of the two atoms of every structure, shape [B], in Å, after equilibration."""

    def __init__(self, skip: int) -> None:
        self.frequency, self.stage, self.skip = 1, DynamicsStage.AFTER_STEP, skip
        self.total, self.samples = torch.zeros(1, dtype=torch.float64), 0

    def __call__(self, ctx: DynamicsContext, stage: DynamicsStage) -> None:
        if ctx.step_count >= self.skip:
            self.total = self.total + distances(ctx.batch)[1]
            self.samples += 1


def distances(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors [B, 3] from the first atom to the second, and distances [B]."""
    first = batch.batch_ptr[:-1]
    bond = batch.positions[first + 1] - batch.positions[first]
    distance = bond.norm(dim=1)
    return bond / distance[:, None], distance


def umbrella(centers: torch.Tensor) -> BiasedPotentialHook:
    """k (r − r₀)² / 2 with its own r₀ for every structure."""

    def bias(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        direction, distance = distances(batch)
        stretch = distance - centers
        pull = SPRING * stretch[:, None] * direction
        forces = torch.stack([pull, -pull], dim=1).reshape(-1, 3)  # atoms of each dimer follow each other
        return 0.5 * SPRING * stretch[:, None] ** 2, forces

    return BiasedPotentialHook(bias)


def main() -> None:
    window_centers = torch.arange(3.3, 5.01, 0.1, dtype=torch.float64)
    copies = 20
    centers = window_centers.repeat_interleave(copies)
    dimers = [
        AtomicData(
            positions=torch.tensor([[0.0, 0.0, 0.0], [center, 0.0, 0.0]], dtype=torch.float64),
            atomic_numbers=torch.tensor([18, 18]),
        )
        for center in centers.tolist()
    ]
    model = LennardJonesModelWrapper(epsilon=EPSILON, sigma=SIGMA, cutoff=20.0)
    record = DistanceHook(skip=200)
    dynamics = NVTLangevin(
        model, dt=10.0, temperature=TEMPERATURE, friction=0.005, hooks=[umbrella(centers), record]
    )
    dynamics.run(Batch.from_data_list(dimers), n_steps=2000)

    mean = (record.total / record.samples).view(-1, copies).mean(1)
    # The pull of the bias balances the mean force, to which the orientations contribute 2 kT / r.
    slope = SPRING * (window_centers - mean) + 2 * units.kB * TEMPERATURE / mean
    profile = torch.cat([torch.zeros(1), torch.cumulative_trapezoid(slope, mean)])
    exact = 4 * EPSILON * ((SIGMA / mean) ** 12 - (SIGMA / mean) ** 6)
    profile += (exact - profile).mean()  # a free energy is known up to a constant
    print("r/Å    A(r)/meV  exact/meV")
    for r, ours, reference in zip(mean, 1e3 * profile, 1e3 * exact, strict=True):
        print(f"{r:5.3f}  {ours:8.2f}  {reference:9.2f}")
    error = 1e3 * math.sqrt((profile - exact).square().mean())
    print(f"root mean square error {error:.2f} meV; kT is {1e3 * units.kB * TEMPERATURE:.2f} meV")

    OUTPUT.mkdir(parents=True, exist_ok=True)
    plt.figure(figsize=(6, 3))
    plt.plot(mean, 1e3 * exact, label="exact")
    plt.plot(mean, 1e3 * profile, "o", label="umbrella integration")
    plt.xlabel("distance / Å")
    plt.ylabel("free energy / meV")
    plt.legend()
    plt.tight_layout()
    plt.savefig(OUTPUT / "picture.png", dpi=80)
    print(f"both profiles: {OUTPUT}/picture.png")


if __name__ == "__main__":
    main()
