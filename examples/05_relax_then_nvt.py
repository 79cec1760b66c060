"""Relax argon clusters and sample each at 20 K as soon as it is relaxed, all in one batch.

The two engines are fused with ``+``. A structure moves on when its forces are small, whatever the others do, and the
path it takes is the one it would take alone. Sampling begins with velocities drawn by a hook of the second engine.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.io import read

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import FIRE, ConvergenceHook, NVTLangevin
from nvalchemi.dynamics.hooks import InitializeVelocitiesHook, SnapshotHook
from nvalchemi.dynamics.sinks import ExtxyzTrajectory
from nvalchemi.dynamics.thermo import temperature
from nvalchemi.models.lj import LennardJonesModelWrapper


def cluster(n, seed):
    """Argon atoms at random places, no two closer than 3.3 Å."""
    rng = np.random.default_rng(seed)
    positions = [np.zeros(3)]
    while len(positions) < n:
        trial = rng.normal(0, 1.5 * n ** (1 / 3) + 1, 3)
        if min(np.linalg.norm(trial - x) for x in positions) > 3.3:
            positions.append(trial)
    return AtomicData.from_atoms(Atoms(f"Ar{n}", positions), dtype=torch.float64)


batch = Batch.from_data_list([cluster(n, seed=n) for n in (4, 7, 10, 13)])
argon = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)

relax = FIRE(argon, convergence_hook=ConvergenceHook.from_fmax(0.001))

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "sampling.extxyz")
    sample = NVTLangevin(
        argon,
        dt=5.0,
        temperature=20.0,
        friction=0.01,
        n_steps=400,
        hooks=[InitializeVelocitiesHook(20.0), SnapshotHook(ExtxyzTrajectory(path), frequency=50)],
    )
    (relax + sample).run(batch)
    frames = read(path, ":")

kelvin = temperature(batch, momentum_conserved=False)
for i in range(batch.num_graphs):
    atoms = int(batch.num_nodes_per_graph[i])
    steps = int(batch.system_step[i]) - 400
    print(
        f"Ar{atoms:<3d} relaxed in {steps:4d} steps, then 400 steps at 20 K: {float(batch.energy[i]):8.4f} eV, "
        f"{float(kelvin[i]):5.1f} K, {sum(f.info['system_id'] == i for f in frames)} frames"
    )
