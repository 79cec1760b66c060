"""The doctor finds each fault that is planted, names the structures, and finds nothing in sound data."""

import numpy as np
import pytest
import torch

from nvalchemi import units
from nvalchemi.data import AtomicData
from nvalchemi.data.check import check_dataset
from nvalchemi.data.datasets import InMemoryDataset
from nvalchemi.data.io import write
from nvalchemi.data.statistics import compute_statistics, reference_energies
from nvalchemi.data.zarr import write_zarr


def crystal(strain: float, seed: int, *, bulk_modulus: float = 0.6) -> AtomicData:
    """Two atoms in a cube with the energy and stress of a harmonic equation of state (V0 = 64 Å³)."""
    rng = np.random.default_rng(seed)
    v0, volume = 64.0, 64.0 * (1 + strain)
    forces = rng.normal(size=(2, 3))
    return AtomicData(
        positions=torch.tensor([[0.0, 0, 0], [2, 2, 2]]) + 0.1 * torch.tensor(rng.random((2, 3))).float(),
        atomic_numbers=torch.tensor([11, 17]),
        cell=torch.eye(3) * volume ** (1 / 3),
        energy=-6.0 + bulk_modulus * (volume - v0) ** 2 / (2 * v0),
        forces=torch.tensor(forces - forces.mean(axis=0)).float(),
        stress=torch.eye(3) * bulk_modulus * (volume - v0) / v0,
    )


@pytest.fixture
def sound():
    return [crystal(strain, k) for k, strain in enumerate(np.linspace(-0.1, 0.1, 24))]


def kinds(data, severity="error"):
    return {
        p.kind: p.structures for p in check_dataset(InMemoryDataset(data)).problems if p.severity == severity
    }


def test_sound_data_is_fit(sound):
    report = check_dataset(InMemoryDataset(sound))
    assert report.fit_to_train
    assert report.problems == []
    assert (report.num_structures, report.num_atoms, report.min_atoms, report.max_atoms) == (24, 48, 2, 2)
    assert report.elements == {"Na": 24, "Cl": 24}
    assert report.fields["stress"] == 24
    assert report.lines()[-1] == "fit to train on"


@pytest.mark.parametrize("name", ["energy", "forces", "stress", "positions"])
def test_values_that_are_not_finite(sound, name):
    sound[5][name].view(-1)[-1] = float("nan")
    sound[9][name].view(-1)[0] = float("inf")
    found = kinds(sound)
    assert found["non-finite"] == (5, 9)
    assert set(found) == {"non-finite"}


def test_missing_labels_and_labels_under_another_name(sound):
    sound[3].remove_key("energy")
    assert kinds(sound) == {"missing label": (3,)}
    sound[3].energy = sound[3].stress[:, 0, :1]
    sound[4].remove_key("stress")
    assert kinds(sound)["missing label"] == (4,)
    for data in sound:
        data.remove_key("energy")
        data.info["REF_energy"] = 1.0
    report = check_dataset(InMemoryDataset(sound))
    messages = [p.message for p in report.problems]
    assert "all structures have no energy; there are values named REF_energy" in messages
    assert not report.fit_to_train


def test_forces_that_none_has_are_a_warning(sound):
    for data in sound:
        data.remove_key("forces")
    assert kinds(sound) == {}
    assert kinds(sound, "warning") == {"missing label": ()}


def test_atoms_that_overlap_within_the_cell_or_across_it(sound):
    sound[2].positions[1] = sound[2].positions[0] + 0.2
    sound[7].positions[:] = torch.tensor([[0.01, 1, 1], [0.01, 1, 1]])
    sound[7].positions[1, 0] = float(sound[7].cell[0, 0, 0]) * 3 - 0.01
    found = kinds(sound)
    assert found["overlap"] == (2, 7)


