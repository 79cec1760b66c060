"""Relaxation of real crystals with published potentials, cell included, against loops over ASE's optimisers.

Same structures, filter (``FrechetCellFilter``) and fmax in the same run. Time is that of the process on one thread, and
wall time on more.
"""

import argparse
import json
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from ase.filters import FrechetCellFilter
from ase.optimize import FIRE as ASEFire
from ase.optimize import LBFGS as ASELbfgs

from nvalchemi.data import AtomicData, Batch, read
from nvalchemi.dynamics import (
    FIRE,
    FIRE2,
    LBFGS,
    CellCoordinates,
    ConvergenceHook,
    NVTLangevin,
    SizeAwareSampler,
    initialize_velocities,
)
from nvalchemi.dynamics.cost import EvaluationCost, cost_key
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.models import CHGNetWrapper, SevenNetWrapper
from nvalchemi.neighbors import compute_neighbors

CRYSTALS = Path(__file__).parent.parent / "tests" / "data_files" / "crystals.extxyz"
SWEEP = [2**k for k in range(8, 15)]


def now():
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def report(name, size, value, unit, ratio=None, against=None):
    line = {"name": f"relaxation/{name}", "size": size, "threads": torch.get_num_threads()}
    print(json.dumps({**line, "value": value, "unit": unit, "ratio": ratio, "against": against}), flush=True)


@contextmanager
def time_inside(model):
    """Seconds spent in a model, in a list of one number."""
    inside, forward = [0.0], model.forward

    def timed(data):
        start = now()
        result = forward(data)
        inside[0] += now() - start
        return result

    model.forward = timed
    yield inside
    model.forward = forward


# ---------------------------------------------------------------------- relaxation
def ase_loop(structures, optimiser, calculator, fmax):
    cells, steps = [], 0
    start = now()
    for data in structures:
        atoms = data.to_atoms()
        atoms.calc = calculator
        optimizer = optimiser(FrechetCellFilter(atoms), logfile=None)
        optimizer.run(fmax=fmax, steps=500)
        steps += optimizer.nsteps
        cells.append(atoms.cell.lengths())
    return np.array(cells), steps, now() - start


def engine(model, minimiser, fmax, max_edges="auto", **options):
    done = ConvergenceHook.from_fmax(fmax)
    return minimiser(
        model, convergence_hook=done, coordinates=CellCoordinates(), max_edges_per_eval=max_edges, **options
    )


def one_batch(model, structures, minimiser, fmax, max_edges):
    batch = Batch.from_data_list(structures)
    with time_inside(model) as inside:
        start = now()
        engine(model, minimiser, fmax, max_edges).run(batch, 500)
        seconds = now() - start
    return batch.cell.norm(dim=-1).numpy(), int(batch.system_step.sum()), seconds, inside[0]


def relaxations(model, calculator, structures, fmax, max_edges):
    size = f"{len(structures)} crystals"
    for label, theirs, minimisers in (
        ("FIRE", ASEFire, {"FIRE": FIRE, "FIRE2": FIRE2}),
        ("L-BFGS", ASELbfgs, {"L-BFGS": LBFGS}),
    ):
        reference, ase_steps, ase_seconds = ase_loop(structures, theirs, calculator, fmax)
        report(f"ASE {label}", size, round(ase_seconds, 1), "s")
        report(f"ASE {label}", size, ase_steps, "steps")
        for name, minimiser in minimisers.items():
            for bound in max_edges if name == "FIRE" else ["auto"]:
                number = int(bound) if bound.isdigit() else {"auto": "auto", "none": None}[bound]
                lengths, steps, seconds, inside = one_batch(model, structures, minimiser, fmax, number)
                against, what = f"ASE {label}", f"{size}, max_edges_per_eval={bound}"
                report(name, what, round(seconds, 1), "s", round(ase_seconds / seconds, 2), against)
                report(name, what, steps, "steps", round(steps / ase_steps, 3), against)
                report(f"{name}, outside the model", what, round(100 * (1 - inside / seconds), 1), "%")
                deviation = np.abs(lengths / reference - 1).max(1)
                worst = structures[int(deviation.argmax())].info["name"]
                report(
                    f"{name}, lattice, worst {worst}", what, float(deviation.max()), "relative", None, against
                )


