"""Atom-steps per second of NVE argon: one system of several sizes, many small ones in a batch, and ASE."""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from ase import units as ase_units
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.md.verlet import VelocityVerlet

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE
from nvalchemi.models.lj import LennardJonesModelWrapper

# (systems, repetitions of the cubic cell of 4 atoms, steps timed, whether ASE is run too)
CASES = [
    (1, (3, 3, 3), 2000, True),
    (1, (10, 10, 10), 200, False),
    (1, (20, 20, 20), 30, False),
    (64, (2, 2, 2), 300, False),
    (256, (3, 3, 3), 40, False),
]
TARGETS = {(1, 108): 1.2e6, (64, 32): 2.0e6, (256, 108): 2.5e6}


def argon(repeat, seed):
    atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat(repeat)
    spread = np.sqrt(60 * ase_units.kB / atoms.get_masses())[:, None]
    atoms.set_velocities(np.random.default_rng(seed).normal(0, 1, (len(atoms), 3)) * spread)
    return atoms


def ours(structures, steps, repeats):
    batch = Batch.from_data_list([AtomicData.from_atoms(a, dtype=torch.float64) for a in structures])
    engine = NVE(LennardJonesModelWrapper(0.0104, 3.40, 8.5), dt=2.0)
    engine.run(batch, max(20, steps // 4))
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.run(batch, steps)
        rates.append(batch.num_nodes * steps / (time.perf_counter() - start))
    return statistics.median(rates)


def ase(atoms, steps=20):
    atoms.calc = LennardJones(epsilon=0.0104, sigma=3.40, rc=8.5)
    dynamics = VelocityVerlet(atoms, 2.0 * ase_units.fs)
    dynamics.run(2)
    start = time.perf_counter()
    dynamics.run(steps)
    return len(atoms) * steps / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for systems, repeat, steps, with_ase in CASES:
        structures = [argon(repeat, seed) for seed in range(systems)]
        atoms = len(structures[0])
        value = ours(structures, steps, arguments.repeats)
        line = {
            "name": "md/nve",
            "size": f"{systems} x {atoms}",
            "threads": arguments.threads,
            "value": round(value),
        }
        if with_ase:
            other, against = ase(structures[0]), "ASE"
        else:
            other, against = TARGETS.get((systems, atoms)), "target"
        ratio = None if other is None else round(value / other, 2)
        print(json.dumps({**line, "unit": "atom-steps/s", "ratio": ratio, "against": against}), flush=True)


if __name__ == "__main__":
    main()
