"""Time per atom-step and memory of NVE argon, from 100 to 256,000 atoms and from 1 to 4,096 systems of 32 atoms.

Each case runs in a process of its own, whose peak memory is compared with that of the same run of one small system.
``--plot FILE`` draws the result.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

ONE_SYSTEM = (3, 5, 10, 14, 20, 30, 40)
"""Repetitions of the cubic cell of 4 atoms."""
MANY_SYSTEMS = (1, 8, 64, 512, 4096)
WORK = 600_000
"""Atom-steps per timing, at least 5 steps."""


def argon(systems, repeat, shuffled):
    import torch

    from nvalchemi.data import AtomicData, Batch
    from nvalchemi.dynamics import initialize_velocities

    a, cells = 5.4, torch.cartesian_prod(*[torch.arange(repeat, dtype=torch.float64)] * 3)
    basis = torch.tensor([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]], dtype=torch.float64)
    positions = a * (cells[:, None] + basis).reshape(-1, 3)
    if shuffled:
        positions = positions[torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))]
    data = AtomicData(
        positions=positions,
        atomic_numbers=torch.full((len(positions),), 18),
        cell=a * repeat * torch.eye(3, dtype=torch.float64)[None],
        pbc=torch.ones(1, 3, dtype=torch.bool),
    )
    batch = Batch.from_data_list([data] * systems)
    initialize_velocities(batch, 60.0)
    return batch


def run(systems, repeat, repeats, shuffled=False):
    """CPU time of an atom-step, ns, after the list has been made at least once more; and peak memory, bytes."""
    from nvalchemi.dynamics import NVE
    from nvalchemi.models.lj import LennardJonesModelWrapper

    batch = argon(systems, repeat, shuffled)
    engine = NVE(LennardJonesModelWrapper(0.0104, 3.40, 8.5), dt=2.0)
    steps = max(5, WORK // batch.num_nodes)
    engine.run(batch, steps)
    times = []
    for _ in range(repeats):
        start = time.process_time()
        engine.run(batch, steps)
        times.append((time.process_time() - start) / (steps * batch.num_nodes))
    return 1e9 * statistics.median(times), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(systems, repeat, arguments):
    """Run one case in a new process."""
    case = f"{systems},{repeat},{arguments.threads},{arguments.repeats},{int(arguments.shuffled)}"
    output = subprocess.run(
        [sys.executable, __file__, "--case", case], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(output.stdout)


def one_case(text):
    import torch

    systems, repeat, threads, repeats, shuffled = map(int, text.split(","))
    torch.set_num_threads(threads)
    _, before = run(1, 3, 1)
    nanoseconds, after = run(systems, repeat, repeats, bool(shuffled))
    print(json.dumps({"ns": nanoseconds, "bytes": after - before}))


def plot(cases, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharex=True, layout="constrained")
    for label, rows in cases.items():
        atoms = [row["atoms"] for row in rows]
        axes[0].plot(atoms, [row["ns"] for row in rows], "o-", label=label)
        large = [row for row in rows if row["atoms"] >= 4000]
        axes[1].plot([row["atoms"] for row in large], [row["kB"] for row in large], "o-", label=label)
    axes[0].set(
        xscale="log", yscale="log", xlabel="atoms in the batch", ylabel="CPU time per atom and step / ns"
    )
    axes[1].set(xlabel="atoms in the batch", ylabel="memory per atom / kB", ylim=(0, None))
    axes[0].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3, which="both")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shuffled", action="store_true", help="atoms in random order")
    parser.add_argument("--plot", help="file for a figure, .svg or .png")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        one_case(arguments.case)
        return
    kinds = {
        "one system": [(1, repeat) for repeat in ONE_SYSTEM],
        "systems of 32 atoms": [(systems, 2) for systems in MANY_SYSTEMS],
    }
    cases = {}
    for kind, sizes in kinds.items():
        cases[kind] = []
        for systems, repeat in sizes:
            found = measure(systems, repeat, arguments)
            atoms = systems * 4 * repeat**3
            cases[kind].append({"atoms": atoms, "ns": found["ns"], "kB": found["bytes"] / 1000 / atoms})
        at_4000 = min(cases[kind], key=lambda row: abs(row["atoms"] - 4000))["ns"]
        for row, (systems, repeat) in zip(cases[kind], sizes, strict=True):
            size = f"{systems} x {4 * repeat**3}"
            line = {"name": "scaling/time", "size": size, "threads": arguments.threads}
            line |= {"value": round(row["ns"], 1), "unit": "ns per atom-step"}
            line |= {"ratio": round(row["ns"] / at_4000, 2), "against": "about 4,000 atoms"}
            print(json.dumps(line), flush=True)
            if row["atoms"] >= 4000:
                line |= {"name": "scaling/memory", "value": round(row["kB"], 2), "unit": "kB per atom"}
                print(
                    json.dumps(line | {"ratio": round(row["kB"] / 2, 2), "against": "target 2 kB"}),
                    flush=True,
                )
    if arguments.plot:
        plot(cases, arguments.plot)


if __name__ == "__main__":
    main()
