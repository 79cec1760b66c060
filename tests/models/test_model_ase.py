import pickle

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.calculator import Calculator, PropertyNotImplementedError
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones

from nvalchemi.models import (
    ASECalculatorWrapper,
    BaseModelMixin,
    DemoModelWrapper,
    LennardJonesModelWrapper,
    ModelConfig,
    check_model,
    to_ase_calculator,
)


class Failing(Calculator):
    implemented_properties = ("energy",)

    def calculate(self, atoms=None, properties=None, system_changes=None):
        super().calculate(atoms, properties, system_changes)
        if 79 in atoms.numbers:
            raise ArithmeticError("gold is too dear")
        self.results = {"energy": float(atoms.get_initial_charges().sum())}


@pytest.fixture
def metals():
    random = np.random.default_rng(1)
    structures = [bulk("Cu", cubic=True), bulk("Au"), bulk("Al").repeat((2, 1, 1))]
    for atoms in structures:
        atoms.positions += random.normal(0, 0.05, atoms.positions.shape)
    return structures


# ---------------------------------------------------------------------- calculator as a model
def test_wrapped_calculator_gives_its_results(make_batch, metals):
    outputs = ASECalculatorWrapper(EMT)(make_batch(metals))
    for atoms in metals:
        atoms.calc = EMT()
    energies = [[atoms.get_potential_energy()] for atoms in metals]
    np.testing.assert_allclose(outputs["energy"].numpy(), energies, rtol=1e-13)
    np.testing.assert_allclose(
        outputs["forces"].numpy(), np.concatenate([a.get_forces() for a in metals]), atol=1e-12
    )
    stress = [atoms.get_stress(voigt=False) for atoms in metals]
    np.testing.assert_allclose(outputs["stress"].numpy(), stress, atol=1e-13)


def test_wrapped_calculator_conforms(make_batch, metals):
    check_model(ASECalculatorWrapper(EMT), make_batch(metals))


def test_only_what_the_calculator_implements_is_offered():
    assert ASECalculatorWrapper(Failing).model_config.available_outputs == {"energy"}


def test_failure_names_the_structure(make_batch, metals):
    batch = make_batch(metals)
    batch.system_id = torch.tensor([[5], [6], [7]])
    with pytest.raises(RuntimeError, match=r"Failing failed for graph 1 \(system_id 6\): gold is too dear"):
        ASECalculatorWrapper(Failing)(batch)


def test_initial_charges_reach_the_calculator(make_batch):
    ions = [Atoms("Na", charges=[1.0]), Atoms("Cl", charges=[-1.0])]
    assert ASECalculatorWrapper(Failing)(make_batch(ions))["energy"].tolist() == [[1.0], [-1.0]]


def test_wrapper_is_pickled_without_its_calculator(make_batch, metals):
    model = ASECalculatorWrapper(EMT)
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy(make_batch(metals))["energy"], model(make_batch(metals))["energy"])


# ---------------------------------------------------------------------- model as a calculator
def _argon_model():
    return LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)


def test_model_calculator_equals_ases_own():
    atoms = bulk("Ar", a=5.3, cubic=True)
    atoms.rattle(0.1, seed=2)
    atoms.calc = to_ase_calculator(_argon_model())
    reference = atoms.copy()
    # ASE shifts the energy to zero at the cutoff; forces and stress are those of the plain truncation.
    reference.calc = LennardJones(epsilon=0.0104, sigma=3.40, rc=8.5)
    np.testing.assert_allclose(atoms.get_forces(), reference.get_forces(), atol=1e-12)
    np.testing.assert_allclose(atoms.get_stress(), reference.get_stress(), atol=1e-13)
    assert atoms.get_stress().shape == (6,)
    assert atoms.get_potential_energy(force_consistent=True) == atoms.get_potential_energy()


def test_round_trip_through_ase_changes_nothing(make_batch):
    atoms = bulk("Ar", a=5.3, cubic=True)
    atoms.rattle(0.1, seed=2)
    model = _argon_model()
    around = ASECalculatorWrapper(lambda: to_ase_calculator(model))(make_batch([atoms]))
    for name, value in model(make_batch([atoms], model)).items():
        torch.testing.assert_close(around[name], value, rtol=1e-13, atol=1e-15)


def test_model_is_evaluated_again_only_after_a_change(monkeypatch):
    model = _argon_model()
    calls = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda data: calls.append(1) or forward(data))
    atoms = bulk("Ar", a=5.3, cubic=True)
    atoms.calc = to_ase_calculator(model)
    for _ in range(2):
        atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    assert len(calls) == 1
    before = atoms.get_potential_energy()
    atoms.positions[0] += 0.1
    assert atoms.get_potential_energy() != before
    atoms.set_cell(atoms.cell * 1.01, scale_atoms=True)
    atoms.get_forces()
    assert len(calls) == 3


def test_change_of_an_info_entry_that_the_model_reads_counts():
    class Charged(DemoModelWrapper):
        def __init__(self):
            super().__init__()
            self.model_config = ModelConfig(required_inputs={"charge"})

        def forward(self, data):
            return self.adapt_output({"energy": data.charge.to(data.dtype) ** 2}, data)

    atoms = Atoms("Na", info={"charge": 1})
    atoms.calc = to_ase_calculator(Charged())
    assert atoms.get_potential_energy() == 1.0
    atoms.info["charge"] = 3
    assert atoms.get_potential_energy() == 9.0


def test_stress_of_a_molecule_is_not_implemented():
    atoms = molecule("H2O")
    atoms.calc = to_ase_calculator(DemoModelWrapper())
    assert atoms.get_forces().shape == (3, 3)
    with pytest.raises(PropertyNotImplementedError, match="needs a cell"):
        atoms.get_stress()


def test_calculator_leaves_the_mode_of_the_model():
    model = DemoModelWrapper().train()
    atoms = molecule("H2O")
    atoms.calc = to_ase_calculator(model, dtype=torch.float32)
    assert atoms.get_forces().dtype == np.float32
    assert model.training
    assert model.model.training


def test_only_modules_become_calculators():
    class Bare(BaseModelMixin):
        model_config = ModelConfig()

    with pytest.raises(TypeError, match=r"nn\.Module, not Bare"):
        to_ase_calculator(Bare())
