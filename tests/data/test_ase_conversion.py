"""ASE ``Atoms`` to ``AtomicData`` and back without loss."""

import ase.constraints as constraints
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.calculator import Calculator
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data import FIXED, AtomicData, Batch
from nvalchemi.data.ase import matrix_to_voigt, voigt_to_matrix

DOUBLE = torch.float64


def assert_same_atoms(a, b):
    assert a.arrays.keys() == b.arrays.keys()
    for name, array in a.arrays.items():
        other = b.arrays[name]
        assert array.shape == other.shape, name
        assert array.dtype.kind == other.dtype.kind, name
        # Momenta pass through velocities: a division and a multiplication, each rounded.
        same = (
            np.allclose(array, other, rtol=1e-15, atol=0)
            if name == "momenta"
            else np.array_equal(array, other)
        )
        assert same, name
    assert np.array_equal(a.cell[:], b.cell[:])
    assert a.pbc.tolist() == b.pbc.tolist()
    assert a.get_celldisp().tolist() == b.get_celldisp().tolist()
    assert a.info.keys() == b.info.keys()
    for name, value in a.info.items():
        assert np.array_equal(value, b.info[name]) or value == b.info[name], name
    assert [c.todict() for c in a.constraints] == [c.todict() for c in b.constraints]
    old = a.calc.results if a.calc else {}
    new = b.calc.results if b.calc else {}
    assert old.keys() == new.keys()
    for name, value in old.items():
        assert np.array_equal(value, new[name]), name


def loaded_slab():
    """Everything ASE can hang on an ``Atoms``."""
    atoms = bulk("Cu", cubic=True).repeat((2, 1, 1))
    atoms.pbc = [True, True, False]
    atoms.rattle(0.1, seed=1)
    atoms.set_masses([63.0] + [65.0] * 7)
    atoms.set_momenta(np.random.default_rng(0).normal(size=(8, 3)))
    atoms.set_tags(range(8))
    atoms.set_initial_charges(np.linspace(-1, 1, 8))
    atoms.set_initial_magnetic_moments(np.arange(8.0))
    atoms.set_celldisp([0.1, 0.2, 0.3])
    atoms.set_constraint([constraints.FixAtoms([0, 2]), constraints.FixBondLengths([[1, 3]])])
    atoms.set_array("site", np.arange(24).reshape(8, 3))
    atoms.set_array("label", np.array(list("abcdefgh")))
    atoms.info.update(
        name="slab", charge=1, spin=2, vector=np.arange(4), nested={"a": [1]}, ragged=[[1], [1, 2]]
    )
    rng = np.random.default_rng(1)
    atoms.calc = SinglePointCalculator(
        atoms,
        energy=-1.0,
        free_energy=-1.5,
        forces=rng.normal(size=(8, 3)),
        stress=rng.normal(size=6),
        stresses=rng.normal(size=(8, 6)),
        energies=rng.normal(size=8),
        dipole=rng.normal(size=3),
        magmom=2.0,
        magmoms=rng.normal(size=8),
        charges=rng.normal(size=8),
    )
    return atoms


def test_everything_comes_back():
    atoms = loaded_slab()
    assert_same_atoms(atoms, AtomicData.from_atoms(atoms, dtype=DOUBLE).to_atoms())


def test_everything_comes_back_through_a_batch():
    atoms = loaded_slab()
    one = AtomicData.from_atoms(atoms, dtype=DOUBLE)
    batch = Batch.from_data_list([one, one.clone(), one.clone()])
    for data in (batch[1], batch[[2, 0]][1], batch.to_data_list()[2]):
        assert_same_atoms(atoms, data.to_atoms())


