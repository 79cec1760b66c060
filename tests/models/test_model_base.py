import contextlib
import subprocess
import sys

import pydantic
import pytest
import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.models.base import (
    BaseModelMixin,
    ModelConfig,
    NeighborConfig,
    NeighborListFormat,
    evaluation_mode,
)
from nvalchemi.models.demo import DemoModel, DemoModelWrapper
from nvalchemi.models.derivatives import edges_within_cutoff, graph_periodicity, sum_per_graph
from nvalchemi.models.lj import LennardJonesModelWrapper
from nvalchemi.neighbors import compute_neighbors

ALL = frozenset({"energy", "forces", "stress"})


class Spring(nn.Module, BaseModelMixin):
    """E = k/2 Σ_pairs |r|² over a full list: forces and stress known in closed form, also with images."""

    def __init__(self, cutoff=3.0, **config):
        super().__init__()
        self.stiffness = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.model_config = ModelConfig(
            autograd_outputs={"forces", "stress"},
            **{"supports_pbc": True, "neighbor_config": NeighborConfig(cutoff=cutoff), **config},
        )

    def forward(self, data):
        return self.differentiate(self.energies, data)

    def energies(self, inputs):
        edges = edges_within_cutoff(inputs, self.model_config.neighbor_config.cutoff)
        per_edge = 0.25 * self.stiffness * edges.vectors.square().sum(1)
        per_atom = torch.zeros_like(inputs["positions"][:, 0]).index_add(0, edges.pairs[:, 0], per_edge)
        return {"energy": sum_per_graph(per_atom, inputs["batch_idx"], inputs["num_graphs"])}


class ChargeSquared(nn.Module, BaseModelMixin):
    def __init__(self):
        super().__init__()
        self.model_config = ModelConfig(autograd_outputs={"forces"}, required_inputs={"charge"})

    def forward(self, data):
        return self.differentiate(lambda inputs: {"energy": inputs["charge"].to(torch.float64) ** 2}, data)


def _atom(**fields):
    return AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([18]), **fields)