def in_flight(model, structures, fmax):
    """Refill against fixed batches that are handed out by the same rule, each run until all in it have converged."""

    def refilled():
        sampler = SizeAwareSampler(structures, max_atoms="auto")
        engine(model, FIRE, fmax, sampler=sampler, sinks=HostMemory(), n_steps=500).run()
        return sampler.max_atoms

    def fixed(max_atoms):
        sampler, minimiser = SizeAwareSampler(structures, max_atoms=max_atoms), engine(model, FIRE, fmax)
        while drawn := sampler.draw(None):
            minimiser.run(Batch.from_data_list(drawn), 500)

    max_atoms = refilled()
    times = []
    for _ in range(3):
        start = now()
        refilled()
        middle = now()
        fixed(max_atoms)
        times.append((middle - start, now() - middle))
    mine, other = np.median(times, axis=0)
    size = f"{len(structures)} crystals, {max_atoms} atoms"
    report("in flight", size, round(mine, 2), "s", round(other / mine, 2), "fixed batches")


# ---------------------------------------------------------------------- evaluations
def sweep(name, model, structures):
    """Time of an evaluation of all structures in pieces of each size, against what ``"auto"`` takes."""
    batch = Batch.from_data_list(structures)
    batch.stress = torch.zeros_like(batch.cell)
    compute_neighbors(batch, config=model.model_config.neighbor_config)

    def evaluator(bound):
        minimiser = engine(model, FIRE, 0.0, bound)
        minimiser.run(batch, 0)
        return minimiser

    sizes = [*SWEEP, "auto"]
    engines = {size: evaluator(size) for size in sizes}
    seconds = {size: [] for size in sizes}
    for _ in range(3):
        for size in sizes:
            start = now()
            engines[size].compute(batch)
            seconds[size].append(now() - start)
    best = min(min(seconds[size]) for size in SWEEP)
    for size in sizes:
        taken = min(seconds[size])
        found = f"auto ({engines['auto']._evaluate_pieces.bound.max_edges})" if size == "auto" else size
        what = f"{len(structures)} crystals, max_edges_per_eval={found}"
        report(
            f"{name}, one evaluation",
            what,
            round(1e3 * taken, 1),
            "ms",
            round(taken / best, 3),
            "best of the sweep",
        )
    cost = EvaluationCost.of(cost_key(model, batch))
    for quantity, fit, factor, unit in (
        ("time", cost.seconds(), 1e6, "µs"),
        ("memory", cost.memory(), 1e-3, "kB"),
    ):
        for what, value in zip(("evaluation", "atom", "edge"), fit, strict=True):
            report(f"{name}, {quantity} per {what}", "fit to all trials", round(factor * value, 2), unit)


def outside_of_a_step(name, model, structure, repeat):
    """Share of a step of molecular dynamics that is not the model's."""
    atoms = structure.to_atoms().repeat(repeat)
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64)])
    initialize_velocities(batch, 300.0)
    dynamics = NVTLangevin(model, 1.0, 300.0, 0.01)
    dynamics.run(batch, 2)
    with time_inside(model) as inside:
        start = now()
        dynamics.run(batch, 10)
        seconds = now() - start
    size = f"{len(atoms)} atoms of {structure.info['name']}"
    report(
        f"{name}, MD step outside the model",
        size,
        round(100 * (1 - inside[0] / seconds), 2),
        "%",
        None,
        "target 5 %",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fmax", type=float, default=0.02)
    parser.add_argument("--max-edges", nargs="*", default=["auto", "none"], help="numbers, auto, none")
    parser.add_argument("--names", nargs="*", help="only these crystals")
    parser.add_argument("--parts", nargs="*", default=["relax", "inflight", "sweep", "outside"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", message=".*torch.jit.*|No tensor product accelerator")
    from sevenn.calculator import SevenNetCalculator

    structures = [
        data
        for data in read(CRYSTALS, dtype=torch.float64)
        if not arguments.names or data.info["name"] in arguments.names
    ]
    sevennet, chgnet = SevenNetWrapper("7net-0"), CHGNetWrapper()
    sevennet(_with_neighbors(sevennet, structures[:1]))  # compiles
    if "relax" in arguments.parts:
        calculator = SevenNetCalculator("7net-0", device="cpu")
        relaxations(sevennet, calculator, structures, arguments.fmax, arguments.max_edges)
    if "inflight" in arguments.parts:
        in_flight(sevennet, structures, arguments.fmax)
    for name, model in (("7net-0", sevennet), ("CHGNet", chgnet)):
        if "sweep" in arguments.parts:
            sweep(name, model, structures)
        if "outside" in arguments.parts:
            for repeat in (1, 2, (3, 2, 2)):
                outside_of_a_step(name, model, structures[0], repeat)


def _with_neighbors(model, structures):
    batch = Batch.from_data_list(structures)
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    return batch


if __name__ == "__main__":
    main()
