"""Lennard-Jones force evaluations per second, list given: one JSON line per case.

The list is made with a skin of 1 Å, as in a run. The peer is a whole LAMMPS ``lj/cut`` run of as many steps,
with its rebuilds; where the Debian package has it, ``lj/cut/opt``. ``python benchmarks/lj_forces.py
[--threads 1]``
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import tempfile
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


def lammps_atom_steps_per_second(repeat: int, steps: int) -> float:
    """NVE from 60 K on one thread."""
    script = f"""
        units metal
        lattice fcc {A}
        region box block 0 {repeat} 0 {repeat} 0 {repeat}
        create_box 1 box
        create_atoms 1 box
        mass 1 39.948
        pair_style lj/cut {CUTOFF}
        pair_coeff 1 1 {EPSILON} {SIGMA}
        velocity all create 60 1
        neighbor {SKIN} bin
        neigh_modify delay 0 every 1 check yes
        timestep 0.002
        fix 1 all nve
        thermo {steps}
        run 10
        run {steps}
    """
    with tempfile.NamedTemporaryFile("w", suffix=".lmp") as file:
        file.write(script)
        file.flush()
        command = ["lmp", "-in", file.name, "-log", "none", "-sf", "opt"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    loop = re.findall(r"Loop time of (\S+) on \d+ procs for \d+ steps with (\d+) atoms", output)[-1]
    return int(loop[1]) * steps / float(loop[0])


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
        peer = None
        if copies == 1 and shutil.which("lmp") is not None:
            peer = lammps_atom_steps_per_second(repeat, steps=max(50, 2_000_000 // (4 * repeat**3)))
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
            if peer is not None:
                line |= {"ratio": round(rate / peer, 3), "against": "LAMMPS lj/cut/opt NVE"}
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
