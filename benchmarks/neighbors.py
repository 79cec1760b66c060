"""Neighbour search against vesin and ASE: full lists, 8.5 Å, one JSON line per case.

``python benchmarks/neighbors.py [--threads 1]``
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.neighborlist import neighbor_list as ase_neighbor_list
from vesin import NeighborList

from nvalchemi.data import AtomicData, Batch
from nvalchemi.neighbors import compute_neighbors

CUTOFF = 8.5


def milliseconds(function: Callable[[], object], repeats: int = 7) -> float:
    """Median time of a call after one to warm up."""
    function()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def argon(repeat: int) -> Atoms:
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True) * (repeat, repeat, repeat)
    atoms.rattle(0.05, seed=repeat)
    return atoms


def small_cells(number: int = 256, atoms: int = 30) -> list[Atoms]:
    """Triclinic cells of about 9.5 Å, so that a cutoff of 8.5 Å meets several images."""
    rng = np.random.default_rng(0)
    structures: list[Atoms] = []
    for _ in range(number):
        cell = 9.5 * (np.eye(3) + rng.uniform(-0.15, 0.15, (3, 3)))
        structures.append(Atoms(f"Ar{atoms}", positions=rng.random((atoms, 3)) @ cell, cell=cell, pbc=True))
    return structures


def vesin(structures: list[Atoms]) -> Callable[[], object]:
    search = NeighborList(cutoff=CUTOFF, full_list=True)
    arrays = [(atoms.positions, atoms.cell.array) for atoms in structures]
    return lambda: [search.compute(points=x, box=cell, periodic=True, quantities="ijS") for x, cell in arrays]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    cases = {"864": [argon(6)], "4000": [argon(10)], "32000": [argon(20)], "256 x 30": small_cells()}
    for size, structures in cases.items():
        batch = Batch.from_data_list(
            [AtomicData.from_atoms(atoms, dtype=torch.float64) for atoms in structures]
        )
        # vesin and ASE have no threads; their time is taken in the same run, one structure at a time.
        peers = {"vesin": milliseconds(vesin(structures))}
        if size in ("864", "4000"):
            peers["ASE"] = milliseconds(
                lambda s=structures: [ase_neighbor_list("ijS", a, CUTOFF) for a in s], repeats=1
            )
        ours = {
            "coo": lambda b=batch: compute_neighbors(b, CUTOFF),
            "matrix": lambda b=batch: compute_neighbors(b, CUTOFF, format="matrix"),
            "matrix in place": lambda b=batch: compute_neighbors(b, CUTOFF, format="matrix", in_place=True),
        }
        for name, function in ours.items():
            value = milliseconds(function)
            for against, reference in peers.items():
                case = {
                    "name": f"neighbours, {name}",
                    "size": size,
                    "threads": threads,
                    "value": round(value, 3),
                }
                print(
                    json.dumps(
                        {**case, "unit": "ms", "ratio": round(value / reference, 3), "against": against}
                    )
                )


if __name__ == "__main__":
    main()