# ---------------------------------------------------------------------- configuration
def test_config_defaults_are_those_of_an_energy_model_without_neighbours():
    config = ModelConfig()
    assert config.outputs == {"energy"}
    assert (
        config.autograd_outputs
        == config.required_inputs
        == config.optional_inputs
        == config.gradient_keys
        == set()
    )
    assert config.autograd_inputs == {"positions"}
    assert config.active_outputs is None
    assert {config.supports_pbc, config.needs_pbc, config.needs_neighborlist} == {False}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"active_outputs": {"stress"}}, "stress.*not among the outputs"),
        ({"required_inputs": {"charge"}, "optional_inputs": {"charge"}}, "both required and optional"),
        ({"needs_pbc": True}, "contradicts"),
        ({"autograd_outputs": {"forces"}, "autograd_inputs": set()}, "need autograd_inputs"),
        ({"output": {"energy"}}, "output"),
    ],
)
def test_contradicting_config_is_refused(fields, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        ModelConfig(**fields)


def test_refused_change_leaves_the_config_as_it_was():
    model = DemoModelWrapper()
    model.set_config("active_outputs", {"energy"})
    with pytest.raises(ValueError, match="dipole"):
        model.set_config("active_outputs", {"dipole"})
    with pytest.raises(pydantic.ValidationError, match="dipole"):
        model.model_config.active_outputs = {"dipole"}
    assert model.model_config.active_outputs == {"energy"}
    with pytest.raises(ValueError, match="'cutoff' is not a field"):
        model.set_config("cutoff", 3.0)


def test_assigned_active_outputs_are_used(make_batch, crystals):
    model = DemoModelWrapper()
    model.model_config.active_outputs = {"energy", "stress"}
    assert set(model(make_batch(crystals))) == {"energy", "stress"}


# ---------------------------------------------------------------------- which outputs
def test_stress_by_default_only_when_every_graph_has_a_volume(make_batch, crystals, molecules):
    model = DemoModelWrapper()
    assert set(model(make_batch(crystals))) == ALL
    assert set(model(make_batch(molecules))) == {"energy", "forces"}
    assert set(model(make_batch(crystals + molecules))) == {"energy", "forces"}
    slab = crystals[0].copy()
    slab.pbc = (True, True, False)
    assert set(model(make_batch([slab]))) == {"energy", "forces"}


def test_stress_of_a_molecule_is_refused_by_name(make_batch, crystals, molecules):
    model = DemoModelWrapper()
    model.set_config("active_outputs", ALL)
    batch = make_batch(crystals + molecules)
    batch.system_id = torch.arange(10, 16).unsqueeze(1)
    with pytest.raises(ValueError, match=r"stress of graph 3 \(system_id 13\) is undefined"):
        model(batch)


def test_periodicity_is_noticed_when_pbc_or_cell_change(make_batch, crystals):
    batch = make_batch(crystals)
    assert graph_periodicity(batch) == (True, True)
    batch.pbc[1, 2] = False
    assert graph_periodicity(batch) == (False, True)
    batch.pbc[1, 2] = True
    batch.cell = torch.zeros_like(batch.cell)
    assert graph_periodicity(batch) == (False, True)
    batch.remove_key("cell")
    batch.pbc.fill_(False)
    assert graph_periodicity(batch) == (False, False)


def test_periodicity_is_not_computed_twice(make_batch, crystals, monkeypatch):
    batch = make_batch(crystals)
    graph_periodicity(batch)
    monkeypatch.setattr(torch.linalg, "det", None)
    assert graph_periodicity(batch).all_full


# ---------------------------------------------------------------------- inputs
def test_missing_neighbor_list_says_what_to_call(make_batch, crystals):
    with pytest.raises(
        ValueError, match=r"compute_neighbors\(batch, config=model.model_config.neighbor_config\)"
    ):
        Spring()(make_batch(crystals))


def test_missing_matrix_is_not_replaced_by_a_list(make_batch, crystals):
    matrix = NeighborConfig(cutoff=3.0, format=NeighborListFormat.MATRIX)
    with pytest.raises(ValueError, match="'neighbor_matrix'"):
        Spring(neighbor_config=matrix)(make_batch(crystals, Spring()))


def test_required_input_survives_and_is_named_when_missing():
    batch = Batch.from_data_list([_atom(charge=torch.tensor([[float(q)]])) for q in (0, 1, -1)])
    outputs = ChargeSquared()(batch)
    assert outputs["energy"].squeeze(1).tolist() == [0.0, 1.0, 1.0]
    assert torch.equal(outputs["forces"], torch.zeros(3, 3))
    with pytest.raises(ValueError, match="ChargeSquared needs the field 'charge'"):
        ChargeSquared()(Batch.from_data_list([_atom()]))


def test_periodicity_that_a_model_cannot_treat_is_refused(make_batch, crystals, molecules):
    batch = make_batch([crystals[0], molecules[0]], Spring())
    with pytest.raises(ValueError, match="cannot treat periodic structures; graph 0 is one"):
        Spring(supports_pbc=False)(batch)
    with pytest.raises(
        ValueError, match="needs cells that are periodic in three directions; graph 1 has none"
    ):
        Spring(needs_pbc=True)(batch)
    batch = make_batch(molecules, Spring())
    with pytest.raises(ValueError, match="graph 0 has none"):
        Spring(needs_pbc=True)(batch)


def test_output_that_was_asked_for_and_not_given_is_an_error(make_batch, molecules):
    class Forgetful(DemoModelWrapper):
        def forward(self, data):
            return self.adapt_output({"energy": torch.zeros(data.num_graphs)}, data)

    with pytest.raises(ValueError, match="asked for 'forces' and gave energy"):
        Forgetful()(make_batch(molecules))


# ---------------------------------------------------------------------- derivatives
@pytest.mark.parametrize("cutoff", [3.0, 7.0])
def test_forces_and_stress_of_springs_are_the_analytic_ones(make_batch, crystals, cutoff):
    """σ = (k / 2V) Σ r ⊗ r over all directed pairs, images of the atom itself (cutoff 7 Å) included."""
    model = Spring(cutoff).eval()
    batch = make_batch(crystals, model)
    outputs = model(batch)
    first, second = batch.neighbor_list.unbind(1)
    shifts = batch.neighbor_list_shifts.to(batch.dtype).unsqueeze(1) @ batch.cell[batch.batch_idx[first]]
    r = batch.positions[second] + shifts.squeeze(1) - batch.positions[first]
    forces = torch.zeros_like(batch.positions).index_add(0, first, 2.0 * r)
    virial = torch.zeros(3, 3, 3, dtype=r.dtype).index_add(
        0, batch.batch_idx[first], 0.5 * 2.0 * r[:, :, None] * r[:, None]
    )
    stress = virial / torch.linalg.det(batch.cell).abs()[:, None, None]
    torch.testing.assert_close(outputs["forces"], forces, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs["stress"], stress, rtol=1e-12, atol=1e-12)


def test_pairs_in_the_skin_do_not_count(make_batch, crystals):
    model, generous = Spring(3.0).eval(), Spring(4.0, neighbor_config=NeighborConfig(cutoff=4.0, skin=1.0))
    wide = model(make_batch(crystals, generous))
    for name, value in model(make_batch(crystals, model)).items():
        torch.testing.assert_close(wide[name], value, rtol=1e-12, atol=1e-12)


def test_transposed_cell_view_gives_the_same_results(make_batch, crystals):
    model = Spring(5.0).eval()
    batch = make_batch(crystals, model)
    expected = model(batch)
    batch.cell = batch.cell.transpose(1, 2).contiguous().transpose(1, 2)
    assert not batch.cell.is_contiguous()
    for name, value in model(batch).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-14, atol=1e-14)


