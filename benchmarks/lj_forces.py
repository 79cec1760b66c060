"""Lennard-Jones force evaluations per second, list given: one JSON line per case.

The list is made with a skin of 1 Å, as in a run. Whole MD steps against LAMMPS are in ``md.py``.
"""

import argparse
import json
import statistics
import time

import torch
from ase import Atoms
from ase.build import bulk

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models.lj import LennardJonesModelWrapper
from nvalchemi.neighbors import compute_neighbors, max_displacement_exceeds

EPSILON, SIGMA, CUTOFF, SKIN, A = 0.0104, 3.40, 8.5, 1.0, 5.3


def argon(repeat: int) -> Atoms:
    atoms = bulk("Ar", "fcc", a=A, cubic=True) * (repeat, repeat, repeat)
    atoms.rattle(0.05, seed=repeat)
    return atoms


def seconds(function, repeats: int = 15) -> float:
    """Median time of a call after two to warm up."""
    times: list[float] = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    model = LennardJonesModelWrapper(EPSILON, SIGMA, CUTOFF).eval()
    model.set_config("active_outputs", {"energy", "forces"})
    cases = {
        "1 x 108": (3, 1),
        "1 x 4000": (10, 1),
        "1 x 32000": (20, 1),
        "64 x 32": (2, 64),
        "256 x 108": (3, 256),
    }
    for size, (repeat, copies) in cases.items():
        for dtype in (torch.float64, torch.float32):
            batch = Batch.from_data_list([AtomicData.from_atoms(argon(repeat), dtype=dtype)] * copies)
            compute_neighbors(batch, CUTOFF + SKIN, format="matrix")
            rate = batch.num_nodes / seconds(lambda b=batch: model(b))
            line = {
                "name": f"LJ forces, {str(dtype).removeprefix('torch.')}",
                "size": size,
                "threads": threads,
                "value": round(rate / 1e6, 3),
                "unit": "M atoms/s",
            }
            print(json.dumps(line))
            start = batch.positions.clone()
            test = 1e6 * seconds(lambda b=batch, x=start: max_displacement_exceeds(b.positions, x, SKIN / 2))
            line = {
                "name": "skin test",
                "size": size,
                "threads": threads,
                "value": round(test, 2),
                "unit": "µs",
            }
            print(json.dumps({**line, "dtype": str(dtype)}))


if __name__ == "__main__":
    main()
