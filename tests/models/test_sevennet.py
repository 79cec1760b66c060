import copy
import warnings

import numpy as np
import pytest
import torch
from ase import Atoms

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models import SevenNetWrapper, check_model, load_model
from nvalchemi.neighbors import compute_neighbors

pytest.importorskip("sevenn")


@pytest.fixture(scope="module")
def model():
    return SevenNetWrapper("7net-0")


@pytest.fixture(scope="module")
def double_model():
    return SevenNetWrapper("7net-0", dtype=torch.float64)


@pytest.fixture(scope="module")
def published():
    """SevenNet's own ASE calculator."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="No tensor product accelerator", category=UserWarning)
        from sevenn.calculator import SevenNetCalculator

        return SevenNetCalculator("7net-0", device="cpu")


def _assert_equal_to(published, structures, outputs):
    energy, forces, stress = [], [], []
    for atoms in structures:
        atoms.calc = published
        energy.append(atoms.get_potential_energy() / len(atoms))
        forces.append(atoms.get_forces())
        stress.append(atoms.get_stress(voigt=False))
        atoms.calc = None
    sizes = np.array([len(atoms) for atoms in structures])
    np.testing.assert_allclose(outputs["energy"][:, 0].numpy() / sizes, energy, rtol=0, atol=1e-5)
    np.testing.assert_allclose(outputs["forces"].numpy(), np.concatenate(forces), rtol=0, atol=1e-4)
    np.testing.assert_allclose(outputs["stress"].numpy(), stress, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_batch_of_33_crystals_equals_the_published_calculator(model, published, make_batch, all_crystals):
    outputs = model(make_batch(all_crystals, model))
    assert outputs["forces"].abs().max() > 0.5
    assert outputs["stress"].abs().amax((1, 2)).min() > 1e-4
    _assert_equal_to(published, all_crystals, outputs)


def test_few_crystals_equal_the_published_calculator(model, published, make_batch, crystals):
    _assert_equal_to(published, crystals, model(make_batch(crystals, model)))


@pytest.mark.parametrize("kind", ["crystals", "molecules"])
def test_conformance_in_float64(double_model, make_batch, kind, request):
    check_model(double_model, make_batch(request.getfixturevalue(kind)))


def test_conformance_in_float32(model, make_batch, crystals):
    check_model(model, make_batch(crystals))


def test_single_precision_batch_equals_singles(model, make_batch, crystals):
    outputs = model(make_batch(crystals, model))
    for graph, atoms in enumerate(crystals):
        single = model(make_batch([atoms], model))
        assert outputs["energy"][graph].item() == pytest.approx(single["energy"].item(), rel=1e-6)
        torch.testing.assert_close(outputs["stress"][graph], single["stress"][0], rtol=0, atol=1e-6)


def test_far_from_the_origin_nothing_is_lost(model, make_batch, crystals):
    """Edge vectors are formed in float64: at 1e5 Å float32 positions would be off by 4e-3 Å."""
    expected = model(make_batch(crystals, model))
    for atoms in crystals:
        atoms.positions += 1e5
    outputs = model(make_batch(crystals, model))
    torch.testing.assert_close(outputs["forces"], expected["forces"], rtol=0, atol=2e-5)


def test_molecules_have_no_stress(model, make_batch, molecules):
    assert set(model(make_batch(molecules, model))) == {"energy", "forces"}


def test_isolated_atom_and_dimer_without_edges(model, make_batch):
    structures = [Atoms("Ar"), Atoms("Ar2", [[0, 0, 0], [30, 0, 0]])]
    outputs = model(make_batch(structures, model))
    assert torch.equal(outputs["forces"], torch.zeros(3, 3, dtype=torch.float64))
    assert outputs["energy"][1].item() == pytest.approx(2 * outputs["energy"][0].item(), rel=1e-6)


def test_graph_without_atoms(model, make_batch, molecules):
    empty = AtomicData(
        positions=torch.zeros(0, 3, dtype=torch.float64), atomic_numbers=torch.zeros(0, dtype=torch.int64)
    )
    water = AtomicData.from_atoms(molecules[0], dtype=torch.float64)
    batch = Batch.from_data_list([empty, water])
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    outputs = model(batch)
    assert outputs["energy"][0].item() == 0.0
    expected = model(make_batch(molecules[:1], model))["energy"].item()
    assert outputs["energy"][1].item() == pytest.approx(expected, rel=1e-6)


def test_unknown_element_names_atom_and_graph(model, make_batch):
    batch = make_batch([Atoms("Ar"), Atoms("Po")], model)
    batch.system_id = torch.tensor([[4], [7]])
    with pytest.raises(
        ValueError,
        match=r"7net-0 does not know the element Po .*graph 1 \(system_id 7\); it knows 89 elements",
    ):
        model(batch)
    batch.atomic_numbers[1] = 18
    assert model(batch)["energy"].shape == (2, 1)


def test_fine_tuning_step_lowers_a_force_loss(make_batch, crystals):
    model = SevenNetWrapper("7net-0").train()
    batch = make_batch(crystals[:1], model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batch)["forces"].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def test_multi_fidelity_model_wants_a_modal(make_batch, crystals):
    with pytest.raises(ValueError, match="needs modal=, one of R2SCAN, PBE"):
        SevenNetWrapper("7net-mf-0")
    with pytest.raises(ValueError, match="unknown modal 'LDA'"):
        SevenNetWrapper("7net-mf-0", modal="LDA")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="No tensor product accelerator", category=UserWarning)
        from sevenn.calculator import SevenNetCalculator

        published = SevenNetCalculator("7net-mf-0", modal="R2SCAN", device="cpu")
    model = SevenNetWrapper("7net-mf-0", modal="r2scan")
    _assert_equal_to(published, crystals, model(make_batch(crystals, model)))


def test_exported_checkpoint_reads_back_and_is_readable_by_sevenn(model, make_batch, crystals, tmp_path):
    batch = make_batch(crystals, model)
    for original in (model, copy.deepcopy(model)):  # averaged weights are those of a copy
        original.export_model(tmp_path / "copy.pth")
        torch.testing.assert_close(load_model(tmp_path / "copy.pth")(batch), model(batch), rtol=0, atol=0)


def test_unknown_name_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="'8net' is neither a file nor a SevenNet model; models are 7net-0"):
        SevenNetWrapper("8net")


def test_embeddings_are_invariant_and_per_atom(double_model, make_batch, crystals):
    batch = make_batch(crystals, double_model)
    embeddings = double_model.compute_embeddings(batch)
    assert double_model.embedding_shapes["node_embeddings"] == (128,)
    for atoms in crystals:
        atoms.rotate(40, (1, 2, 3), rotate_cell=True)
    rotated = double_model.compute_embeddings(make_batch(crystals, double_model))
    torch.testing.assert_close(
        rotated["node_embeddings"], embeddings["node_embeddings"], rtol=1e-9, atol=1e-9
    )


def test_compiled_convolutions_equal_the_published_layers(double_model, make_batch, crystals):
    """Where outputs are differentiated again, the layers of the package are used."""
    batch = make_batch(crystals, double_model)
    outputs = double_model(batch)
    double_model.set_config("gradient_keys", {"positions"})
    try:
        expected = double_model(batch)
    finally:
        double_model.set_config("gradient_keys", frozenset())
    assert expected["energy"].requires_grad
    for name in ("energy", "forces", "stress"):
        torch.testing.assert_close(outputs[name], expected[name].detach(), rtol=1e-10, atol=1e-11)


def test_energy_alone_equals_that_with_forces(model, make_batch, crystals):
    batch = make_batch(crystals, model)
    expected = model(batch)["energy"]
    model.set_config("active_outputs", {"energy"})
    try:
        assert torch.equal(model(batch)["energy"], expected)
    finally:
        model.set_config("active_outputs", None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_of_half_precision(dtype, make_batch, crystals, model):
    batch = make_batch(crystals, model)
    outputs, expected = SevenNetWrapper("7net-0", dtype=dtype)(batch), model(batch)
    assert outputs["forces"].dtype is torch.float64
    torch.testing.assert_close(outputs["energy"], expected["energy"], rtol=0.03, atol=0.0)
    torch.testing.assert_close(outputs["forces"], expected["forces"], rtol=0.0, atol=0.2)


@pytest.mark.parametrize("training", [False, True])
def test_autocast_leaves_the_precision_of_the_network(training, make_batch, crystals, model):
    batch = make_batch(crystals, model)
    expected, embeddings = model(batch), model.compute_embeddings(batch)
    model.train(training)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs, again = model(batch), model.compute_embeddings(batch)
    finally:
        model.eval()
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name].detach(), value, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        again["node_embeddings"].detach(), embeddings["node_embeddings"], rtol=0, atol=1e-4
    )
