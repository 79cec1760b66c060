"""What a second thread gains in NVE argon: each case with 1 and 2 threads by turns, in processes of their own.

Means something on an otherwise idle machine only: threads wait for each other by spinning, see docs/performance.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

CASES = [(1, 3, 400), (1, 10, 60), (1, 20, 10), (1, 40, 5), (64, 2, 80), (256, 3, 10)]
"""Systems, repetitions of the cubic cell of 4 atoms, steps timed."""


def work(threads):
    """Time every case once for each line read."""
    import torch
    from ase.build import bulk

    from nvalchemi.data import AtomicData, Batch
    from nvalchemi.dynamics import NVE, initialize_velocities
    from nvalchemi.models.lj import LennardJonesModelWrapper

    torch.set_num_threads(threads)
    runs = {}
    for systems, repeat, steps in CASES:
        atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat(repeat)
        batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64)] * systems)
        initialize_velocities(batch, 60.0)
        engine = NVE(LennardJonesModelWrapper(0.0104, 3.40, 8.5), dt=2.0)
        engine.run(batch, steps)
        runs[f"{systems} x {len(atoms)}"] = (engine, batch, steps)
    print("ready", flush=True)
    for _ in sys.stdin:
        rates = {}
        for size, (engine, batch, steps) in runs.items():
            start = time.perf_counter()
            engine.run(batch, steps)
            rates[size] = batch.num_nodes * steps / (time.perf_counter() - start)
        print(json.dumps(rates), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work)
        return
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--work", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        for threads in (1, 2)
    ]
    rounds = []
    for worker in workers:
        worker.stdout.readline()
    for _ in range(arguments.rounds):
        rounds.append([])
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
            rounds[-1].append(json.loads(worker.stdout.readline()))
    for worker in workers:
        worker.stdin.close()
        worker.wait()
    for size in rounds[0][0]:
        line = {"name": "threads/nve", "size": size, "threads": 2, "unit": "atom-steps/s"}
        line |= {"value": round(statistics.median(two[size] for _, two in rounds))}
        line |= {"ratio": round(statistics.median(two[size] / one[size] for one, two in rounds), 2)}
        print(json.dumps(line | {"against": "1 thread"}), flush=True)


if __name__ == "__main__":
    main()
