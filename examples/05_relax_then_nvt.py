"""Relax argon clusters and sample each at 20 K as soon as it is relaxed, all in one batch.

The two engines are fused. A structure moves on when its forces are small, whatever the others do, and the path it
takes is the one it would take alone. Sampling begins with velocities drawn by a hook of the second engine. A log of
the fused stage sees every structure, with the engine that moves it in the column ``status``.
"""

import csv
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import Atoms
from ase.io import read

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import FIRE, ConvergenceHook, FusedStage, NVTLangevin
from nvalchemi.dynamics.hooks import InitializeVelocitiesHook, LoggingHook, SnapshotHook
from nvalchemi.dynamics.sinks import ExtxyzTrajectory
from nvalchemi.dynamics.thermo import temperature
from nvalchemi.models.lj import LennardJonesModelWrapper

OUTPUT = Path("examples/output/05")


def cluster(n, seed):
    """Argon atoms at random places, no two closer than 3.3 Å."""
    rng = np.random.default_rng(seed)
    positions = [np.zeros(3)]
    while len(positions) < n:
        trial = rng.normal(0, 1.5 * n ** (1 / 3) + 1, 3)
        if min(np.linalg.norm(trial - x) for x in positions) > 3.3:
            positions.append(trial)
    return AtomicData.from_atoms(Atoms(f"Ar{n}", positions), dtype=torch.float64)


def run(batch):
    """Frames of the sampling and rows of the log."""
    argon = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)
    relax = FIRE(argon, convergence_hook=ConvergenceHook.from_fmax(0.001))
    trajectory = ExtxyzTrajectory(OUTPUT / "sampling.extxyz", append=False)
    sample = NVTLangevin(
        argon,
        dt=5.0,
        temperature=20.0,
        friction=0.01,
        n_steps=400,
        hooks=[InitializeVelocitiesHook(20.0), SnapshotHook(trajectory, frequency=50)],
    )
    # `relax + sample` is short for a FusedStage without hooks of its own.
    log = LoggingHook(log_path=OUTPUT / "run.csv", append=False)
    FusedStage([relax, sample], hooks=[log]).run(batch)
    with (OUTPUT / "run.csv").open() as file:
        return read(OUTPUT / "sampling.extxyz", ":"), list(csv.DictReader(file))


def draw(rows, batch):
    """Energy of each cluster over its steps; a dot where sampling begins."""
    plt.figure(figsize=(6, 3.2))
    for i, atoms in enumerate(batch.num_nodes_per_graph.tolist()):
        own = [row for row in rows if int(row["system_id"]) == i]
        energies = [1e3 * float(row["energy"]) / atoms for row in own]
        begin = next(k for k, row in enumerate(own) if row["status"] == "1")
        (line,) = plt.plot(energies, linewidth=0.8, label=f"Ar{atoms}")
        plt.plot(begin, energies[begin], "o", color=line.get_color())
    plt.xlabel("step")
    plt.ylabel("energy / meV per atom")
    plt.legend()
    plt.tight_layout()
    plt.savefig(OUTPUT / "picture.png", dpi=80)


def main():
    OUTPUT.mkdir(parents=True, exist_ok=True)
    batch = Batch.from_data_list([cluster(n, seed=n) for n in (4, 7, 10, 13)])
    frames, rows = run(batch)
    kelvin = temperature(batch, momentum_conserved=False)
    for i in range(batch.num_graphs):
        atoms = int(batch.num_nodes_per_graph[i])
        steps = int(batch.system_step[i]) - 400
        print(
            f"Ar{atoms:<3d} relaxed in {steps:4d} steps, then 400 steps at 20 K: {float(batch.energy[i]):8.4f} eV, "
            f"{float(kelvin[i]):5.1f} K, {sum(f.info['system_id'] == i for f in frames)} frames"
        )
    draw(rows, batch)
    print(f"sampling.extxyz, run.csv and picture.png, the energies over the run, are in {OUTPUT}/")


if __name__ == "__main__":
    main()
