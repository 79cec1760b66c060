"""What cannot be right is refused or said, before it becomes a wrong result."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.constraints import FixBondLength
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import FIRE, NPT, NVE, ConvergenceHook, FIREVariableCell, SizeAwareSampler
from nvalchemi.dynamics.parameters import GraphParameter
from nvalchemi.hooks import NeighborListHook
from nvalchemi.models.base import BaseModelMixin, ModelConfig, NeighborConfig
from nvalchemi.models.lj import LennardJonesModelWrapper


def argon_model():
    return LennardJonesModelWrapper(0.0104, 3.40, 8.5)


def crystal(**fields):
    data = AtomicData.from_atoms(bulk("Ar", "fcc", 5.3, cubic=True), dtype=torch.float64)
    for name, value in fields.items():
        data.add_key(name, value, "system")
    return data


def crystals(n=2):
    return Batch.from_data_list([crystal() for _ in range(n)])


@pytest.mark.parametrize(
    "config",
    [
        NeighborConfig(cutoff=4.0, format="matrix"),
        NeighborConfig(cutoff=4.0, skin=6.0, format="matrix"),
        NeighborConfig(cutoff=8.5, format="matrix", half_list=True),
        NeighborConfig(cutoff=8.5, format="coo"),
    ],
)
def test_neighbour_list_that_does_not_fit_the_model_is_refused(config):
    with pytest.raises(
        ValueError, match="no NeighborListHook makes the list that LennardJonesModelWrapper needs"
    ):
        NVE(argon_model(), 1.0, hooks=[NeighborListHook(config)]).run(crystals(), 1)


def test_neighbour_list_of_a_larger_cutoff_serves_the_model():
    hook = NeighborListHook(NeighborConfig(cutoff=9.5, format="matrix"), skin=0.5)
    ours, reference = crystals(), crystals()
    NVE(argon_model(), 1.0, hooks=[hook]).run(ours, 2)
    NVE(argon_model(), 1.0).run(reference, 2)
    assert torch.allclose(ours.energy, reference.energy, rtol=1e-12)


class Forgetful(nn.Module, BaseModelMixin):
    """Declares more than it gives."""

    def __init__(self, *given):
        super().__init__()
        self.given = given
        outputs = frozenset({"energy", "forces", "stress"})
        self.model_config = ModelConfig(outputs=outputs, supports_pbc=True)

    def forward(self, data):
        outputs = {
            "energy": data.positions.new_zeros(data.num_graphs, 1),
            "forces": torch.zeros_like(data.positions),
        }
        return {name: outputs[name] for name in self.given}


@pytest.mark.parametrize("pieces", [None, 1])
@pytest.mark.parametrize(
    ("engine", "given", "missing"),
    [(FIRE, ["energy"], "forces"), (FIREVariableCell, ["energy", "forces"], "stress")],
)
def test_output_that_a_model_declares_and_does_not_give_is_an_error(engine, given, missing, pieces):
    done = ConvergenceHook.from_fmax(0.05)
    with pytest.raises(ValueError, match=rf"Forgetful declares \['{missing}'\] and did not give it"):
        engine(Forgetful(*given), convergence_hook=done, max_edges_per_eval=pieces).run(crystals(), 5)


def test_results_of_another_calculation_do_not_outlive_their_structure():
    data = crystal(free_energy=torch.tensor([[3.0]], dtype=torch.float64))
    batch = Batch.from_data_list([data])
    NVE(argon_model(), 1.0).run(batch, 1)
    atoms = batch[0].to_atoms()
    assert atoms.get_potential_energy(force_consistent=False) == pytest.approx(float(batch.energy[0]))
    assert "free_energy" not in batch


def test_forces_are_fresh_when_periodicity_changed_between_two_runs():
    batch, engine = crystals(1), NVE(argon_model(), 1.0)
    engine.run(batch, 0)
    batch.pbc.fill_(False)
    engine.run(batch, 0)
    cluster = crystals(1)
    cluster.pbc.fill_(False)
    NVE(argon_model(), 1.0).run(cluster, 0)
    assert torch.allclose(batch.energy, cluster.energy, rtol=1e-12)


def test_constraint_that_is_not_honoured_is_said():
    atoms = Atoms("Ar2", positions=[[0, 0, 0], [3.6, 0, 0]], constraint=FixBondLength(0, 1))
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64)])
    with pytest.warns(UserWarning, match=r"constraints of graph 0 .*FixBondLengths"):
        NVE(argon_model(), 1.0).run(batch, 1)


@pytest.mark.parametrize("cuts", [[(0, 1)], [(1, 2)], [(0, 1), (0, 2)], []])
def test_pieces_that_leave_graphs_out_are_refused(cuts):
    engine = NVE(argon_model(), 1.0, max_edges_per_eval=lambda edges: cuts)
    with pytest.raises(ValueError, match="must cut 2 graphs into pieces that cover all"):
        engine.run(crystals(2), 1)


def test_something_else_than_a_batch_is_refused_untouched():
    data = crystal()
    before = data.keys()
    with pytest.raises(TypeError, match=r"run\(\) takes a Batch, got AtomicData"):
        NVE(argon_model(), 1.0).run.__wrapped__(NVE(argon_model(), 1.0), data, 1)
    assert data.keys() == before


def test_numpy_integers_are_numbers_of_steps():
    batch = crystals()
    engine = NVE(argon_model(), np.float64(1.0), n_steps=3)
    engine.run(batch, np.int64(2))
    assert batch.system_step[:, 0].tolist() == [2, 2]


@pytest.mark.parametrize("dt", [True, "1", [1.0, 2.0]])
def test_parameter_that_is_no_number_is_named(dt):
    with pytest.raises(ValueError, match="dt must be a number"):
        GraphParameter("dt", dt)


def test_pressure_of_each_graph_is_refused_where_graphs_come_and_go():
    pressure = torch.zeros(4, dtype=torch.float64)
    engine = NPT(
        argon_model(),
        1.0,
        20.0,
        pressure,
        1000.0,
        100.0,
        n_steps=2,
        sampler=SizeAwareSampler([crystal()], max_batch_size=4),
    )
    with pytest.raises(ValueError, match="one value for each graph"):
        engine.run()