def test_where_things_are():
    data = AtomicData.from_atoms(loaded_slab(), dtype=DOUBLE)
    assert data.atom_categories.tolist() == [FIXED, 0, FIXED, 0, 0, 0, 0, 0]
    assert (data.charge.item(), data.spin.item()) == (1, 2)
    assert data.stress.shape == (1, 3, 3)
    assert torch.equal(data.stress, data.stress.mT)
    assert data.site.shape == (8, 3)
    assert "label" not in data
    assert set(data.info) == {"name", "vector", "nested", "ragged", "constraints", "arrays", "celldisp"}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_conversion_is_an_identity(data):
    n = data.draw(st.integers(0, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    atoms = Atoms(
        rng.integers(0, 100, n),
        rng.normal(size=(n, 3)),
        pbc=data.draw(st.lists(st.booleans(), min_size=3, max_size=3)),
    )
    extras = {
        "cell": lambda: atoms.set_cell(rng.normal(size=(3, 3))),
        "momenta": lambda: atoms.set_momenta(rng.normal(size=(n, 3))),
        "masses": lambda: n and atoms.set_masses(rng.uniform(1, 200, n)),
        "tags": lambda: atoms.set_tags(rng.integers(0, 5, n)),
        "charges": lambda: atoms.set_initial_charges(rng.normal(size=n)),
        "magmoms": lambda: atoms.set_initial_magnetic_moments(rng.normal(size=n)),
        "fixed": lambda: n and atoms.set_constraint(constraints.FixAtoms([0])),
        "node": lambda: atoms.set_array("user", rng.normal(size=(n, 2))),
        "text": lambda: atoms.set_array("words", np.array(["x"] * n, dtype="U3")),
        "info": lambda: atoms.info.update(
            charge=int(rng.integers(-2, 3)), note="n", numbers=rng.normal(size=2)
        ),
    }
    for name in data.draw(st.sets(st.sampled_from(sorted(extras)))):
        extras[name]()
    if data.draw(st.booleans()):
        atoms.calc = SinglePointCalculator(
            atoms, energy=rng.normal(), forces=rng.normal(size=(n, 3)), stress=rng.normal(size=6)
        )
    assert_same_atoms(atoms, AtomicData.from_atoms(atoms, dtype=DOUBLE).to_atoms())


# ---------------------------------------------------------------------- calculators
def test_a_calculator_that_has_not_run_gives_no_labels_and_is_not_run():
    atoms = bulk("Cu")
    atoms.calc = EMT()
    data = AtomicData.from_atoms(atoms)
    assert not {"energy", "forces", "stress"} & set(data.keys())
    assert atoms.calc.results == {}


def test_results_of_other_positions_are_not_taken():
    atoms = bulk("Cu")
    atoms.calc = EMT()
    atoms.get_potential_energy()
    assert "energy" in AtomicData.from_atoms(atoms)
    atoms.positions += [[0.1, 0, 0]]
    assert "energy" not in AtomicData.from_atoms(atoms)


class Chatty(Calculator):
    """Calculators put into their results what they do not declare."""

    implemented_properties = ("energy",)

    def calculate(self, *args, **kwargs):
        super().calculate(*args, **kwargs)
        self.results = {"energy": 1.0, "features": np.ones((7, 7)), "forces": None, "graph": object()}


def test_results_that_ase_has_no_name_for_are_left_out():
    atoms = bulk("Cu")
    atoms.calc = Chatty()
    atoms.get_potential_energy()
    names = {"positions", "atomic_numbers", "atomic_masses", "cell", "pbc", "energy"}
    assert set(AtomicData.from_atoms(atoms).keys()) == names


def test_charges_of_a_calculator_stay_its_results():
    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, charges=[-0.8, 0.4, 0.4])
    data = AtomicData.from_atoms(atoms)
    back = data.to_atoms()
    assert data.charges.tolist() == pytest.approx([-0.8, 0.4, 0.4])
    assert not back.has("initial_charges")
    assert back.calc.results["charges"].tolist() == pytest.approx([-0.8, 0.4, 0.4])


def test_labels_filled_with_nan_are_no_labels():
    atoms = molecule("H2O")
    labelled = molecule("H2O")
    labelled.calc = SinglePointCalculator(labelled, energy=1.0, forces=np.ones((3, 3)))
    batch = Batch.from_data_list([AtomicData.from_atoms(a) for a in (atoms, labelled)], missing="fill")
    assert batch[0].to_atoms().calc is None
    assert batch[1].to_atoms().get_potential_energy() == 1.0


def test_voigt_order_is_that_of_ase():
    matrix = np.array([[1, 6, 5], [6, 2, 4], [5, 4, 3]], dtype=float)
    assert voigt_to_matrix([1, 2, 3, 4, 5, 6]).tolist() == matrix.tolist()
    assert voigt_to_matrix(matrix.ravel()).tolist() == matrix.tolist()
    assert matrix_to_voigt(matrix).tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match=r"6 \(Voigt\) or 9 components, got shape \[5\]"):
        voigt_to_matrix(np.ones(5))


