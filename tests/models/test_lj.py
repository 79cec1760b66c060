"""Lennard-Jones model: values, derivatives, options, and what it does with bad input."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models.lj import LennardJonesModelWrapper
from nvalchemi.neighbors import compute_neighbors

EPSILON, SIGMA, CUTOFF = 0.0104, 3.40, 8.5
MIXED = {"epsilon": {18: 0.0104, 10: 0.0031}, "sigma": {18: 3.40, 10: 2.75}}


def argon_model(**options) -> LennardJonesModelWrapper:
    return LennardJonesModelWrapper(
        **{"epsilon": EPSILON, "sigma": SIGMA, "cutoff": CUTOFF, **options}
    ).eval()


def crystal(repeat=2, seed=0, a=5.26, numbers=None) -> Atoms:
    atoms = bulk("Ar", "fcc", a=a, cubic=True) * (repeat, repeat, repeat)
    rng = np.random.default_rng(seed)
    atoms.positions += rng.normal(scale=0.1, size=atoms.positions.shape)
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + rng.normal(scale=0.02, size=(3, 3))), scale_atoms=True)
    if numbers is not None:
        atoms.numbers = rng.choice(numbers, size=len(atoms))
    return atoms


def molecule(n=7, seed=1) -> Atoms:
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3), -1).reshape(-1, 3)[:n] * 3.9
    return Atoms(numbers=[18] * n, positions=grid + rng.normal(scale=0.1, size=(n, 3)))


def to_batch(*atoms_list: Atoms, dtype=torch.float64) -> Batch:
    return Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=dtype) for atoms in atoms_list])


def evaluate(model: LennardJonesModelWrapper, batch: Batch) -> dict[str, torch.Tensor]:
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    return model(batch)


# ---------------------------------------------------------------------- values
@pytest.mark.parametrize("half_list", [False, True])
@pytest.mark.parametrize("cubic", [True, False])
def test_fcc_argon_energy(cubic, half_list):
    batch = to_batch(bulk("Ar", "fcc", a=5.26, cubic=cubic))
    energy = evaluate(argon_model(half_list=half_list), batch)["energy"]
    assert energy.item() / batch.num_nodes == pytest.approx(-0.0842277845, abs=5e-11)


@pytest.mark.parametrize("switch_width", [0.0, 1.5])
@pytest.mark.parametrize("half_list", [False, True])
def test_same_as_the_differentiated_torch_energy(half_list, switch_width):
    """Analytic forces and stress of the compiled kernel are the derivatives of the energy, for mixed species too."""
    model = argon_model(**MIXED, half_list=half_list, switch_width=switch_width)
    batch = to_batch(crystal(numbers=[10, 18]), crystal(1, seed=2, numbers=[10, 18]))
    analytic = evaluate(model, batch)
    assert set(analytic) == {"energy", "forces", "stress"}
    assert not any(value.requires_grad for value in analytic.values())
    differentiated = model.differentiate(model.energies, batch)
    for name, value in analytic.items():
        torch.testing.assert_close(value, differentiated[name], rtol=1e-11, atol=1e-13)


def test_half_and_full_lists_agree():
    batch = to_batch(crystal(1), crystal(2, seed=3))
    full, half = (evaluate(argon_model(half_list=half), batch) for half in (False, True))
    for name in full:
        torch.testing.assert_close(full[name], half[name], rtol=1e-12, atol=1e-14)


def test_forces_and_stress_are_finite_differences_of_the_energy():
    model, atoms, h = argon_model(switch_width=1.0), crystal(1, seed=4), 1e-4

    def energy(positions, cell) -> float:
        moved = Atoms(numbers=atoms.numbers, positions=positions, cell=cell, pbc=True)
        return evaluate(model, to_batch(moved))["energy"].item()

    x, cell = atoms.positions, atoms.cell.array
    result = evaluate(model, to_batch(atoms))
    for i, c in [(0, 0), (1, 2), (3, 1)]:
        step = np.zeros_like(x)
        step[i, c] = h
        slope = (energy(x + step, cell) - energy(x - step, cell)) / (2 * h)
        assert result["forces"][i, c].item() == pytest.approx(-slope, abs=1e-8)
    for c, d in itertools.combinations_with_replacement(range(3), 2):
        strain = np.zeros((3, 3))
        strain[c, d] += h / 2
        strain[d, c] += h / 2
        plus, minus = np.eye(3) + strain, np.eye(3) - strain
        slope = (energy(x @ plus, cell @ plus) - energy(x @ minus, cell @ minus)) / (2 * h)
        assert result["stress"][0, c, d].item() == pytest.approx(slope / atoms.get_volume(), abs=1e-9)


@pytest.mark.parametrize("switch_width", [0.0, 1.5])
def test_stress_does_not_depend_on_where_the_atoms_are(switch_width):
    """Rows without shifts, with those along one axis and along several: the stress is that of the pairs, everywhere."""
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True) * (5, 4, 4)
    atoms.rattle(0.1, seed=1)
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + np.triu(np.full((3, 3), 0.02))), scale_atoms=True)
    model = argon_model(switch_width=switch_width, cutoff=5.5)
    batch = to_batch(atoms)
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    found = model(batch)["stress"]
    assert model._axes is not None
    assert set(model._axes[2].tolist()) == {-1, 0, 1, 2, 3}
    expected = model.differentiate(model.energies, batch)["stress"]
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-16)

    cells_away = np.random.default_rng(0).integers(-20, 21, size=(len(atoms), 3))
    atoms.positions += cells_away @ atoms.cell.array + [1000.0, -3000.0, 500.0]
    for moved in (atoms, atoms[::-1]):
        stress = evaluate(model, to_batch(moved))["stress"]
        # Positions of thousands of Å lose four of the digits.
        torch.testing.assert_close(stress, expected, rtol=1e-9, atol=1e-13)


def test_shifts_changed_in_place_are_noticed():
    batch, model = to_batch(crystal(3, a=7.0)), argon_model(cutoff=5.0)
    expected = evaluate(model, batch)
    cell = batch.cell[0]
    moved = torch.arange(0, batch.num_nodes, 3)
    batch.positions[moved] += cell[0]
    n = torch.zeros(batch.num_nodes + 1, dtype=torch.int8)
    n[moved] = 1
    # x_j + S h − x_i stays what it was.
    batch.neighbor_matrix_shifts[..., 0] += n[:-1, None] - n[batch.neighbor_matrix.long()]
    found = model(batch)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-11, atol=1e-14)


def test_compressed_crystal_has_negative_stress():
    """Tensile-positive: a crystal under pressure pushes outwards, σ < 0."""
    stress = evaluate(argon_model(), to_batch(bulk("Ar", "fcc", a=4.8, cubic=True)))["stress"]
    assert bool((stress[0].diagonal() < -1e-3).all())


def test_switch_takes_energy_and_force_to_zero_at_the_cutoff():
    model = argon_model(switch_width=2.0)

    def pair(r: float) -> tuple[float, float]:
        result = evaluate(model, to_batch(Atoms("Ar2", positions=[[0, 0, 0], [r, 0, 0]])))
        return result["energy"].item(), result["forces"][1, 0].item()

    plain = 4 * EPSILON * ((SIGMA / 6.0) ** 12 - (SIGMA / 6.0) ** 6)
    assert pair(6.0)[0] == pytest.approx(plain, rel=1e-13)
    below, above = pair(CUTOFF - 1e-5), pair(CUTOFF + 1e-5)
    assert above == (0.0, 0.0)
    assert abs(below[0]) < 1e-17  # cubic in the distance from the cutoff
    assert abs(below[1]) < 1e-12  # quadratic
    # Continuous where the switch begins, too.
    before, after = pair(6.5 - 1e-7), pair(6.5 + 1e-7)
    assert before[0] == pytest.approx(after[0], rel=1e-6)
    assert before[1] == pytest.approx(after[1], rel=1e-6)


def test_pairs_in_the_skin_are_ignored():
    batch = to_batch(crystal())
    plain = evaluate(argon_model(), batch)
    compute_neighbors(batch, CUTOFF + 1.3, format="matrix")
    skinned = argon_model()(batch)
    for name in plain:
        torch.testing.assert_close(plain[name], skinned[name], rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------- batches
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_batch_equals_singles(dtype, rtol):
    structures = [crystal(1), crystal(3, seed=5), crystal(2, seed=6)]
    model = argon_model()
    together = evaluate(model, to_batch(*structures, dtype=dtype))
    assert all(value.dtype == dtype for value in together.values())
    singles = [evaluate(model, to_batch(atoms, dtype=dtype)) for atoms in structures]
    for name, value in together.items():
        torch.testing.assert_close(
            value, torch.cat([single[name] for single in singles]), rtol=rtol, atol=rtol * 1e-2
        )


def test_float32_is_near_float64():
    structures = [crystal(1), crystal(3, seed=5)]
    low, high = (
        evaluate(argon_model(), to_batch(*structures, dtype=dtype))
        for dtype in (torch.float32, torch.float64)
    )
    for name in low:
        torch.testing.assert_close(low[name].double(), high[name], rtol=2e-5, atol=2e-6)


def test_number_of_threads_changes_nothing():
    # More atoms than one thread does alone.
    batch = to_batch(crystal(4), crystal(3, seed=5))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = evaluate(argon_model(), batch)
        torch.set_num_threads(2)
        two = evaluate(argon_model(), batch)
    finally:
        torch.set_num_threads(threads)
    # The compiler may order the terms of a sum in another way, so not to the last bit.
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-13, atol=1e-15)


def test_no_stress_without_a_volume():
    slab = crystal(1)
    slab.pbc = [True, True, False]
    for batch in (to_batch(molecule()), to_batch(crystal(1), molecule()), to_batch(slab)):
        assert set(evaluate(argon_model(), batch)) == {"energy", "forces"}
    model = argon_model()
    model.set_config("active_outputs", {"energy", "stress"})
    assert set(evaluate(model, to_batch(crystal(1)))) == {"energy", "stress"}
    with pytest.raises(ValueError, match="stress of graph 0"):
        evaluate(model, to_batch(molecule()))


def test_empty_and_single_atom_graphs():
    batch = to_batch(Atoms(), Atoms("Ar", positions=[[1, 2, 3]]), molecule())
    result = evaluate(argon_model(), batch)
    assert result["energy"][:2].tolist() == [[0.0], [0.0]]
    assert result["energy"][2].item() < 0
    assert result["forces"][0].tolist() == [0.0, 0.0, 0.0]


def test_supercell_and_rotation():
    atoms, model = crystal(1, seed=7), argon_model()
    one = evaluate(model, to_batch(atoms))
    eight = evaluate(model, to_batch(atoms * (2, 2, 2)))
    assert eight["energy"].item() == pytest.approx(8 * one["energy"].item(), rel=1e-12)
    torch.testing.assert_close(eight["stress"], one["stress"], rtol=1e-11, atol=1e-14)
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    rotated = Atoms(numbers=atoms.numbers, positions=atoms.positions @ q, cell=atoms.cell.array @ q, pbc=True)
    turned = evaluate(model, to_batch(rotated))
    Q = torch.tensor(q)
    torch.testing.assert_close(turned["forces"], one["forces"] @ Q, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(turned["stress"][0], Q.T @ one["stress"][0] @ Q, rtol=1e-10, atol=1e-13)


def test_list_in_an_ordinary_layout_and_columns():
    """Tables that did not come from our search: contiguous shifts, a width that is not a multiple of eight, int64."""
    batch = to_batch(crystal(1))
    model = argon_model()
    expected = evaluate(model, batch)
    width = int(batch.num_neighbors.max())
    batch.add_key("neighbor_matrix_shifts", batch.neighbor_matrix_shifts[:, :width].contiguous())
    batch.add_key("neighbor_matrix", batch.neighbor_matrix[:, :width].long())
    assert width % 8 != 0
    found = model(batch)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-13, atol=1e-15)


# ---------------------------------------------------------------------- gradients
def test_padded_rows_give_finite_gradients():
    model = argon_model()
    batch = to_batch(molecule(2), molecule(5))
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    batch.positions = batch.positions.clone().requires_grad_()
    analytic = model(batch)
    model.set_config("gradient_keys", {"positions"})
    result = model(batch)
    (gradient,) = torch.autograd.grad(result["energy"].sum(), batch.positions, retain_graph=True)
    torch.testing.assert_close(-gradient, analytic["forces"])
    (second,) = torch.autograd.grad(result["forces"].square().sum(), batch.positions)
    assert bool(torch.isfinite(second).all())


def test_gradient_keys_give_second_derivatives():
    model = argon_model()
    model.set_config("gradient_keys", {"positions"})
    batch = to_batch(molecule(3))
    batch.positions = batch.positions.clone().requires_grad_()
    forces = evaluate(model, batch)["forces"]
    hessian = torch.stack(
        [torch.autograd.grad(-f, batch.positions, retain_graph=True)[0] for f in forces.flatten()]
    )
    hessian = hessian.reshape(9, 9)
    torch.testing.assert_close(hessian, hessian.T, rtol=1e-9, atol=1e-12)
    assert hessian.abs().max() > 1e-3


def test_results_of_two_calls_share_no_memory():
    batch, model = to_batch(crystal(1)), argon_model()
    first = evaluate(model, batch)
    kept = {name: value.clone() for name, value in first.items()}
    batch.positions.mul_(1.01)
    evaluate(model, batch)
    assert all(torch.equal(first[name], kept[name]) for name in first)


# ---------------------------------------------------------------------- bad positions
@pytest.mark.parametrize("half_list", [False, True])
@pytest.mark.parametrize("switch_width", [0.0, 1.0])
def test_two_atoms_at_the_same_place_are_not_silent(half_list, switch_width):
    atoms = Atoms("Ar3", positions=[[0, 0, 0], [0, 0, 0], [3.8, 0, 0]])
    model = argon_model(half_list=half_list, switch_width=switch_width)
    batch = to_batch(atoms)
    for result in (evaluate(model, batch), model.differentiate(model.energies, batch)):
        assert not math.isfinite(result["energy"].item())
        assert not bool(torch.isfinite(result["forces"][:2]).any())
        assert bool(torch.isfinite(result["forces"][2]).all())


@pytest.mark.parametrize("half_list", [False, True])
def test_position_that_is_not_a_number_shows_in_its_graph_only(half_list):
    model = argon_model(half_list=half_list)
    batch = to_batch(crystal(1), crystal(1, seed=2))
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    batch.positions[1, 0] = float("nan")
    result = model(batch)
    assert math.isnan(result["energy"][0].item())
    assert math.isfinite(result["energy"][1].item())
    assert bool(torch.isfinite(result["forces"][4:]).all())
    assert bool(result["forces"][1].isnan().any())


# ---------------------------------------------------------------------- parameters
def dimer_energy(model: LennardJonesModelWrapper, z1: int, z2: int, r: float = 4.0) -> float:
    return evaluate(model, to_batch(Atoms(numbers=[z1, z2], positions=[[0, 0, 0], [r, 0, 0]])))[
        "energy"
    ].item()


def lj(epsilon: float, sigma: float, r: float = 4.0) -> float:
    return 4 * epsilon * ((sigma / r) ** 12 - (sigma / r) ** 6)


def test_species_mix_by_lorentz_berthelot():
    model = argon_model(**MIXED)
    assert dimer_energy(model, 18, 18) == pytest.approx(lj(0.0104, 3.40), rel=1e-13)
    assert dimer_energy(model, 10, 10) == pytest.approx(lj(0.0031, 2.75), rel=1e-13)
    mixed = lj(math.sqrt(0.0104 * 0.0031), (3.40 + 2.75) / 2)
    assert dimer_energy(model, 10, 18) == pytest.approx(mixed, rel=1e-13)
    assert dimer_energy(model, 18, 10) == pytest.approx(mixed, rel=1e-13)


def test_pairs_can_be_given_one_by_one():
    model = argon_model(
        epsilon={(18, 18): 0.01, (18, 10): 0.02, (10, 10): 0.03}, sigma={18: 3.4, 10: 2.8, (10, 18): 3.3}
    )
    assert dimer_energy(model, 10, 18) == pytest.approx(lj(0.02, 3.3), rel=1e-13)
    assert dimer_energy(model, 10, 10) == pytest.approx(lj(0.03, 2.8), rel=1e-13)


def test_species_table_of_equal_values_is_the_plain_potential():
    batch = to_batch(crystal(numbers=[10, 18]))
    plain = evaluate(argon_model(), batch)
    table = evaluate(argon_model(epsilon={10: EPSILON, 18: EPSILON}, sigma=SIGMA), batch)
    for name in plain:
        torch.testing.assert_close(table[name], plain[name], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("number", [0, 8, 54])
def test_element_without_parameters_is_named(number):
    model = argon_model(**MIXED)
    with pytest.raises(ValueError, match=f"atomic number {number} in graph 1"):
        evaluate(model, to_batch(molecule(2), Atoms(numbers=[18, number], positions=[[0, 0, 0], [3, 0, 0]])))


def test_species_follow_the_atomic_numbers_when_they_change():
    model = argon_model(**MIXED)
    batch = to_batch(Atoms("Ar2", positions=[[0, 0, 0], [4, 0, 0]]))
    assert evaluate(model, batch)["energy"].item() == pytest.approx(lj(0.0104, 3.40), rel=1e-13)
    batch.atomic_numbers[:] = 10
    assert model(batch)["energy"].item() == pytest.approx(lj(0.0031, 2.75), rel=1e-13)


def test_inference_mode():
    model = argon_model(**MIXED)
    expected = evaluate(model, to_batch(crystal(1, numbers=[10, 18])))
    with torch.inference_mode():
        batch = to_batch(crystal(1, numbers=[10, 18]))
        for _ in range(2):
            found = evaluate(model, batch)
            assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epsilon": -1.0}, "epsilon must be a finite non-negative number"),
        ({"epsilon": float("nan")}, "epsilon must be a finite non-negative number"),
        ({"sigma": 0.0}, "sigma must be a finite positive number"),
        ({"sigma": {18: 3.4, 10: -2.0}}, "pair .10, 18. must be|pair .10, 10. must be"),
        ({"sigma": {(18, 10): 3.0, 18: 3.4}}, r"sigma of the pair \(10, 10\) is neither given"),
        ({"epsilon": {(18, 10): 1.0, (10, 18): 2.0}}, "given twice"),
        ({"switch_width": -1.0}, "switch_width must be between"),
        ({"switch_width": 9.0}, "switch_width must be between"),
        ({"cutoff": 0.0}, "cutoff"),
    ],
)
def test_parameters_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        argon_model(**wrong)


def test_missing_neighbour_list_is_explained():
    with pytest.raises(ValueError, match="compute_neighbors"):
        argon_model()(to_batch(molecule()))


def test_copies_and_files(tmp_path):
    model = argon_model(**MIXED)
    batch = to_batch(crystal(1, numbers=[10, 18]))
    expected = evaluate(model, batch)["energy"]
    torch.save(model, tmp_path / "lj.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "lj.pt", weights_only=False)):
        assert torch.equal(other(batch)["energy"], expected)
