"""PaiNN: the promises of the model interface, smoothness to second order, reference energies, files, precision."""

import math

import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.emt import EMT

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models.ase import ASECalculatorWrapper
from nvalchemi.models.catalog import load_model
from nvalchemi.models.painn import PaiNN, bessel_basis, polynomial_envelope
from nvalchemi.models.testing import check_model
from nvalchemi.neighbors import compute_neighbors
from nvalchemi.training import (
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    StressMSELoss,
    TrainingStrategy,
    ValidationConfig,
)


def make_model(dtype=torch.float64, **options) -> PaiNN:
    torch.manual_seed(0)
    return PaiNN(**({"hidden_dim": 16} | options)).to(dtype).eval()


def displaced(atoms, seed: int, dtype=torch.float64) -> AtomicData:
    atoms.rattle(0.1, seed=seed)
    return AtomicData.from_atoms(atoms, dtype=dtype)


def with_neighbors(structures, model: PaiNN) -> Batch:
    batch = Batch.from_data_list(structures)
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    return batch


def molecules(dtype=torch.float64) -> list[AtomicData]:
    names = ("CH3CH2OH", "H2O", "C6H6")
    return [displaced(molecule(name), seed, dtype) for seed, name in enumerate(names)]


def crystals(dtype=torch.float64) -> list[AtomicData]:
    cells = (bulk("Cu"), bulk("NaCl", "rocksalt", a=5.6), bulk("Mg"))
    return [displaced(atoms, seed, dtype) for seed, atoms in enumerate(cells)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("structures", [molecules, crystals])
def test_keeps_the_promises_of_the_model_interface(structures, dtype):
    check_model(make_model(dtype), Batch.from_data_list(structures(dtype)))


def test_float32_weights_work_on_a_float64_batch():
    check_model(make_model(torch.float32), Batch.from_data_list(crystals()))


# ---------------------------------------------------------------------- smoothness
def test_envelope_has_two_vanishing_derivatives_at_the_cutoff():
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    value = polynomial_envelope(x)
    (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert max(value.abs().item(), first.abs().item(), second.abs().item()) < 1e-12


def test_radial_basis_is_orthonormal_inside_the_cutoff():
    r = torch.linspace(1e-6, 5.0, 20001, dtype=torch.float64).unsqueeze(1)
    basis = bessel_basis(r, 5.0, 6) * r  # weight r² of the volume element
    overlap = torch.trapezoid(basis.unsqueeze(2) * basis.unsqueeze(1), r.unsqueeze(2), dim=0)
    torch.testing.assert_close(overlap, torch.eye(6, dtype=torch.float64), atol=1e-6, rtol=0)


def test_hessian_equals_differences_of_forces_and_is_symmetric():
    model = make_model()
    batch = with_neighbors([displaced(molecule("H2O"), 1)], model)
    model.set_config("gradient_keys", {"positions"})
    batch.positions.requires_grad_()
    forces = model(batch)["forces"].reshape(-1)
    hessian = -torch.stack(
        [torch.autograd.grad(f, batch.positions, retain_graph=True)[0].reshape(-1) for f in forces]
    )
    torch.testing.assert_close(hessian, hessian.T, atol=1e-10, rtol=0)

    model.set_config("gradient_keys", set())
    numeric = torch.empty_like(hessian)
    h = 1e-5
    for k in range(9):
        shifted = []
        for sign in (1, -1):
            moved = batch.clone()
            moved.positions = moved.positions.detach().clone()
            moved.positions.view(-1)[k] += sign * h
            shifted.append(model(moved)["forces"].reshape(-1))
        numeric[:, k] = -(shifted[0] - shifted[1]) / (2 * h)
    torch.testing.assert_close(numeric, hessian, atol=1e-6, rtol=1e-6)


def test_energy_and_force_go_to_zero_smoothly_at_the_cutoff():
    model = make_model(cutoff=3.0)
    alone = AtomicData(positions=torch.zeros(1, 3, dtype=torch.float64), atomic_numbers=[1])
    limit = 2 * model(with_neighbors([alone], model))["energy"].item()

    def at(distance: float) -> tuple[float, float]:
        positions = torch.tensor([[0.0, 0, 0], [distance, 0, 0]], dtype=torch.float64)
        outputs = model(with_neighbors([AtomicData(positions=positions, atomic_numbers=[1, 1])], model))
        return outputs["energy"].item() - limit, outputs["forces"][1, 0].item()

    # The envelope goes to zero as δ³ and the basis as δ: E ~ δ⁴ and F ~ δ³, so halving δ divides them by 16 and 8.
    near, nearer = at(3.0 - 2e-3), at(3.0 - 1e-3)
    assert near[0] / nearer[0] == pytest.approx(16, rel=0.05)
    assert near[1] / nearer[1] == pytest.approx(8, rel=0.05)
    assert at(3.0 + 1e-9) == pytest.approx((0.0, 0.0), abs=1e-15)


def test_pairs_beyond_the_cutoff_are_ignored():
    model = make_model()
    batch = with_neighbors(crystals(), model)
    expected = model(batch)
    compute_neighbors(batch, model.architecture["cutoff"] + 1.0)
    for name, value in model(batch).items():
        torch.testing.assert_close(value, expected[name], atol=1e-12, rtol=1e-12)


# ---------------------------------------------------------------------- special structures
def test_lone_atom_and_dimer_without_any_edge():
    model = make_model()
    lone = AtomicData(positions=torch.zeros(1, 3, dtype=torch.float64), atomic_numbers=[1])
    apart = AtomicData(
        positions=torch.tensor([[0.0, 0, 0], [9.0, 0, 0]], dtype=torch.float64), atomic_numbers=[1, 8]
    )
    batch = with_neighbors([lone, apart], model)
    assert batch.num_edges == 0
    outputs = model(batch)
    assert torch.equal(outputs["forces"], torch.zeros(3, 3, dtype=torch.float64))
    assert outputs["energy"].isfinite().all()
    model.train()
    (model(batch)["energy"].sum() + model(batch)["forces"].square().sum()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_atoms_at_the_same_place_are_not_finite_rather_than_silent():
    model = make_model()
    twins = AtomicData(positions=torch.zeros(2, 3, dtype=torch.float64), atomic_numbers=[1, 1])
    water = displaced(molecule("H2O"), 0)
    outputs = model(with_neighbors([twins, water], model))
    assert not outputs["energy"][0].isfinite()
    assert outputs["energy"][1].isfinite()
    assert outputs["forces"][2:].isfinite().all()


def test_embeddings_have_the_shapes_announced_and_are_invariant():
    model = make_model()
    batch = with_neighbors(molecules(), model)
    embeddings = model.compute_embeddings(batch)
    assert embeddings["node_embeddings"].shape[1:] == model.embedding_shapes["node_embeddings"]
    assert embeddings["graph_embeddings"].shape == (3, *model.embedding_shapes["graph_embeddings"])
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    batch.positions = batch.positions @ rotation
    torch.testing.assert_close(model.compute_embeddings(batch), embeddings)


# ---------------------------------------------------------------------- training
def labelled(energy_of: dict[int, float], structures: list[AtomicData]) -> list[AtomicData]:
    for data in structures:
        total = sum(energy_of[z] for z in data.atomic_numbers.tolist())
        data.energy = torch.tensor([[total]], dtype=torch.float64)
    return structures


def test_reference_energies_are_recovered_exactly():
    energies = {1: -13.6, 6: -1030.5, 8: -2041.25}
    model = make_model()
    fitted = model.fit_reference_energies(labelled(energies, molecules()))
    assert fitted == pytest.approx(energies, abs=1e-8)
    batch = Batch.from_data_list(labelled(energies, molecules()))
    assert model.fit_reference_energies([batch]) == pytest.approx(energies, abs=1e-8)


def test_reference_energies_of_a_single_molecule_add_up():
    ethanol = labelled({1: -13.6, 6: -1030.5, 8: -2041.25}, molecules())[:1]
    model = make_model()
    fitted = model.fit_reference_energies(ethanol * 3)
    total = sum(fitted[z] for z in ethanol[0].atomic_numbers.tolist())
    assert total == pytest.approx(ethanol[0].energy.item(), rel=1e-12)
    assert model.scale == 1.0


def test_scale_is_that_of_the_forces_and_missing_labels_are_passed_over():
    structures = labelled({1: -1.0, 6: -2.0, 8: -3.0}, molecules())
    for data in structures:
        data.forces = torch.full_like(data.positions, 2.0)
    structures[1].energy[:] = math.nan
    model = make_model()
    model.fit_reference_energies(structures)
    assert model.scale == pytest.approx(2.0)
    with pytest.raises(ValueError, match="no energies"):
        model.fit_reference_energies([structures[1]])


def test_an_element_that_was_not_in_the_data_is_refused_by_name():
    model = make_model()
    model.fit_reference_energies(labelled({1: -1.0, 6: -2.0, 8: -3.0}, molecules()))
    with pytest.raises(ValueError, match=r"Cu.*graph 0"):
        model(with_neighbors(crystals(), model))


def test_forces_inside_bfloat16_autocast_are_float32_and_close():
    model = make_model(torch.float32, hidden_dim=64)
    batch = with_neighbors(molecules(torch.float32), model)
    expected = model(batch)["forces"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        forces = model(batch)["forces"]
    assert forces.dtype == torch.float32
    assert not torch.equal(forces, expected)
    assert (forces - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("x", [[0.0], [-1.5, 0.0, 1.5]], ids=["lone atom", "atom between two"])
def test_forces_and_gradients_in_half_precision_are_finite_where_vector_features_vanish(dtype, x):
    model = make_model(torch.float32).train()
    data = AtomicData(positions=torch.tensor([[each, 0.0, 0.0] for each in x]), atomic_numbers=[18] * len(x))
    with torch.autocast("cpu", dtype=dtype):
        outputs = model(with_neighbors(Batch.from_data_list([data]), model))
        loss = (outputs["energy"] - 1.0).square().sum() + outputs["forces"].square().sum()
    loss.backward()
    assert outputs["forces"].isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_every_parameter_learns_from_energy_and_forces():
    model = make_model().train()
    outputs = model(with_neighbors(molecules(), model))
    (outputs["energy"].square().sum() + outputs["forces"].square().sum()).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_learns_energies_forces_and_stresses_of_an_alloy():
    structures = []
    for seed in range(20):
        atoms = bulk("Cu", cubic=True)
        atoms.symbols[seed % 4] = "Au"
        atoms.set_cell(atoms.cell * (0.97 + 0.003 * seed), scale_atoms=True)
        structures.append(displaced(atoms, seed, torch.float32))
    batch = Batch.from_data_list(structures)
    for name, label in ASECalculatorWrapper(EMT)(batch).items():
        batch.add_key(name, label)
    model = make_model(torch.float32, hidden_dim=32, num_layers=2, cutoff=4.0)
    model.fit_reference_energies([batch])
    strategy = TrainingStrategy(
        model,
        OptimizerConfig(torch.optim.AdamW, {"lr": 5e-3}),
        EnergyMSELoss(per_atom=True) + ForceMSELoss() + 100.0 * StressMSELoss(),
        num_epochs=12,
        validation_config=ValidationConfig(validation_data=[batch[2::5]], every_n_epochs=12),
    )
    before = strategy.validate()
    strategy.run([batch[k::5] for k in (0, 1, 3, 4)])
    after = strategy.last_validation
    for name in ("forces_mae", "stress_mae"):
        assert after[name] < before[name] / 3, name


# ---------------------------------------------------------------------- files and options
def test_a_written_model_reads_back_to_the_bit(tmp_path):
    model = make_model(torch.float32, num_layers=2, cutoff=4.0)
    model.fit_reference_energies(labelled({1: -13.6, 6: -1030.5, 8: -2041.25}, molecules()))
    model.export_model(tmp_path / "painn.safetensors")
    read = PaiNN.from_checkpoint(tmp_path / "painn.safetensors")
    assert isinstance(load_model(tmp_path / "painn.safetensors"), PaiNN)
    batch = with_neighbors(molecules(torch.float32), model)
    assert read.architecture == model.architecture
    assert not read.training
    for name, value in model(batch).items():
        assert torch.equal(read(batch)[name], value)


def test_a_file_of_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="no PaiNN model"):
        PaiNN.from_checkpoint(tmp_path / "other.safetensors")


@pytest.mark.parametrize("size", [0, 5, 200])
def test_a_damaged_file_is_named(tmp_path, size):
    path = tmp_path / "painn.safetensors"
    make_model(torch.float32).export_model(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"painn\.safetensors is damaged"):
        PaiNN.from_checkpoint(path)


@pytest.mark.parametrize("option", ["hidden_dim", "num_layers", "num_radial", "cutoff"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_must_be_positive(option, value):
    with pytest.raises(ValueError, match=option):
        PaiNN(**{option: value})


@pytest.mark.parametrize("cutoff", [math.inf, math.nan])
def test_the_cutoff_must_be_finite(cutoff):
    with pytest.raises(ValueError, match="cutoff"):
        PaiNN(cutoff=cutoff)