# ---------------------------------------------------------------------- labels elsewhere
def test_labels_under_other_keys():
    atoms = molecule("H2O")
    atoms.info.update(REF_energy=-3.0, REF_stress=np.arange(1.0, 7.0))
    atoms.set_array("REF_forces", np.ones((3, 3)))
    data = AtomicData.from_atoms(
        atoms, energy_key="REF_energy", forces_key="REF_forces", stress_key="REF_stress"
    )
    assert data.energy.tolist() == [[-3.0]]
    assert data.forces.eq(1).all()
    assert data.stress[0].tolist() == [[1, 6, 5], [6, 2, 4], [5, 4, 3]]
    assert data.to_atoms().get_potential_energy() == -3.0


def test_further_fields_from_info_and_arrays():
    atoms = molecule("H2O")
    atoms.info.update(gap=1.5, moments=[1, 2, 3])
    atoms.set_array("q", np.ones(3))
    data = AtomicData.from_atoms(
        atoms, fields={"gap": "band_gap", "moments": "moments", "q": "charges", "no": "nothing"}
    )
    assert data.band_gap.tolist() == [[1.5]]
    assert data.moments.tolist() == [[1, 2, 3]]
    assert data.charges.tolist() == [1, 1, 1]
    assert (data.level("band_gap"), data.level("moments")) == ("system", "system")
    assert "nothing" not in data


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (
            {"energy": "unknown"},
            "'energy' of the Atoms cannot be the field 'energy': expected numbers, got 'unknown'",
        ),
        ({"energy": np.ones(2)}, r"'energy'.*got \[2\]"),
        ({"stress": np.ones(5)}, "'stress' of the Atoms cannot be the field 'stress': .*components"),
    ],
)
def test_labels_that_are_none_are_named(info, message):
    atoms = molecule("H2O")
    atoms.info.update(info)
    with pytest.raises(ValueError, match=message):
        AtomicData.from_atoms(atoms)


def test_a_label_of_none_is_absent():
    atoms = molecule("H2O")
    atoms.info["energy"] = None
    assert "energy" not in AtomicData.from_atoms(atoms)


# ---------------------------------------------------------------------- arrays and info of every kind
@pytest.mark.parametrize(
    "name",
    [
        "keys",
        "info",
        "device",
        "append",
        "energy",
        "free_energy",
        "stress",
        "charge",
        "spin",
        "dipole",
        "cell",
        "magmom",
        "atomic_numbers",
        "neighbor_list",
        "num_neighbors",
        "status",
        "_x",
    ],
)
def test_an_array_may_have_any_name(name):
    atoms = molecule("H2O")
    atoms.arrays[name] = np.arange(3.0)
    atoms.arrays["with space"] = np.arange(3)
    assert_same_atoms(atoms, AtomicData.from_atoms(atoms, dtype=DOUBLE).to_atoms())


@pytest.mark.parametrize(
    "array",
    [
        np.array([True, False, True]),
        np.array(["a", "bc", ""]),
        np.array([{}, None, 1], dtype=object),
        np.ones(3) * 1j,
        np.ones((3, 2, 2)),
        np.ones((3, 0)),
    ],
    ids=["bool", "text", "object", "complex", "matrices", "empty"],
)
def test_an_array_may_be_of_any_type(array):
    atoms = molecule("H2O")
    atoms.arrays["user"] = array
    assert_same_atoms(atoms, AtomicData.from_atoms(atoms, dtype=DOUBLE).to_atoms())


@pytest.mark.parametrize("array", [np.ones((3, 2)), np.array(["a", "b", "c"])])
def test_an_array_with_the_name_but_not_the_shape_of_a_field_is_kept(array):
    atoms = molecule("H2O")
    atoms.arrays["velocities"] = array
    assert "velocities" not in AtomicData.from_atoms(atoms)
    assert_same_atoms(atoms, AtomicData.from_atoms(atoms, dtype=DOUBLE).to_atoms())


@pytest.mark.parametrize(
    ("value", "is_field"),
    [
        *((value, True) for value in (1, -1.0, 0.5, np.int32(1), np.array([1]), np.array(1.0))),
        *((value, False) for value in ("1", None, True, [1], np.ones(2), {}, 1j)),
    ],
    ids=repr,
)
def test_charge_in_info(value, is_field):
    atoms = molecule("H2O")
    atoms.info["charge"] = value
    data = AtomicData.from_atoms(atoms)
    assert ("charge" in data) == is_field
    assert ("charge" in data.info) != is_field
    assert np.array_equal(np.squeeze(data.to_atoms().info["charge"]), np.squeeze(value)) or value is None


