"""A run that is killed, and started again: the end is the same to the bit, and no row of the log is missing or twice.

The program below starts itself three times as a child: once without a disturbance, once to be killed
(``kill -9``) in the middle of step 137, and once more with the same arguments. All it takes is
``run(..., restart=file, save_every=n)``.
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from ase.build import bulk

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import DynamicsStage, NVTLangevin, initialize_velocities
from nvalchemi.dynamics.hooks import LoggingHook, SnapshotHook
from nvalchemi.dynamics.sinks import ExtxyzTrajectory
from nvalchemi.hooks import DynamicsContext
from nvalchemi.models.lj import LennardJonesModelWrapper

OUTPUT = Path("examples/output/07")


class KillHook:
    """What a queue does when the time is up."""

    frequency = 1
    stage = DynamicsStage.AFTER_COMPUTE

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, ctx: DynamicsContext, stage: DynamicsStage) -> None:
        if ctx.step_count == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def simulate(folder: Path, kill_at: int) -> None:
    """Heat two crystals of argon from 20 to 80 K within 200 steps."""
    batch = Batch.from_data_list(
        [
            AtomicData.from_atoms(bulk("Ar", "fcc", a, cubic=True).repeat(2), dtype=torch.float64)
            for a in (5.3, 5.4)
        ]
    )
    initialize_velocities(batch, 20.0)
    engine = NVTLangevin(
        LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5),
        dt=4.0,
        temperature=lambda step: 20.0 + 0.3 * step,
        friction=0.02,
        hooks=[
            LoggingHook(log_path=folder / "md.csv", frequency=5),
            SnapshotHook(ExtxyzTrajectory(folder / "md.extxyz"), frequency=50),
            KillHook(kill_at),
        ],
    )
    engine.run(batch, n_steps=200, restart=folder / "md.ckpt", save_every=25)
    torch.save(batch.positions, folder / "positions.pt")


def start(folder: Path, kill_at: int = -1) -> None:
    child = subprocess.run([sys.executable, __file__, str(folder), str(kill_at)], check=False)
    log = folder / "md.csv"
    rows = len(log.read_text().splitlines()) - 1
    print(f"{folder.name:8s} exit code {child.returncode:3d}, {rows} rows in the log")


def temperatures(log: Path) -> tuple[list[float], list[float]]:
    """Times in ps and temperatures in K of the first crystal."""
    with log.open() as file:
        rows = [row for row in csv.DictReader(file) if row["system_id"] == "0"]
    return [float(row["time"]) / 1000 for row in rows], [float(row["temperature"]) for row in rows]


def main() -> None:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    whole, killed = OUTPUT / "whole", OUTPUT / "killed"
    whole.mkdir(parents=True)
    killed.mkdir()
    plt.figure(figsize=(6, 3))
    start(whole)
    plt.plot(*temperatures(whole / "md.csv"), linewidth=4, color="lightgray", label="undisturbed")
    start(killed, kill_at=137)
    plt.axvline(0.004 * 137, color="red", linestyle=":", label="kill -9")
    start(killed)
    plt.plot(*temperatures(killed / "md.csv"), color="black", linewidth=1, label="killed and started again")
    ends = [torch.load(folder / "positions.pt", weights_only=True) for folder in (whole, killed)]
    print("same positions to the bit:", torch.equal(*ends))
    for name in ("md.csv", "md.extxyz"):
        print(f"same {name}:", (whole / name).read_bytes() == (killed / name).read_bytes())
    plt.xlabel("time / ps")
    plt.ylabel("temperature / K")
    plt.legend()
    plt.tight_layout()
    plt.savefig(OUTPUT / "picture.png", dpi=80)
    print(f"the temperatures of both runs: {OUTPUT}/picture.png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        simulate(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
