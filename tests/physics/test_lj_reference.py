"""Lennard-Jones energy, forces and stress against ASE, LAMMPS and a sum over images, to 1e-9 relative.

The published codes and this one use the same closed formula; what differs is the order of floating-point sums. 1e-9
leaves room for that and for nothing else.
"""

import itertools
import shutil
import subprocess

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.neighborlist import neighbor_list as ase_neighbor_list

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models.lj import LennardJonesModelWrapper
from nvalchemi.neighbors import compute_neighbors

EPSILON, SIGMA, CUTOFF = 0.0104, 3.40, 8.5
RTOL = 1e-9
LAMMPS_BAR = 1.6021765e6  # LAMMPS's constant nktv2p of `units metal`: bar per eV/Å³


def crystal(repeat: int, seed: int, pbc=True) -> Atoms:
    """Strained, rattled argon whose cell is lower triangular, as LAMMPS wants it."""
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True) * (repeat, repeat, repeat)
    rng = np.random.default_rng(seed)
    strain = np.eye(3) + np.tril(rng.normal(scale=0.05, size=(3, 3)))
    atoms.set_cell(atoms.cell.array @ strain, scale_atoms=True)
    atoms.positions += rng.normal(scale=0.15, size=atoms.positions.shape)
    atoms.pbc = pbc
    return atoms


def evaluate(model: LennardJonesModelWrapper, *atoms_list: Atoms) -> dict[str, np.ndarray]:
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64) for atoms in atoms_list])
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    return {name: value.numpy() for name, value in model.eval()(batch).items()}


def argon_model(half_list=False) -> LennardJonesModelWrapper:
    return LennardJonesModelWrapper(EPSILON, SIGMA, CUTOFF, half_list=half_list)


