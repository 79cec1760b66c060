import warnings

import numpy as np
import pytest
import torch
from ase import Atoms

from nvalchemi.models import CHGNetWrapper, check_model, load_model
from nvalchemi.models.chgnet import angle_pairs, pair_directed_edges
from nvalchemi.neighbors import compute_neighbors

pytest.importorskip("chgnet")


@pytest.fixture(scope="module")
def model():
    model = CHGNetWrapper()
    model.set_config("active_outputs", {"energy", "forces", "stress", "magmoms"})
    return model


@pytest.fixture(scope="module")
def published():
    """CHGNet's own ASE calculator."""
    from chgnet.model.dynamics import CHGNetCalculator

    return CHGNetCalculator(use_device="cpu")


def _assert_equal_to(published, structures, outputs):
    energy, forces, stress, magmoms = [], [], [], []
    for atoms in structures:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Converting a tensor with requires_grad=True", category=UserWarning
            )
            published.calculate(atoms)
        energy.append(published.results["energy"] / len(atoms))
        forces.append(published.results["forces"])
        stress.append(published.results["stress"])
        magmoms.append(published.results["magmoms"])
    sizes = np.array([len(atoms) for atoms in structures])
    np.testing.assert_allclose(outputs["energy"][:, 0].numpy() / sizes, energy, rtol=0, atol=1e-5)
    np.testing.assert_allclose(outputs["forces"].numpy(), np.concatenate(forces), rtol=0, atol=1e-4)
    np.testing.assert_allclose(outputs["stress"].numpy(), stress, rtol=0, atol=1e-5)
    np.testing.assert_allclose(outputs["magmoms"].numpy(), np.concatenate(magmoms), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_batch_of_33_crystals_equals_the_published_calculator(model, published, make_batch, all_crystals):
    outputs = model(make_batch(all_crystals, model))
    assert outputs["forces"].abs().max() > 0.5
    assert outputs["magmoms"].max() > 1.0
    _assert_equal_to(published, all_crystals, outputs)


def test_few_crystals_equal_the_published_calculator(model, published, make_batch, crystals):
    _assert_equal_to(published, crystals, model(make_batch(crystals, model)))


@pytest.mark.parametrize("kind", ["crystals", "molecules"])
def test_conformance_in_float64(make_batch, kind, request):
    check_model(CHGNetWrapper(dtype=torch.float64), make_batch(request.getfixturevalue(kind)))


def test_conformance_in_float32(make_batch, crystals):
    check_model(CHGNetWrapper(), make_batch(crystals))


def test_magnetic_moments_only_when_asked_for(make_batch, crystals):
    model = CHGNetWrapper()
    assert set(model(make_batch(crystals, model))) == {"energy", "forces", "stress"}
    model.set_config("active_outputs", {"magmoms"})
    batch = make_batch(crystals, model)
    assert model(batch)["magmoms"].shape == (batch.num_nodes,)


def test_structure_without_angles_is_not_changed_by_one_with_angles(make_batch, crystals):
    """CHGNet skips its bond update for a batch without any angle; with one it must add nothing to the others."""
    model = CHGNetWrapper(dtype=torch.float64)
    model.set_config("active_outputs", {"energy"})
    sparse = Atoms("Ar2", [[0, 0, 0], [4.0, 0, 0]])
    alone = model(make_batch([sparse], model))["energy"]
    together = model(make_batch([crystals[0], sparse], model))["energy"]
    assert together[1].item() == pytest.approx(alone.item(), rel=1e-12)


def test_isolated_atom_and_dimer_without_edges(make_batch):
    model = CHGNetWrapper()
    structures = [Atoms("Ar"), Atoms("Ar2", [[0, 0, 0], [30, 0, 0]])]
    outputs = model(make_batch(structures, model))
    assert torch.equal(outputs["forces"], torch.zeros(3, 3, dtype=torch.float64))
    assert outputs["energy"][1].item() == pytest.approx(2 * outputs["energy"][0].item(), rel=1e-6)


def test_unknown_element_names_atom_and_graph(make_batch):
    model = CHGNetWrapper()
    with pytest.raises(
        ValueError, match=r"CHGNet does not know the element Am .*graph 1; it knows 94 elements"
    ):
        model(make_batch([Atoms("Ar"), Atoms("Am")], model))


def test_half_list_is_refused(make_batch, crystals):
    model = CHGNetWrapper()
    batch = make_batch(crystals)
    compute_neighbors(batch, model.model_config.neighbor_config.cutoff, half_list=True)
    with pytest.raises(ValueError, match="full neighbour list"):
        model(batch)


def test_bonds_and_angles_equal_those_of_the_package(make_batch, crystals):
    """Sets of bonds and of angles, by (atoms, bond lengths), from CHGNet's own converter and from ours."""
    from chgnet.graph import CrystalGraphConverter
    from pymatgen.io.ase import AseAtomsAdaptor

    for atoms in crystals:
        graph = CrystalGraphConverter(atom_graph_cutoff=6, bond_graph_cutoff=4)(
            AseAtomsAdaptor.get_structure(atoms)
        )
        batch = make_batch([atoms])
        compute_neighbors(batch, 6.0)
        first, second = batch.neighbor_list.unbind(1)
        shifts = batch.neighbor_list_shifts.to(batch.dtype) @ batch.cell[0]
        lengths = (batch.positions[second] + shifts - batch.positions[first]).norm(dim=1)
        undirected, representative = pair_directed_edges(
            batch.neighbor_list, batch.neighbor_list_shifts, len(atoms)
        )
        one, other = angle_pairs(first, lengths < 4, len(atoms))
        assert len(representative) == len(graph.undirected2directed)
        assert torch.equal(undirected[representative], torch.arange(len(representative)))
        ours = sorted(
            (int(first[a]), round(float(lengths[a]), 3), round(float(lengths[b]), 3))
            for a, b in zip(one, other, strict=True)
        )
        center, neighbor = graph.atom_graph.long().unbind(1)
        position = (graph.atom_frac_coord @ graph.lattice).detach()
        theirs_length = (
            position[neighbor] + graph.neighbor_image @ graph.lattice.detach() - position[center]
        ).norm(dim=1)
        theirs = sorted(
            (int(row[0]), round(float(theirs_length[row[2]]), 3), round(float(theirs_length[row[4]]), 3))
            for row in graph.bond_graph.long()
        )
        assert len(ours) > 50
        assert [row[0] for row in ours] == [row[0] for row in theirs]
        np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_exported_checkpoint_reads_back(make_batch, crystals, tmp_path):
    model = CHGNetWrapper()
    model.export_model(tmp_path / "copy.pth")
    batch = make_batch(crystals, model)
    torch.testing.assert_close(load_model(tmp_path / "copy.pth")(batch), model(batch), rtol=0, atol=0)


def test_unknown_weights_are_one_line():
    with pytest.raises(
        ValueError, match=r"'0.2.0' is neither a file nor CHGNet weights; weights are 0.3.0, r2scan"
    ):
        CHGNetWrapper("0.2.0")


def test_loading_prints_nothing(capsys):
    CHGNetWrapper()
    assert capsys.readouterr().out == ""


def test_training_gives_gradients_of_forces(make_batch, crystals):
    model = CHGNetWrapper().train()
    loss = model(make_batch(crystals, model))["forces"].square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) > 50
    assert all(gradient.isfinite().all() for gradient in gradients)
