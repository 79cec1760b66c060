"""Small models and data for the tests of training."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.training import OptimizerConfig, TrainingStrategy


class Slope(nn.Module):
    """energy = w · x: the gradient of the mean energy is the mean of x."""

    def __init__(self, w=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))

    def forward(self, batch):
        return {"energy": self.w * batch["x"]}


def mean_energy(predictions, batch):
    return predictions["energy"].mean()


def batch_of(*xs):
    """One structure per number, which it carries in the field ``x``."""
    structures = []
    for x in xs:
        data = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[1])
        data.add_system_property("x", torch.tensor([[float(x)]]))
        structures.append(data)
    return Batch.from_data_list(structures)


def molecules(n_batches=4, size=3, seed=0, dtype=torch.float32):
    """Batches of labelled random structures of 2 to 4 atoms."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(n_batches):
        structures = []
        for _ in range(size):
            n = int(torch.randint(2, 5, (), generator=generator))
            structures.append(
                AtomicData(
                    positions=torch.randn(n, 3, generator=generator, dtype=dtype),
                    atomic_numbers=torch.randint(1, 9, (n,), generator=generator),
                    energy=torch.randn(1, 1, generator=generator, dtype=dtype),
                    forces=torch.randn(n, 3, generator=generator, dtype=dtype),
                )
            )
        batches.append(Batch.from_data_list(structures))
    return batches


def slope_strategy(hooks=(), lr=0.1, w=1.0, model=None, **options):
    """SGD on the mean energy of :class:`Slope`."""
    options.setdefault("num_epochs", 1)
    model = Slope(w) if model is None else model
    return TrainingStrategy(
        model, OptimizerConfig(torch.optim.SGD, {"lr": lr}), mean_energy, hooks=hooks, **options
    )


def run_script(code, *args, processes=None, check=True, **environment):
    """Run Python code in a process of its own, or in several under torchrun."""
    path = "script.py"
    with open(path, "w") as file:
        file.write(code)
    command = [sys.executable, path, *args]
    if processes is not None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *launcher, path, *args]
    env = (
        {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        | {"OMP_NUM_THREADS": "1"}
        | environment
    )
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=300)
    assert not check or result.returncode == 0, result.stderr
    return result


@pytest.fixture
def toys():
    return SimpleNamespace(
        Slope=Slope,
        mean_energy=mean_energy,
        batch_of=batch_of,
        molecules=molecules,
        slope_strategy=slope_strategy,
        run_script=run_script,
    )