@pytest.mark.parametrize(
    "info", [{"constraints": "none"}, {"arrays": "none"}, {"arrays": {}}, {"celldisp": 1}, {"positions": 1}]
)
def test_info_may_use_the_names_of_this_package(info):
    atoms = molecule("H2O")
    atoms.info.update(info)
    assert AtomicData.from_atoms(atoms).to_atoms().info == info


def test_virial_and_dipole_of_info_become_fields():
    atoms = bulk("Cu")
    atoms.info.update(virial=np.arange(9.0), dipole=np.ones(3))
    data = AtomicData.from_atoms(atoms)
    assert data.virial.flatten().tolist() == list(range(9))
    assert data.dipole.tolist() == [[1, 1, 1]]


def test_the_state_of_a_run_is_written_and_not_read():
    data = AtomicData.from_atoms(bulk("Cu"))
    data.status, data.system_id = [[1]], [[7]]
    atoms = data.to_atoms()
    assert atoms.info == {"status": 1, "system_id": 7}
    assert "status" not in AtomicData.from_atoms(atoms)


# ---------------------------------------------------------------------- constraints, momenta, cells
@pytest.mark.parametrize(
    "constraint",
    [
        constraints.FixCartesian([0], [True, False, False]),
        constraints.FixBondLengths([[0, 1]]),
        constraints.FixedLine(0, [0, 0, 1]),
        constraints.FixCom(),
    ],
    ids=lambda c: type(c).__name__,
)
def test_other_constraints_come_back(constraint):
    atoms = molecule("H2O")
    atoms.set_constraint(constraint)
    data = AtomicData.from_atoms(atoms)
    assert "atom_categories" not in data
    assert_same_atoms(atoms, AtomicData.from_atoms(atoms, dtype=DOUBLE).to_atoms())
    assert Batch.from_data_list([data]).info[0]["constraints"] == [constraint]


def test_fixed_atoms_add_to_categories_of_the_user():
    atoms = molecule("H2O")
    atoms.set_array("atom_categories", np.array([2, 3, 0]))
    atoms.set_constraint(constraints.FixAtoms([2]))
    data = AtomicData.from_atoms(atoms)
    assert data.atom_categories.tolist() == [2, 3, FIXED]
    assert data.to_atoms().constraints[0].index.tolist() == [2]


def test_momenta_are_velocities_times_masses():
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 1]], masses=[2.0, 4.0], momenta=[[2, 0, 0], [0, 8, 0]])
    data = AtomicData.from_atoms(atoms)
    assert data.velocities.tolist() == [[1, 0, 0], [0, 2, 0]]
    assert "momenta" not in data
    data.remove_key("velocities")
    data.momenta = [[1, 1, 1], [2, 2, 2]]
    assert data.to_atoms().get_momenta().tolist() == [[1, 1, 1], [2, 2, 2]]


def test_an_atom_without_mass_has_no_velocity():
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 1]], masses=[0.0, 1.0], momenta=np.ones((2, 3)))
    assert AtomicData.from_atoms(atoms).velocities.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_a_molecule_in_a_mixed_batch_comes_back_without_cell():
    batch = Batch.from_data_list(
        [AtomicData.from_atoms(a, dtype=DOUBLE) for a in (molecule("H2O"), bulk("Cu"))]
    )
    assert_same_atoms(molecule("H2O"), batch[0].to_atoms())
    assert_same_atoms(bulk("Cu"), batch[1].to_atoms())


def test_an_incomplete_cell_is_a_cell():
    atoms = Atoms("H", cell=[0, 0, 5], pbc=[False, False, True])
    assert_same_atoms(atoms, AtomicData.from_atoms(atoms, dtype=DOUBLE).to_atoms())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, DOUBLE])
def test_every_precision_goes_back(dtype):
    data = AtomicData(torch.ones(1, 3, dtype=dtype, requires_grad=True), [1])
    assert data.to_atoms().positions.tolist() == [[1, 1, 1]]


def test_system_fields_become_plain_values():
    data = AtomicData([[0.0, 0, 0]], [1])
    data.add_system_property("scale", 3.0)
    data.add_system_property("matrix", torch.ones(1, 2, 2))
    info = data.to_atoms().info
    assert info["scale"] == 3.0
    assert info["matrix"].tolist() == [[1, 1], [1, 1]]


def test_only_atoms_are_converted():
    with pytest.raises(TypeError):
        AtomicData.from_atoms([molecule("H2O")])