def test_atoms_of_a_molecule_do_not_meet_images():
    pair = AtomicData(
        positions=[[0.0, 0, 0], [3.99, 0, 0]], atomic_numbers=[1, 1], cell=torch.eye(3) * 4, pbc=[False] * 3
    )
    periodic = pair.clone()
    periodic.pbc = torch.ones(1, 3, dtype=torch.bool)
    assert kinds([pair, periodic])["overlap"] == (1,)


def test_overlaps_agree_with_a_direct_search_over_images():
    from ase.data import covalent_radii

    rng = np.random.default_rng(1)
    data, expected = [], []
    for k in range(60):
        cell = np.eye(3) * 3.5 + rng.normal(scale=0.5, size=(3, 3))
        fractional = rng.uniform(-2, 2, size=(4, 3))
        numbers = rng.choice([1, 8, 29], 4)
        frame = AtomicData(fractional @ cell, numbers, cell=cell, dtype=torch.float64)
        data.append(frame)
        limit = 0.5 * (covalent_radii[numbers][:, None] + covalent_radii[numbers][None])
        shifts = np.array(list(np.ndindex(13, 13, 13))) - 6
        vectors = (fractional[:, None] - fractional[None]) @ cell
        distance = np.linalg.norm(vectors[:, :, None] + (shifts @ cell)[None, None], axis=-1)
        own = np.eye(4, dtype=bool)[:, :, None] & ~shifts.any(axis=1)
        if ((distance < limit[:, :, None]) & ~own).any():
            expected.append(k)
    assert 5 < len(expected) < 55
    assert kinds(data)["overlap"] == tuple(expected)


def test_outlier_force(sound):
    sound[8].forces[0, 1] += 500.0
    found = kinds(sound)
    assert found == {"outlier force": (8,)}
    assert kinds(sound, "warning")["net force"] == (8,)


def test_duplicates_and_contradictions(sound):
    sound.append(sound[4].clone())
    assert kinds(sound, "warning") == {"duplicate": (24,)}
    sound[24].energy += 0.5
    assert kinds(sound) == {"contradicting duplicate": (24,)}


@pytest.mark.parametrize(
    ("factor", "kind", "words"),
    [
        (-1.0, "stress sign", "reversed"),
        (1 / units.GPa, "stress unit", "like GPa"),
        (1e-3 / units.bar, "stress unit", "like kbar"),
    ],
)
def test_stress_with_wrong_sign_or_unit(sound, factor, kind, words):
    for data in sound:
        data.stress *= factor
    report = check_dataset(InMemoryDataset(sound))
    assert not report.fit_to_train
    assert {p.kind for p in report.problems} == {kind}
    assert words in report.problems[0].message


def test_stress_in_gpa_is_noticed_at_a_single_volume_too(sound):
    frames = [crystal(0.05, k) for k in range(12)]
    assert kinds(frames) == {}
    for data in frames:
        data.stress /= units.GPa
    assert kinds(frames) == {"stress unit": ()}


def test_stress_that_is_not_symmetric_is_a_warning(sound):
    sound[1].stress[0, 0, 1] = 0.01
    assert kinds(sound, "warning") == {"stress": (1,)}


def test_structures_that_cannot_be_read_are_counted(tmp_path, sound):
    write_zarr(tmp_path / "s.zarr", sound, chunk_bytes=64)
    (tmp_path / "s.zarr/system/stress/c/3/0/0").write_bytes(b"x")
    report = check_dataset(tmp_path / "s.zarr")
    assert not report.fit_to_train
    assert report.num_structures == 23
    assert report.problems[0].structures == (3,)
    assert "array 'system/stress', chunk 3" in report.problems[0].message


def test_text_file_with_a_broken_frame(tmp_path, sound):
    write(tmp_path / "s.extxyz", sound)
    assert check_dataset(tmp_path / "s.extxyz").fit_to_train
    lines = (tmp_path / "s.extxyz").read_text().splitlines()
    (tmp_path / "s.extxyz").write_text("\n".join(lines[:9] + lines[10:]) + "\n")
    report = check_dataset(tmp_path / "s.extxyz")
    assert not report.fit_to_train
    assert report.num_structures in (22, 23)
    assert report.problems[0].kind == "unreadable"


