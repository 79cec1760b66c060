"""Screen 200 argon clusters for the most stable one, 16 at a time.

A sampler hands out structures as long as there is room; those that are relaxed, or failed, leave to the sinks and the
next take their room, so that the batch is always full. Every structure comes out once, with its number in the data set
as ``system_id`` and with the result that it has alone.
"""

import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import Atoms

from nvalchemi.data import AtomicData
from nvalchemi.dynamics import FIRE, ConvergenceHook, SizeAwareSampler
from nvalchemi.dynamics.hooks import SafetyHook
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.models.lj import LennardJonesModelWrapper

OUTPUT = Path("examples/output/06")


def cluster(seed):
    """Five to twelve argon atoms at random places; now and then two of them in one place, which cannot work."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(5, 13))
    positions = [np.zeros(3)]
    while len(positions) < n:
        trial = rng.normal(0, 4.0, 3)
        if min(np.linalg.norm(trial - x) for x in positions) > 3.0:
            positions.append(trial)
    if seed % 50 == 7:
        positions[1] = positions[0]
    return AtomicData.from_atoms(Atoms(f"Ar{n}", positions), dtype=torch.float64)


dataset = [cluster(seed) for seed in range(200)]
argon = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)
sink = HostMemory()
relax = FIRE(
    argon,
    n_steps=2000,
    convergence_hook=ConvergenceHook.from_fmax(0.005),
    hooks=[SafetyHook()],
    sampler=SizeAwareSampler(dataset, max_batch_size=16),
    sinks=sink,
)

start = time.perf_counter()
relax.run()
seconds = time.perf_counter() - start

results = sink.read()
done = results[results.status[:, 0] == 1]
structure_steps = int(results.system_step.sum())
print(
    f"{done.num_graphs} of {results.num_graphs} relaxed in {seconds:.1f} s: {relax.step_count} steps of the batch,"
)
print(
    f"{structure_steps} of structures, {structure_steps / max(relax.step_count, 1) / 16:.0%} of the room in use"
)
for number, reason in sorted(relax.failures.items()):
    print(f"structure {number} given up: {reason}")
per_atom = done.energy[:, 0] / done.num_nodes_per_graph
best = int(per_atom.argmin())
print(
    f"most stable: structure {int(done.system_id[best])}, {int(done.num_nodes_per_graph[best])} atoms, "
    f"{float(per_atom[best]):.4f} eV/atom after {int(done.system_step[best])} steps"
)

sizes = done.num_nodes_per_graph.tolist()
lowest = {
    n: min(float(e) for e, size in zip(per_atom, sizes, strict=True) if size == n) for n in sorted(set(sizes))
}
OUTPUT.mkdir(parents=True, exist_ok=True)
plt.figure(figsize=(6, 3))
plt.plot(sizes, 1e3 * per_atom, ".", label="relaxed cluster")
plt.plot(
    list(lowest), [1e3 * energy for energy in lowest.values()], "_", markersize=18, label="lowest of its size"
)
plt.xlabel("atoms")
plt.ylabel("energy / meV per atom")
plt.legend()
plt.tight_layout()
plt.savefig(OUTPUT / "picture.png", dpi=80)
print(f"all of them: {OUTPUT}/picture.png")
