"""Is this working tree slower than another commit? The same quick cases run in both, by turns, in one go.

``python benchmarks/compare.py COMMIT`` prints one JSON line per case, whose ratio is the CPU time here over that of the
commit, and fails when a ratio is above ``--threshold``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cases():
    """Name → function that does the work once; made with the package that PYTHONPATH names."""
    import torch
    from ase.build import bulk

    from nvalchemi.data import AtomicData, Batch
    from nvalchemi.dynamics import FIRE, NVE, NVTLangevin, initialize_velocities
    from nvalchemi.dynamics.hooks import NaNDetectorHook
    from nvalchemi.hooks import WrapPeriodicHook
    from nvalchemi.models.lj import LennardJonesModelWrapper
    from nvalchemi.neighbors import compute_neighbors

    torch.set_num_threads(1)

    def argon(repeat, systems=1):
        atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat(repeat)
        atoms.rattle(0.05, seed=0)
        batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64)] * systems)
        initialize_velocities(batch, 60.0)
        return batch

    def run(engine, batch, steps):
        engine.run(batch, steps)
        return lambda: engine.run(batch, steps)

    def model():
        return LennardJonesModelWrapper(0.0104, 3.40, 8.5)

    crystal, molecules = argon(10), argon(2, 500).to_data_list()
    hooks = [WrapPeriodicHook(10), NaNDetectorHook()]
    return {
        "NVE, 1 x 108": run(NVE(model(), 2.0), argon(3), 200),
        "NVE, 1 x 4000": run(NVE(model(), 2.0), argon(10), 20),
        "NVE with hooks, 1 x 4000": run(NVE(model(), 2.0, hooks=hooks), argon(10), 20),
        "NVE, 64 x 32": run(NVE(model(), 2.0), argon(2, 64), 50),
        "NVTLangevin, 64 x 32": run(NVTLangevin(model(), 2.0, 60.0, 0.01), argon(2, 64), 50),
        "FIRE, 64 x 32": run(FIRE(model(), 0.1), argon(2, 64), 50),
        "neighbour matrix, 1 x 4000": lambda: compute_neighbors(crystal, 8.5, format="matrix"),
        "neighbour list, 1 x 4000": lambda: compute_neighbors(crystal, 8.5),
        "Batch.from_data_list, 500 x 32": lambda: Batch.from_data_list(molecules),
    }


def work():
    """Time every case once for each line read."""
    functions = cases()
    for function in functions.values():
        function()
    print("ready", flush=True)
    for _ in sys.stdin:
        times = {}
        for name, function in functions.items():
            start = time.process_time()
            function()
            times[name] = time.process_time() - start
        print(json.dumps(times), flush=True)


def worker(source):
    process = subprocess.Popen(
        [sys.executable, __file__, "--work"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
    )
    if process.stdout.readline() != "ready\n":
        sys.exit(f"the cases do not run with the package in {source}")
    return process


def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", help="what to compare with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threshold", type=float, default=1.1, help="largest ratio that is no failure")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    if arguments.commit is None:
        parser.error("name a commit to compare with")
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", arguments.commit, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        ).stdout
        subprocess.run(["tar", "x", "-C", folder], check=True, input=archive)
        workers = [worker(Path(folder) / "src"), worker(ROOT / "src")]
        try:
            rounds = [[ask(process) for process in workers] for _ in range(arguments.rounds)]
        finally:
            for process in workers:
                process.stdin.close()
                process.wait()
    slower = []
    for name in rounds[0][0]:
        ratio = statistics.median(here[name] / there[name] for there, here in rounds)
        value = statistics.median(here[name] for _, here in rounds)
        line = {"name": name, "threads": 1, "value": round(1e3 * value, 3), "unit": "CPU ms"}
        print(json.dumps(line | {"ratio": round(ratio, 3), "against": arguments.commit}), flush=True)
        if ratio > arguments.threshold:
            slower.append(name)
    if slower:
        sys.exit(f"slower than {arguments.commit}: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
