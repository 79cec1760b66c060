"""On a GPU: rates of MD and relaxation against one CPU thread, and whether a step makes the host wait.

Prints nothing where there is no GPU. Waits are those that ``torch.cuda.set_sync_debug_mode`` sees: a step must do
without, except where a neighbour list asks whether it has to be made again.
"""

import json
import statistics
import time
import warnings

import torch
from ase.build import bulk

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import (
    FIRE,
    NPT,
    NVE,
    ConvergenceHook,
    NVTLangevin,
    NVTNoseHoover,
    initialize_velocities,
)
from nvalchemi.models.lj import LennardJonesModelWrapper

CASES = [(1, 3, 500), (1, 10, 200), (1, 20, 100), (1, 40, 20), (64, 2, 300), (4096, 2, 30)]
"""Systems, repetitions of the cubic cell of 4 atoms, steps timed."""


def argon(systems, repeat, device):
    atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat(repeat)
    atoms.rattle(0.05, seed=0)
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64)] * systems)
    initialize_velocities(batch, 60.0)
    return batch.to(device=device)


def model(device):
    return LennardJonesModelWrapper(0.0104, 3.40, 8.5).to(device)


def rate(make, systems, repeat, steps, device, repeats=3):
    """Atom-steps per second."""
    batch, engine = argon(systems, repeat, device), make(model(device))
    engine.run(batch, max(5, steps // 10))
    rates = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.run(batch, steps)
        torch.cuda.synchronize()
        rates.append(batch.num_nodes * steps / (time.perf_counter() - start))
    strangers = [name for name in batch.keys() if batch[name].device.type != torch.device(device).type]
    if strangers:
        raise RuntimeError(f"fields on another device than the batch: {strangers}")
    return statistics.median(rates)


def report(name, size, value, unit, ratio=None, against=""):
    line = {"name": f"cuda/{name}", "size": size, "threads": 1, "value": value, "unit": unit}
    print(json.dumps(line | {"ratio": ratio, "against": against}, ensure_ascii=False), flush=True)


def waits(make, steps=20):
    """Waits of the host per step."""
    batch, engine = argon(64, 2, "cuda"), make(model("cuda"))
    engine.run(batch, 5)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(steps):
                engine.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught) / steps


def relaxation(device):
    """Seconds and largest number of steps of 64 rattled crystals."""
    batch = argon(64, 2, device)
    batch.velocities.zero_()
    engine = FIRE(model(device), 5.0, convergence_hook=ConvergenceHook.from_fmax(0.001))
    start = time.perf_counter()
    engine.run(batch, 2000)
    torch.cuda.synchronize()
    return time.perf_counter() - start, int(batch.system_step.max())


def main():
    if not torch.cuda.is_available():
        return
    torch.set_num_threads(1)
    engines = {
        "NVE": lambda m: NVE(m, 2.0),
        "NVTLangevin": lambda m: NVTLangevin(m, 2.0, 60.0, 0.01),
        "NVTNoseHoover": lambda m: NVTNoseHoover(m, 2.0, 60.0, 100.0),
        "NPT": lambda m: NPT(m, 2.0, 60.0, 0.0, 1000.0, 100.0),
        "FIRE": lambda m: FIRE(m, 1.0),
    }
    for name, make in engines.items():
        report(
            f"waits of the host, {name}", "64 x 32", waits(make), "per step", None, "1, of the neighbour list"
        )
    for systems, repeat, steps in CASES:
        device = rate(engines["NVE"], systems, repeat, steps, "cuda")
        host = rate(engines["NVE"], systems, repeat, max(3, steps // 10), "cpu", 1)
        size = f"{systems} x {4 * repeat**3}"
        report("nve", size, round(device), "atom-steps/s", round(device / host, 2), "one CPU thread")
    (seconds, steps), (on_host, _) = relaxation("cuda"), relaxation("cpu")
    report(
        "relaxation", f"64 x 32, {steps} steps", round(seconds, 2), "s", round(seconds / on_host, 3), "CPU"
    )


if __name__ == "__main__":
    main()
