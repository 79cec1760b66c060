"""Relaxation of real crystals with 7net-0, cell included: one batch here against an ASE loop, same filter and fmax."""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from ase.filters import FrechetCellFilter
from ase.optimize import FIRE as ASEFire
from sevenn.calculator import SevenNetCalculator

from nvalchemi.data import Batch, read
from nvalchemi.dynamics import ConvergenceHook, FIREVariableCell
from nvalchemi.models import SevenNetWrapper

CRYSTALS = Path(__file__).parent.parent / "tests" / "data_files" / "crystals.extxyz"


def report(threads, name, size, value, unit, ratio=None, against=None):
    line = {"name": f"relaxation/{name}", "size": size, "threads": threads}
    print(json.dumps({**line, "value": value, "unit": unit, "ratio": ratio, "against": against}), flush=True)


def ase_loop(structures, fmax):
    calculator = SevenNetCalculator("7net-0", device="cpu")
    cells, steps = [], 0
    start = time.perf_counter()
    for data in structures:
        atoms = data.to_atoms()
        atoms.calc = calculator
        optimizer = ASEFire(FrechetCellFilter(atoms), logfile=None)
        optimizer.run(fmax=fmax, steps=500)
        steps += optimizer.nsteps
        cells.append(atoms.cell.lengths())
    return np.array(cells), steps, time.perf_counter() - start


def ours(structures, fmax, max_edges):
    model = SevenNetWrapper("7net-0")
    engine = FIREVariableCell(
        model, convergence_hook=ConvergenceHook.from_fmax(fmax), max_edges_per_eval=max_edges
    )
    batch = Batch.from_data_list(structures)
    inside = 0.0
    forward = model.forward

    def timed(data):
        nonlocal inside
        start = time.perf_counter()
        result = forward(data)
        inside += time.perf_counter() - start
        return result

    model.forward = timed
    start = time.perf_counter()
    engine.run(batch, 500)
    wall = time.perf_counter() - start
    return batch.cell.norm(dim=-1).numpy(), int(batch.system_step.sum()), wall, inside


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fmax", type=float, default=0.02)
    parser.add_argument("--max-edges", nargs="*", default=["auto", "none"], help="numbers, auto, none")
    parser.add_argument("--names", nargs="*", help="only these crystals")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    structures = [
        data
        for data in read(CRYSTALS, dtype=torch.float64)
        if not arguments.names or data.info["name"] in arguments.names
    ]
    size = f"{len(structures)} crystals"
    reference, ase_steps, ase_wall = ase_loop(structures, arguments.fmax)
    report(arguments.threads, "ase", size, round(ase_wall, 1), "s")
    report(arguments.threads, "ase", size, ase_steps, "steps")
    for max_edges in arguments.max_edges:
        bound = int(max_edges) if max_edges.isdigit() else {"auto": "auto", "none": None}[max_edges]
        lengths, steps, wall, inside = ours(structures, arguments.fmax, bound)
        label = f"{size}, max_edges_per_eval={max_edges}"
        report(arguments.threads, "batch", label, round(wall, 1), "s", round(ase_wall / wall, 2), "ASE")
        report(arguments.threads, "batch", label, steps, "steps", round(steps / ase_steps, 3), "ASE")
        report(arguments.threads, "outside the model", label, round(100 * (1 - inside / wall), 1), "%")
        deviation = np.abs(lengths / reference - 1).max(1)
        worst = structures[int(deviation.argmax())].info["name"]
        report(arguments.threads, f"lattice, worst {worst}", label, float(deviation.max()), "relative")


if __name__ == "__main__":
    main()
