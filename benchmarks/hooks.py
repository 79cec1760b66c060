"""What hooks cost: those that a run is advised to have, on argon; and each in an engine that does nothing."""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from engine import NoModel

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE, BaseDynamics
from nvalchemi.dynamics.hooks import (
    AlignCellHook,
    FreezeAtomsHook,
    LoggingHook,
    MaxForceClampHook,
    NaNDetectorHook,
    StageTimingHook,
)
from nvalchemi.hooks import WrapPeriodicHook
from nvalchemi.models.lj import LennardJonesModelWrapper

SIZES = {4000: ((10, 10, 10), 500, 7), 32000: ((20, 20, 20), 100, 5)}
"""Atoms → repetitions of the cubic cell, steps per run, runs."""


def argon(repeat):
    from ase.build import bulk

    data = AtomicData.from_atoms(bulk("Ar", "fcc", 5.4, cubic=True).repeat(repeat), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    # 60 K: sqrt(kT/m) = 0.0114 sqrt(eV/amu).
    noise = torch.randn(data.num_nodes, 3, generator=generator, dtype=torch.float64)
    data.add_node_property("velocities", 0.0114 * noise)
    data.add_system_property("system_id", torch.zeros(1, 1, dtype=torch.int64))
    return Batch.from_data_list([data])


def timed(engine, batch, steps):
    """µs per step, all threads of this process; what else the machine does is left out."""
    start = time.process_time()
    engine.run(batch, steps)
    return (time.process_time() - start) / steps * 1e6


def advised(repeat, steps, rounds, folder):
    """Medians of the time per step without hooks, and of what they add; the two alternate, so that load hits both."""
    hooks = [
        LoggingHook(frequency=100, log_path=Path(folder) / f"{steps}.csv"),
        WrapPeriodicHook(frequency=10),
        NaNDetectorHook(),
    ]
    runs = []
    for chosen in ([], hooks):
        engine = NVE(LennardJonesModelWrapper(0.0104, 3.40, 8.5), dt=2.0, hooks=chosen)
        runs.append((engine, argon(repeat)))
    for engine, batch in runs:
        engine.run(batch, steps)
    pairs = [[timed(engine, batch, steps) for engine, batch in runs] for _ in range(rounds)]
    bare = statistics.median(pair[0] for pair in pairs)
    return bare, statistics.median(pair[1] / pair[0] for pair in pairs) - 1


def alone(make, batch, steps=2000):
    """µs per step of one hook that fires at every step, on 8 atoms."""
    engines = [BaseDynamics(NoModel(batch), hooks=hooks) for hooks in ([], [make()])]
    for engine in engines:
        engine.run(batch, 200)
    pairs = [[timed(engine, batch, steps) for engine in engines] for _ in range(7)]
    return statistics.median(pair[1] - pair[0] for pair in pairs)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for atoms, (repeat, steps, rounds) in SIZES.items():
            bare, extra = advised(repeat, steps, rounds, folder)
            line = {"name": "hooks/log 100, NaN, wrap 10", "size": atoms, "threads": 1}
            print(
                json.dumps(
                    {
                        **line,
                        "value": round(100 * extra, 2),
                        "unit": "% of a step",
                        "ratio": round(extra / 0.05, 2),
                        "against": f"target 5 %; bare step {bare:.0f} µs",
                    },
                    ensure_ascii=False,
                ),
                flush=True,
            )
    cases = {
        "StageTimingHook": StageTimingHook,
        "StageTimingHook step": lambda: StageTimingHook("step"),
        "NaNDetectorHook": NaNDetectorHook,
        "WrapPeriodicHook": WrapPeriodicHook,
        "MaxForceClampHook": lambda: MaxForceClampHook(10.0),
        "FreezeAtomsHook": lambda: FreezeAtomsHook(indices=[0]),
        "AlignCellHook": AlignCellHook,
    }
    for name, make in cases.items():
        value = alone(make, argon((2, 1, 1)))
        line = {"name": f"hooks/{name}", "size": 8, "threads": 1, "value": round(value, 2), "unit": "µs/step"}
        print(json.dumps({**line, "ratio": None, "against": "no hook"}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
