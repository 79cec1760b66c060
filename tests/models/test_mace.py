"""MACE with random weights: its published weights cannot be shipped, and the wrapper does not depend on them.

Needs the extra [mace], whose e3nn 0.4.4 cannot share an environment with [sevennet]; skipped where it is missing.
"""

import warnings

import numpy as np
import pytest
import torch

from nvalchemi.models import MACEWrapper, check_model, load_model

pytest.importorskip("mace", reason="extra [mace] is not installed (it cannot be installed beside [sevennet])")

# What mace-torch, e3nn 0.4 and torch.jit say while a model is built or a calculator set up is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

ELEMENTS = (1, 6, 8)


def _model(heads=("Default",), dtype=torch.float64):
    from e3nn import o3
    from mace import modules

    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    several = len(heads) > 1
    interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    energies = np.linspace(-1.0, -4.0, len(heads) * len(ELEMENTS)).reshape(len(heads), len(ELEMENTS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = modules.ScaleShiftMACE(
            atomic_inter_scale=[1.0] * len(heads) if several else 1.0,
            atomic_inter_shift=[0.1] * len(heads) if several else 0.1,
            r_max=4.0,
            num_bessel=6,
            num_polynomial_cutoff=5,
            max_ell=2,
            interaction_cls=interaction,
            interaction_cls_first=interaction,
            num_interactions=2,
            num_elements=len(ELEMENTS),
            hidden_irreps=o3.Irreps("8x0e+8x1o"),
            MLP_irreps=o3.Irreps("4x0e"),
            atomic_energies=energies,
            avg_num_neighbors=10.0,
            atomic_numbers=list(ELEMENTS),
            correlation=2,
            gate=torch.nn.functional.silu,
            pair_repulsion=True,
            heads=list(heads),
        )
    torch.set_default_dtype(previous)
    return model


@pytest.fixture
def ice(molecules):
    """Molecules in cells that are triclinic and smaller than twice the cutoff."""
    for index, atoms in enumerate(molecules):
        atoms.center(vacuum=1.2)
        atoms.set_cell(atoms.cell.array + np.diag([0.4, 0.3], k=1) * (index + 1))
        atoms.pbc = True
    return molecules


def test_energies_forces_and_stress_equal_those_of_maces_own_calculator(ice, make_batch):
    from mace.calculators import MACECalculator

    network = _model()
    model = MACEWrapper(network)
    outputs = model(make_batch(ice, model))
    published = MACECalculator(models=[_model()], device="cpu", default_dtype="float64")
    start = 0
    for graph, atoms in enumerate(ice):
        atoms.calc = published
        end = start + len(atoms)
        # Both are float64; sums run in another order.
        np.testing.assert_allclose(outputs["energy"][graph, 0], atoms.get_potential_energy(), rtol=1e-12)
        np.testing.assert_allclose(outputs["forces"][start:end], atoms.get_forces(), rtol=0, atol=1e-10)
        np.testing.assert_allclose(
            outputs["stress"][graph], atoms.get_stress(voigt=False), rtol=0, atol=1e-11
        )
        start = end
    assert outputs["forces"].abs().max() > 0.1


@pytest.mark.slow
def test_mace_keeps_the_promises_of_the_model_interface(ice, make_batch):
    check_model(MACEWrapper(_model()), make_batch(ice[:2]))


def test_molecules_without_cell_have_no_stress(molecules, make_batch):
    model = MACEWrapper(_model())
    assert sorted(model(make_batch(molecules, model))) == ["energy", "forces"]


def test_file_loads_by_path_and_gives_the_same(tmp_path, molecules, make_batch):
    model = MACEWrapper(_model())
    model.export_model(tmp_path / "small.model")
    loaded = load_model(tmp_path / "small.model")
    assert isinstance(loaded, MACEWrapper)
    batch = make_batch(molecules, model)
    # TorchScript fuses after some calls, which changes the last bits.
    torch.testing.assert_close(loaded(batch), model(batch), rtol=1e-12, atol=1e-13)


def test_float32_model_on_a_float64_batch(molecules, make_batch):
    model = MACEWrapper(_model(), dtype=torch.float32)
    batch = make_batch(molecules, model)
    assert model(batch)["forces"].dtype == torch.float64
    # The sums behind a force are some hundred terms of up to 10 eV/Å, each good to 1e-6 of itself.
    torch.testing.assert_close(model(batch), MACEWrapper(_model())(batch), rtol=1e-5, atol=1e-4)


def test_autocast_changes_nothing(molecules, make_batch):
    model = MACEWrapper(_model(dtype=torch.float32))
    batch = make_batch(molecules, model)
    expected = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(batch), expected, rtol=1e-5, atol=1e-5)


def test_embeddings_have_the_announced_width(molecules, make_batch):
    model = MACEWrapper(_model())
    batch = make_batch(molecules, model)
    embeddings = model.compute_embeddings(batch)
    width = model.embedding_shapes["node_embeddings"]
    assert embeddings["node_embeddings"].shape == (batch.num_nodes, *width)
    assert embeddings["graph_embeddings"].shape == (batch.num_graphs, *width)


def test_head_of_a_multi_head_model_must_be_named(molecules, make_batch):
    network = _model(heads=("pbe", "r2scan"))
    with pytest.raises(ValueError, match="needs head=, one of pbe, r2scan"):
        MACEWrapper(network)
    with pytest.raises(ValueError, match="unknown head 'scan'"):
        MACEWrapper(network, head="scan")
    first, second = MACEWrapper(network, head="pbe"), MACEWrapper(network, head="r2scan")
    batch = make_batch(molecules, first)
    assert not torch.allclose(first(batch)["energy"], second(batch)["energy"])


def test_unknown_element_and_missing_file_are_named(crystals, make_batch):
    model = MACEWrapper(_model())
    with pytest.raises(ValueError, match="Si"):
        model(make_batch(crystals, model))
    with pytest.raises(ValueError, match=r"no MACE model file 'none\.model'"):
        MACEWrapper("none.model")
    with pytest.raises(ValueError, match="got Linear"):
        MACEWrapper(torch.nn.Linear(1, 1))
