"""Atom-steps per second of NVE argon: one system against LAMMPS, OpenMM, ASE; many small ones in a batch; TorchSim.

LAMMPS (``lmp``) and OpenMM are left out where they are not installed. TorchSim needs Python 3.12: name an interpreter
that has it with ``--torchsim-python``.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from ase import units as ase_units
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.md.verlet import VelocityVerlet

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE
from nvalchemi.models.lj import LennardJonesModelWrapper

EPSILON, SIGMA, CUTOFF, SKIN, A, TEMPERATURE, DT = 0.0104, 3.40, 8.5, 1.0, 5.4, 60, 2.0

# (systems, repetitions of the cubic cell of 4 atoms, steps timed)
CASES = [(1, 3, 2000), (1, 10, 200), (1, 20, 30), (64, 2, 300), (256, 3, 40)]
TARGETS = {(64, 32): 2.0e6, (256, 108): 2.5e6}


def argon(repeat, seed):
    atoms = bulk("Ar", "fcc", A, cubic=True).repeat(repeat)
    spread = np.sqrt(TEMPERATURE * ase_units.kB / atoms.get_masses())[:, None]
    atoms.set_velocities(np.random.default_rng(seed).normal(0, 1, (len(atoms), 3)) * spread)
    return atoms


def ours(structures, steps, repeats):
    batch = Batch.from_data_list([AtomicData.from_atoms(a, dtype=torch.float64) for a in structures])
    engine = NVE(LennardJonesModelWrapper(EPSILON, SIGMA, CUTOFF), dt=DT)
    engine.run(batch, max(20, steps // 4))
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.run(batch, steps)
        rates.append(batch.num_nodes * steps / (time.perf_counter() - start))
    return statistics.median(rates)


def ase(atoms, steps=20):
    atoms.calc = LennardJones(epsilon=EPSILON, sigma=SIGMA, rc=CUTOFF)
    dynamics = VelocityVerlet(atoms, DT * ase_units.fs)
    dynamics.run(2)
    start = time.perf_counter()
    dynamics.run(steps)
    return len(atoms) * steps / (time.perf_counter() - start)


def lammps(repeat, steps):
    # One thread, lj/cut/opt where the package has it.
    script = f"""
        units metal
        lattice fcc {A}
        region box block 0 {repeat} 0 {repeat} 0 {repeat}
        create_box 1 box
        create_atoms 1 box
        mass 1 39.948
        pair_style lj/cut {CUTOFF}
        pair_coeff 1 1 {EPSILON} {SIGMA}
        velocity all create {TEMPERATURE} 1
        neighbor {SKIN} bin
        neigh_modify delay 0 every 1 check yes
        timestep {DT / 1000}
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


def openmm(atoms, steps, threads):
    """OpenMM's CPU platform (single precision, as it always is there)."""
    import openmm
    from openmm import unit

    system = openmm.System()
    force = openmm.NonbondedForce()
    force.setNonbondedMethod(openmm.NonbondedForce.CutoffPeriodic)
    force.setCutoffDistance(CUTOFF * unit.angstrom)
    force.setUseDispersionCorrection(False)
    for mass in atoms.get_masses():
        system.addParticle(mass)
        force.addParticle(0.0, SIGMA * unit.angstrom, EPSILON * 96.48533 * unit.kilojoule_per_mole)
    system.addForce(force)
    system.setDefaultPeriodicBoxVectors(*(0.1 * atoms.cell.array))
    platform = openmm.Platform.getPlatformByName("CPU")
    context = openmm.Context(
        system, openmm.VerletIntegrator(DT * unit.femtosecond), platform, {"Threads": str(threads)}
    )
    context.setPositions(0.1 * atoms.positions)
    context.setVelocitiesToTemperature(TEMPERATURE, 1)
    integrator = context.getIntegrator()
    integrator.step(20)
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        integrator.step(steps)
        context.getState(getEnergy=True)
        rates.append(len(atoms) * steps / (time.perf_counter() - start))
    return statistics.median(rates)


def torchsim(python, systems, repeat, threads):
    script = Path(__file__).parent / "peers" / "torchsim_nve.py"
    steps = max(2, 20_000 // (systems * 4 * repeat**3))
    numbers = (systems, repeat, steps, A, EPSILON, SIGMA, CUTOFF, TEMPERATURE, DT, threads)
    output = subprocess.run(
        [python, script, *map(str, numbers)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])["rate"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--torchsim-python",
        default=os.environ.get("TORCHSIM_PYTHON"),
        help="interpreter of an environment with torch-sim-atomistic; default: $TORCHSIM_PYTHON",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for systems, repeat, steps in CASES:
        structures = [argon(repeat, seed) for seed in range(systems)]
        atoms = len(structures[0])
        value = ours(structures, steps, arguments.repeats)
        peers = {"target": TARGETS.get((systems, atoms))}
        if systems == 1 and arguments.threads == 1 and shutil.which("lmp"):
            peers["LAMMPS lj/cut/opt"] = statistics.median(lammps(repeat, 10 * steps) for _ in range(3))
        if systems == 1 and A * repeat > 2 * CUTOFF and importlib.util.find_spec("openmm"):
            peers["OpenMM CPU"] = openmm(structures[0], 2 * steps, arguments.threads)
        if arguments.torchsim_python:
            peers["TorchSim"] = torchsim(arguments.torchsim_python, systems, repeat, arguments.threads)
        if atoms == 108 and systems == 1:
            peers["ASE"] = ase(structures[0])
        for against, rate in peers.items():
            if rate is not None:
                line = {"name": "md/nve", "size": f"{systems} x {atoms}", "threads": arguments.threads}
                line |= {"value": round(value), "unit": "atom-steps/s", "ratio": round(value / rate, 2)}
                print(json.dumps({**line, "against": against}), flush=True)


if __name__ == "__main__":
    main()
