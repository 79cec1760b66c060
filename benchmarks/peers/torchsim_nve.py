"""Atom-steps per second of NVE argon with TorchSim, which needs Python 3.12: run by ``md.py`` with another interpreter.

Arguments: systems, repetitions of the cubic cell, steps, lattice constant, epsilon, sigma, cutoff, temperature, time
step, threads. Prints the rate as JSON.
"""

import json
import statistics
import sys
import time

import torch
import torch_sim
from ase.build import bulk
from torch_sim.integrators.nve import nve_init, nve_step
from torch_sim.models.lennard_jones import LennardJonesModel
from torch_sim.units import MetalUnits


def main():
    systems, repeat, steps = map(int, sys.argv[1:4])
    a, epsilon, sigma, cutoff, temperature, dt = map(float, sys.argv[4:10])
    torch.set_num_threads(int(sys.argv[10]))
    model = LennardJonesModel(sigma=sigma, epsilon=epsilon, cutoff=cutoff, dtype=torch.float64)
    atoms = [bulk("Ar", "fcc", a, cubic=True).repeat(repeat) for _ in range(systems)]
    state = torch_sim.io.atoms_to_state(atoms, device=torch.device("cpu"), dtype=torch.float64)
    state = nve_init(state, model, kT=temperature * MetalUnits.temperature)
    step = dt / 1000 * MetalUnits.time
    state = nve_step(state, model, dt=step)
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(steps):
            state = nve_step(state, model, dt=step)
        rates.append(state.n_atoms * steps / (time.perf_counter() - start))
    print(json.dumps({"rate": statistics.median(rates), "version": torch_sim.__version__}))


if __name__ == "__main__":
    main()
