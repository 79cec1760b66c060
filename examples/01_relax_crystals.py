"""Relax real crystals and their cells with a published potential, then heat one of them.

Twelve crystals in their experimental structure go into one batch; FIRE relaxes atoms and cells to the minimum
of the potential 7net-0, each crystal as if it were alone. The lattice constants are compared with the
measured ones that the file carries. Rock salt is then run at 300 K. Results: relaxed.extxyz, relax.csv,
md.extxyz, md.csv and picture.png, the errors of the lattice constants.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from nvalchemi.data import AtomicData, Batch, read, write
from nvalchemi.dynamics import ConvergenceHook, FIREVariableCell, NVTLangevin, initialize_velocities
from nvalchemi.dynamics.hooks import LoggingHook, SnapshotHook
from nvalchemi.dynamics.sinks import ExtxyzTrajectory
from nvalchemi.dynamics.thermo import temperature
from nvalchemi.models.base import BaseModelMixin
from nvalchemi.models.catalog import load_model

CRYSTALS = Path(__file__).parent / "data" / "crystals.extxyz"


def relax(crystals: list[AtomicData], model: BaseModelMixin, output: Path) -> Batch:
    """Relax atoms and cells of all crystals at once."""
    batch = Batch.from_data_list(crystals)
    minimiser = FIREVariableCell(
        model,
        dt=1.0,
        hooks=[LoggingHook(log_path=output / "relax.csv", append=False)],
        convergence_hook=ConvergenceHook.from_fmax(0.002),
    )
    print(f"relaxing {len(crystals)} crystals and their cells: about a minute", flush=True)
    minimiser.run(batch, n_steps=300)
    batch.remove_key("velocities")  # zero at a minimum; a file would carry them as columns of momenta
    write(output / "relaxed.extxyz", batch)
    return batch


def print_lattice_constants(crystals: list[AtomicData], batch: Batch) -> None:
    print(
        f"{'crystal':<20}{'steps':>6}{'E/eV':>11}{'a/Å':>9}{'exp.':>8}{'Δ/%':>7}{'c/Å':>9}{'exp.':>8}{'Δ/%':>7}"
    )
    for k, crystal in enumerate(crystals):
        line = (
            f"{crystal.info['name']:<20}{int(batch.system_step[k, 0]):>6}{batch.energy[k, 0].item():>11.4f}"
        )
        for axis, key in ((0, "a_exp"), (2, "c_exp")):
            if key in crystal.info:
                measured = crystal.info[key]
                length = batch.cell[k, axis].norm().item()
                line += f"{length:>9.4f}{measured:>8.3f}{100 * (length / measured - 1):>+7.2f}"
        print(line)


def draw(crystals: list[AtomicData], batch: Batch, output: Path) -> None:
    """By how much the lattice constant a differs from the measured one."""
    lengths = batch.cell[:, 0].norm(dim=1).tolist()
    errors = [100 * (a / crystal.info["a_exp"] - 1) for a, crystal in zip(lengths, crystals, strict=True)]
    plt.figure(figsize=(6, 3.2))
    plt.bar([crystal.info["name"] for crystal in crystals], errors)
    plt.axhline(0, color="black", linewidth=0.8)
    plt.ylabel("error of a / %")
    plt.xticks(rotation=45, ha="right")
    plt.tight_layout()
    plt.savefig(output / "picture.png", dpi=80)


def heat(crystal: AtomicData, model: BaseModelMixin, output: Path) -> None:
    """200 fs of a supercell of 32 atoms at 300 K."""
    atoms = crystal.to_atoms().repeat((2, 2, 1))
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64)])
    # Half of the kinetic energy that is drawn goes into the potential energy of a crystal at rest.
    initialize_velocities(batch, temperature=600.0, random_seed=1)
    log = LoggingHook(log_path=output / "md.csv", append=False)
    trajectory = SnapshotHook(ExtxyzTrajectory(output / "md.extxyz"), frequency=10)
    dynamics = NVTLangevin(
        model, dt=2.0, temperature=300.0, friction=0.01, random_seed=1, hooks=[log, trajectory]
    )
    dynamics.run(batch, n_steps=100)
    print(f"{crystal.info['name']}: {temperature(batch, momentum_conserved=False).item():.0f} K after 200 fs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("examples/output/01"))
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)

    crystals = read(CRYSTALS, dtype=torch.float64)
    model = load_model("7net-0")
    batch = relax(crystals, model, output)
    print_lattice_constants(crystals, batch)
    draw(crystals, batch, output)

    names = [crystal.info["name"] for crystal in crystals]
    heat(batch[names.index("NaCl-rocksalt")], model, output)
    print(f"relaxed.extxyz, relax.csv, md.extxyz, md.csv and picture.png are in {output}/")


if __name__ == "__main__":
    main()