def test_left_handed_cell_has_the_same_stress(make_batch, crystals):
    model = Spring(5.0).eval()
    expected = model(make_batch(crystals[:1], model))
    mirrored = crystals[0].copy()
    mirrored.set_cell(mirrored.cell.array[[1, 0, 2]])
    torch.testing.assert_close(
        model(make_batch([mirrored], model))["stress"], expected["stress"], rtol=1e-12, atol=1e-12
    )


def test_isolated_atom_and_dimer_without_any_edge(make_batch):
    model = Spring(3.0).eval()
    far = AtomicData(positions=torch.tensor([[0.0, 0, 0], [9, 0, 0]]), atomic_numbers=torch.tensor([18, 18]))
    batch = Batch.from_data_list([_atom(), far])
    compute_neighbors(batch, config=model.model_config.neighbor_config)
    assert batch.num_edges == 0
    outputs = model(batch)
    assert outputs["energy"].tolist() == [[0.0], [0.0]]
    assert torch.equal(outputs["forces"], torch.zeros(3, 3))


def test_energy_of_many_atoms_is_summed_in_float64():
    """100,000 atoms of −1.1 eV: a float32 running sum is off by more than 1e-2 eV."""
    values = torch.full((100_000,), -1.1)
    total = sum_per_graph(values, torch.zeros(100_000, dtype=torch.int64), 1)
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx(100_000 * values[0].double().item(), abs=1e-6)


def test_float32_model_on_a_float64_batch_answers_in_float64(make_batch, crystals):
    outputs = DemoModelWrapper()(make_batch(crystals))
    assert {tensor.dtype for tensor in outputs.values()} == {torch.float64}
    assert {
        tensor.dtype
        for tensor in DemoModelWrapper().double()(make_batch(crystals, dtype=torch.float32)).values()
    } == {torch.float32}


# ---------------------------------------------------------------------- graphs and modes
def test_training_outputs_differentiate_by_the_parameters(make_batch, crystals):
    model = Spring().train()
    batch = make_batch(crystals, model)
    outputs = model(batch)
    for value in outputs.values():
        (gradient,) = torch.autograd.grad(value.sum(), [model.stiffness], retain_graph=True)
        # All outputs are linear in the stiffness.
        torch.testing.assert_close(gradient, value.sum().detach() / 2.0, atol=1e-9, rtol=1e-9)
    with torch.no_grad():
        assert not any(value.requires_grad for value in model(batch).values())