def close(found, expected):
    """Relative to the largest component: a component that is zero by symmetry is round-off."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=RTOL * np.abs(expected).max())


@pytest.mark.parametrize("half_list", [False, True])
@pytest.mark.parametrize(
    "atoms",
    [
        crystal(1, 0),
        crystal(3, 1),
        crystal(2, 2, (True, True, False)),
        crystal(2, 3, False),
        bulk("Ar", "fcc", a=5.1),
    ],
    ids=["small cell", "large cell", "slab", "cluster", "primitive"],
)
def test_ase(atoms, half_list):
    result = evaluate(argon_model(half_list), atoms)
    atoms = atoms.copy()
    atoms.calc = LennardJones(epsilon=EPSILON, sigma=SIGMA, rc=CUTOFF, smooth=False)
    # ASE shifts the energy of each pair to zero at the cutoff.
    pairs = len(ase_neighbor_list("i", atoms, CUTOFF)) / 2
    shift = 4 * EPSILON * ((SIGMA / CUTOFF) ** 12 - (SIGMA / CUTOFF) ** 6)
    close(result["energy"], atoms.get_potential_energy() + pairs * shift)
    if len(atoms) > 1:  # by symmetry the forces in the primitive cell are round-off
        close(result["forces"], atoms.get_forces())
    if atoms.pbc.all():
        close(result["stress"][0], atoms.get_stress(voigt=False))
    else:
        assert "stress" not in result


def test_sum_over_images():
    """No neighbour list at all: every pair of atoms and every image within the cutoff."""
    atoms = crystal(1, 5)
    images = np.array(list(itertools.product(range(-4, 5), repeat=3))) @ atoms.cell.array
    d = atoms.positions[None, :, None] + images[None, None] - atoms.positions[:, None, None]
    r = np.linalg.norm(d, axis=-1)
    r[(r == 0) | (r >= CUTOFF)] = np.inf
    u = 4 * EPSILON * ((SIGMA / r) ** 12 - (SIGMA / r) ** 6)
    slope = -24 * EPSILON * (2 * (SIGMA / r) ** 12 - (SIGMA / r) ** 6) / r**2  # (du/dr)/r
    result = evaluate(argon_model(), atoms)
    close(result["energy"], u.sum() / 2)
    close(result["forces"], np.einsum("ijs,ijsd->id", slope, d))
    close(result["stress"][0], np.einsum("ijs,ijsc,ijsd->cd", slope, d, d) / (2 * atoms.get_volume()))


# ---------------------------------------------------------------------- LAMMPS
def lammps(atoms: Atoms, pair_coeffs: list[str], numbers: list[int], directory) -> dict[str, np.ndarray]:
    """Energy, forces and stress of ``pair_style lj/cut`` in ``units metal``; types are places in ``numbers``."""
    cell = atoms.cell.array
    assert np.allclose(np.triu(cell, 1), 0)
    lines = ["argon", "", f"{len(atoms)} atoms", f"{len(numbers)} atom types", ""]
    lines += [f"0 {cell[c, c]:.17g} {axis}lo {axis}hi" for c, axis in enumerate("xyz")]
    lines += [f"{cell[1, 0]:.17g} {cell[2, 0]:.17g} {cell[2, 1]:.17g} xy xz yz", "", "Atoms # atomic", ""]
    lines += [
        f"{i + 1} {numbers.index(z) + 1} {x[0]:.17g} {x[1]:.17g} {x[2]:.17g}"
        for i, (z, x) in enumerate(zip(atoms.numbers, atoms.get_positions(wrap=True), strict=True))
    ]
    (directory / "structure.data").write_text("\n".join(lines) + "\n")
    names = ["pe", "pxx", "pyy", "pzz", "pyz", "pxz", "pxy"]
    (directory / "in.lmp").write_text(
        "\n".join(
            [
                "units metal",
                "atom_style atomic",
                "atom_modify map array",
                "box tilt large",
                "read_data structure.data",
                "mass * 39.948",
                f"pair_style lj/cut {CUTOFF}",
                *pair_coeffs,
                "pair_modify shift no tail no",
                "thermo_style custom step " + " ".join(names),
                "dump forces all custom 1 forces.txt fx fy fz",
                "dump_modify forces sort id format float %.17g",
                "thermo_modify norm no",
                "run 0",
                'print "' + " ".join(f"$({name}:%.17g)" for name in names) + '" file thermo.txt',
            ]
        )
        + "\n"
    )
    subprocess.run(
        ["lmp", "-in", "in.lmp", "-log", "none"], cwd=directory, check=True, capture_output=True, timeout=120
    )
    pe, xx, yy, zz, yz, xz, xy = np.loadtxt(directory / "thermo.txt")
    return {
        "energy": np.array(pe),
        "forces": np.loadtxt(directory / "forces.txt", skiprows=9),
        "stress": -np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]) / LAMMPS_BAR,
    }


needs_lammps = pytest.mark.skipif(shutil.which("lmp") is None, reason="LAMMPS (lmp) is not installed")


@needs_lammps
@pytest.mark.parametrize("repeat", [2, 4])
def test_lammps(repeat, tmp_path):
    atoms = crystal(repeat, 7)
    expected = lammps(atoms, [f"pair_coeff * * {EPSILON} {SIGMA}"], [18], tmp_path)
    result = evaluate(argon_model(), atoms, crystal(1, 8))
    close(result["energy"][0], expected["energy"])
    close(result["forces"][: len(atoms)], expected["forces"])
    close(result["stress"][0], expected["stress"])


@needs_lammps
def test_lammps_mixture(tmp_path):
    """Lorentz–Berthelot mixing is LAMMPS's ``mix arithmetic``."""
    atoms = crystal(2, 9)
    atoms.numbers = np.random.default_rng(9).choice([10, 18], size=len(atoms))
    coefficients = [
        "pair_modify mix arithmetic",
        "pair_coeff 1 1 0.0031 2.75",
        f"pair_coeff 2 2 {EPSILON} {SIGMA}",
    ]
    expected = lammps(atoms, coefficients, [10, 18], tmp_path)
    model = LennardJonesModelWrapper({10: 0.0031, 18: EPSILON}, {10: 2.75, 18: SIGMA}, CUTOFF)
    result = evaluate(model, atoms)
    close(result["energy"][0], expected["energy"])
    close(result["forces"], expected["forces"])
    close(result["stress"][0], expected["stress"])