def test_nothing_to_train_on():
    assert kinds([]) == {"empty": ()}


# ---------------------------------------------------------------------- statistics
def composition(counts: dict[int, int], energy: float) -> AtomicData:
    numbers = [z for z, count in counts.items() for _ in range(count)]
    return AtomicData(
        torch.rand(len(numbers), 3, dtype=torch.float64),
        numbers,
        energy=torch.tensor(energy, dtype=torch.float64),
    )


def test_reference_energies_are_recovered_exactly_and_in_one_pass():
    rng = np.random.default_rng(0)
    exact = {1: -13.6, 6: -1030.5, 8: -2042.25, 79: -535000.125}
    frames = []
    for _ in range(3000):
        counts = {z: int(rng.integers(0, 5)) for z in exact}
        counts[1] += 1
        frames.append(composition(counts, sum(n * exact[z] for z, n in counts.items())))
    found = compute_statistics(batch for batch in InMemoryDataset(frames).iter_batches(500))
    assert found.reference_energies == pytest.approx(exact, abs=1e-6)
    assert found.reference_rank == 4
    assert found.residual_per_atom_std < 1e-6


def test_reference_energies_agree_with_least_squares_on_everything():
    rng = np.random.default_rng(1)
    frames = [
        composition({1: int(a), 8: int(b)}, float(rng.normal())) for a, b in rng.integers(1, 9, (400, 2))
    ]
    counts = np.array([[(f.atomic_numbers == z).sum() for z in (1, 8)] for f in frames], dtype=float)
    energy = np.array([f.energy.item() for f in frames])
    size = counts.sum(axis=1)
    expected, squares, _, _ = np.linalg.lstsq(counts / size[:, None], energy / size, rcond=None)
    found = compute_statistics(InMemoryDataset(frames))
    assert list(found.reference_energies.values()) == pytest.approx(expected.tolist(), rel=1e-10)
    assert found.residual_per_atom_std == pytest.approx(np.sqrt(squares[0] / 400), rel=1e-10)


def test_compositions_that_leave_the_fit_open_give_the_shortest_solution():
    found = compute_statistics(InMemoryDataset([composition({1: 2 * n, 8: n}, -6.0 * n) for n in (1, 2, 3)]))
    assert found.reference_rank == 1
    assert found.reference_energies == pytest.approx({1: -2.4, 8: -1.2})
    assert found.residual_per_atom_std == pytest.approx(0, abs=1e-12)


def test_means_and_spreads(sound):
    sound[3].remove_key("forces")
    sound[4].energy = torch.tensor([[float("nan")]])
    found = compute_statistics(InMemoryDataset(sound))
    per_atom = np.array([f.energy.item() / 2 for k, f in enumerate(sound) if k != 4])
    forces = torch.cat([f.forces for k, f in enumerate(sound) if k != 3]).double().numpy()
    assert found.num_energies == 23
    assert found.energy_per_atom_mean == pytest.approx(per_atom.mean())
    assert found.energy_per_atom_std == pytest.approx(per_atom.std())
    assert found.forces_rms == pytest.approx(np.sqrt((forces**2).mean()))
    assert found.forces_max == pytest.approx(np.linalg.norm(forces, axis=1).max())
    assert found.element_counts == {11: 24, 17: 24}


def test_forces_that_are_all_nan_have_no_maximum():
    data = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[1], forces=torch.full((1, 3), torch.nan))
    found = compute_statistics(InMemoryDataset([data]))
    assert np.isnan(found.forces_max)
    assert np.isnan(found.forces_rms)


def test_no_energies_no_references(sound):
    for data in sound:
        data.remove_key("energy")
    assert compute_statistics(InMemoryDataset(sound)).reference_energies == {}
    with pytest.raises(ValueError, match="none has one"):
        reference_energies(InMemoryDataset(sound))