def test_evaluation_leaves_no_graph_and_no_trace(make_batch, crystals):
    model = Spring().eval()
    batch = make_batch(crystals, model)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    outputs = model(batch)
    assert not any(value.requires_grad for value in outputs.values())
    assert batch.positions.grad is None
    assert not batch.positions.requires_grad
    assert batch.keys() == tuple(before)
    assert all(torch.equal(batch[name], tensor) for name, tensor in before.items())
    assert model.stiffness.grad is None


def test_outputs_in_inference_mode(make_batch, crystals):
    model = Spring().eval()
    expected = model(make_batch(crystals, model))
    with torch.inference_mode():
        outputs = model(make_batch(crystals, model))
    for name, value in expected.items():
        assert torch.equal(outputs[name], value)


def test_hessian_through_gradient_keys(make_batch, molecules):
    """Every pair of water is within reach, so the Hessian is k (3 δ_ij − 1) for each Cartesian component."""
    model = Spring(cutoff=10.0).eval()
    model.set_config("gradient_keys", {"positions"})
    batch = make_batch(molecules[:1], model)
    batch.positions.requires_grad_()
    forces = model(batch)["forces"]
    rows = [
        torch.autograd.grad(-f, batch.positions, retain_graph=True)[0].flatten() for f in forces.flatten()
    ]
    expected = 2.0 * torch.kron(3 * torch.eye(3) - torch.ones(3, 3), torch.eye(3)).double()
    torch.testing.assert_close(torch.stack(rows), expected, atol=1e-10, rtol=1e-10)


def test_evaluation_mode_restores_every_module_after_an_error():
    model = nn.Sequential(nn.Linear(1, 1).eval(), nn.Dropout())
    with contextlib.suppress(KeyError), evaluation_mode(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == [True, False, True]


# ---------------------------------------------------------------------- companions
def test_neighbor_hooks_are_those_the_config_needs():
    assert DemoModelWrapper().make_neighbor_hooks() == []
    (hook,) = Spring(cutoff=4.0).make_neighbor_hooks()
    assert hook.config.cutoff == 4.0


def test_model_without_embeddings_says_so(make_batch, crystals):
    model = Spring()
    assert model.embedding_shapes == {}
    with pytest.raises(NotImplementedError, match="Spring gives no embeddings"):
        model.compute_embeddings(make_batch(crystals))


def test_demo_embeddings_have_the_announced_shapes(make_batch, crystals):
    model = DemoModelWrapper(DemoModel(hidden_dim=5)).eval()
    batch = make_batch(crystals)
    embeddings = model.compute_embeddings(batch)
    assert embeddings["node_embeddings"].shape == (
        batch.num_nodes,
        *model.embedding_shapes["node_embeddings"],
    )
    assert embeddings["graph_embeddings"].shape == (3, 5)
    assert not embeddings["node_embeddings"].requires_grad


def test_names_are_imported_when_used_and_no_package_before():
    code = (
        "import sys, nvalchemi.models as m; m.LennardJonesModelWrapper; m.ModelConfig; "
        "assert not {'sevenn', 'chgnet', 'ase', 'numba', 'e3nn'} & set(sys.modules), set(sys.modules); "
        "assert 'SevenNetWrapper' in dir(m)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_in_the_package():
    import nvalchemi.models

    with pytest.raises(AttributeError, match="no attribute 'Potential'"):
        _ = nvalchemi.models.Potential


def test_published_model_without_its_package_names_the_extra(monkeypatch):
    from nvalchemi.models import CHGNetWrapper, SevenNetWrapper

    for package, wrapper in (("sevenn", SevenNetWrapper), ("chgnet", CHGNetWrapper)):
        monkeypatch.setitem(sys.modules, package, None)
        extra = {"sevenn": "sevennet"}.get(package, package)
        with pytest.raises(ImportError, match=rf"pip install 'nvalchemi\[{extra}\]'"):
            wrapper()


def test_lennard_jones_is_a_model():
    assert isinstance(LennardJonesModelWrapper(epsilon=0.01, sigma=3.4, cutoff=8.0), BaseModelMixin)
