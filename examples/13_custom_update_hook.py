"""An update hook of one's own: clip gradients, together with gradient accumulation.

An update hook takes part in how a loss becomes a change of weights. It says at which stage it acts and may veto
the step; ``will_skip`` tells it that another hook has done so. Here the accumulation vetoes three steps out of four,
and the clipping, which comes after it (priority 30 after 10), leaves those alone.
"""

from pathlib import Path

import torch

from nvalchemi.data import read
from nvalchemi.data.datasets import InMemoryDataset
from nvalchemi.data.loader import DataLoader
from nvalchemi.models.painn import PaiNN
from nvalchemi.training import (
    EnergyMSELoss,
    ForceMSELoss,
    GradientAccumulationHook,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    TrainingUpdateHook,
)

DATA = Path(__file__).parent / "data" / "ethanol_small.extxyz"


class ClipGrads(TrainingUpdateHook):
    """Scale gradients down to a norm; remembers the norms it found."""

    priority = 30

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm
        self.norms: list[float] = []

    def __call__(self, ctx, stage, will_skip):
        match stage:
            case TrainingStage.DO_OPTIMIZER_STEP:
                if not will_skip:
                    params = [
                        p for opt in ctx.optimizers for group in opt.param_groups for p in group["params"]
                    ]
                    self.norms.append(torch.nn.utils.clip_grad_norm_(params, self.max_norm).item())
                return True, ctx.loss
            case _:
                return True, ctx.loss


def main() -> None:
    torch.manual_seed(0)
    frames = read(DATA)
    model = PaiNN(hidden_dim=16, num_layers=2)
    model.fit_reference_energies(frames)
    clip = ClipGrads(max_norm=20.0)
    strategy = TrainingStrategy(
        model,
        OptimizerConfig(torch.optim.AdamW, {"lr": 5e-3}),
        EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss(),
        num_epochs=2,
        hooks=[clip, GradientAccumulationHook(4)],
    )
    strategy.run(DataLoader(InMemoryDataset(frames), batch_size=5, shuffle=True))
    clipped = sum(norm > clip.max_norm for norm in clip.norms)
    print(f"{strategy.batch_count} batches, {strategy.step_count} steps, {clipped} of them clipped")
    print("gradient norms:", *(f"{norm:.1f}" for norm in clip.norms))


if __name__ == "__main__":
    main()
