"""One structure: what is accepted, what is refused and how, copies."""

import copy
import pickle

import numpy as np
import pytest
import torch

from nvalchemi.data import FIELDS, AtomicData, Batch, Field, register_field
from nvalchemi.data.schema import as_level, kind_matches


def water(**fields):
    return AtomicData([[0.0, 0.0, 0.12], [0.0, 0.76, -0.48], [0.0, -0.76, -0.48]], [8, 1, 1], **fields)


def test_a_molecule_has_no_cell_and_no_labels():
    data = water()
    assert data.keys() == ("positions", "atomic_numbers", "atomic_masses", "pbc")
    assert not data.pbc.any()
    assert data.pbc.shape == (1, 3)


def test_a_cell_makes_a_structure_periodic():
    data = water(cell=np.eye(3) * 9)
    assert data.cell.shape == (1, 3, 3)
    assert data.pbc.tolist() == [[True, True, True]]


@pytest.mark.parametrize(
    "pbc", [True, [1, 1, 1], torch.ones(3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool)]
)
def test_pbc_in_every_usual_form(pbc):
    data = water(cell=torch.eye(3), pbc=pbc)
    assert data.pbc.dtype == torch.bool
    assert data.pbc.tolist() == [[True, True, True]]


@pytest.mark.parametrize(
    "energy", [-1.5, np.float64(-1.5), [-1.5], torch.tensor(-1.5), torch.tensor([[-1.5]])]
)
def test_a_system_scalar_in_every_usual_form(energy):
    data = water(energy=energy)
    assert data.energy.shape == (1, 1)
    assert data.energy.item() == -1.5


def test_masses_default_to_standard_atomic_weights():
    assert torch.allclose(water().atomic_masses, torch.tensor([15.999, 1.008, 1.008]))
    assert water(atomic_masses=[16, 2, 2]).atomic_masses.tolist() == [16, 2, 2]
    assert water().to(dtype=torch.float64).atomic_masses.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_atomic_numbers_of_any_integer_type_become_int64(dtype):
    data = AtomicData(torch.zeros(2, 3), torch.tensor([1, 8], dtype=dtype))
    assert data.atomic_numbers.dtype == torch.int64
    assert data.chemical_formula == "HO"


@pytest.mark.parametrize("empty", [[], np.zeros((0, 3)), torch.zeros(0, 3)])
def test_no_atoms(empty):
    data = AtomicData(empty, [], cell=np.eye(3), neighbor_list=[], forces=[])
    assert (data.num_nodes, data.num_edges) == (0, 0)
    assert data.positions.shape == data.forces.shape == (0, 3)
    assert data.neighbor_list.shape == (0, 2)
    assert data.neighbor_list.dtype == torch.int64


def test_arrays_are_copied_and_tensors_are_not():
    array, tensor = np.zeros((1, 3), dtype=np.float32), torch.zeros(1, 3)
    AtomicData(array, [1]).positions += 1
    assert not array.any()
    AtomicData(tensor, [1]).positions.add_(1)
    assert tensor.all()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(3, 2).T,
        np.arange(6.0).reshape(2, 3)[::-1, ::-1],
        np.arange(6.0).reshape(2, 3).astype(">f8"),
        np.arange(6).reshape(2, 3),
    ],
    ids=["transposed", "negative strides", "big-endian", "integers"],
)
def test_arrays_of_any_layout(array):
    assert AtomicData(array, [1, 1], dtype=torch.float64).positions.tolist() == array.tolist()


def test_gradients_pass_through_a_batch():
    positions = torch.ones(2, 3, requires_grad=True)
    batch = Batch.from_data_list([AtomicData(positions, [1, 1]), water()])
    batch.positions.sum().backward()
    assert positions.grad is not None
    assert positions.grad.tolist() == [[1, 1, 1], [1, 1, 1]]


POSITIONS, NUMBERS = torch.zeros(2, 3), torch.tensor([1, 1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions": torch.zeros(2, 2)}, r"'positions' must have shape \[num_atoms, 3\].*got \[2, 2\]"),
        ({"positions": [[0, 0], [1, 1], [2, 2]]}, r"'positions' must have shape.*got \[3, 2\]"),
        ({"positions": torch.zeros(2, 3, dtype=torch.int64)}, "'positions'.*floating-point.*int64"),
        ({"positions": [[0, 0, 0], [1]]}, "'positions' cannot be made a tensor"),
        ({"positions": "abc"}, "'positions' must consist of numbers, got a str"),
        ({"atomic_numbers": [1]}, r"'atomic_numbers'.*shape \[num_nodes\] with 2 rows, got \[1\]"),
        ({"atomic_numbers": [1.0, 1.0]}, "'atomic_numbers'.*kind int, got torch.float32"),
        ({"atomic_numbers": [1, 119]}, r"'atomic_numbers' must lie in 0 … 118, got \[119\]"),
        ({"atomic_numbers": [1, -1]}, r"'atomic_numbers' must lie in 0 … 118, got \[-1\]"),
        ({"atomic_numbers": ["H", "H"]}, "'atomic_numbers' must consist of numbers"),
        ({"cell": torch.ones(3)}, r"'cell'.*shape \[num_systems, 3, 3\] with 1 rows, got \[3\]"),
        ({"cell": [[1, 0, 0], [0, float("inf"), 0], [0, 0, float("nan")]]}, "'cell'.*must be finite"),
        (
            {"cell": torch.eye(3, dtype=torch.float64)},
            "'cell' is torch.float64 while the positions are torch.float32",
        ),
        ({"pbc": [1, 2, 0]}, "'pbc'.*kind bool, got torch.int64"),
        ({"energy": [1.0, 2.0]}, r"'energy'.*shape \[num_systems, 1\] with 1 rows, got \[2\]"),
        ({"charge": "one"}, "'charge' must consist of numbers"),
        ({"forces": torch.zeros(3, 3)}, r"'forces'.*with 2 rows, got \[3, 3\]"),
        ({"forces": torch.zeros(2, 3, device="meta")}, "'forces' is on meta while the positions are on cpu"),
        (
            {"neighbor_list": torch.zeros(2, 7, dtype=torch.int64)},
            r"'neighbor_list'.*\[num_edges, 2\], got \[2, 7\]",
        ),
        ({"neighbor_list": [[0, 2]]}, "'neighbor_list'.*refers to atom 2"),
        ({"neighbor_list": [[0, -1]]}, "'neighbor_list'.*refers to atom -1"),
        ({"neighbor_list": [[0, 1]], "shifts": np.zeros((3, 3))}, r"'shifts'.*with 1 rows, got \[3, 3\]"),
        ({"force": torch.zeros(2, 3)}, "unknown field 'force'"),
    ],
)
def test_errors_name_the_field_the_expected_and_the_given(fields, message):
    with pytest.raises(ValueError, match=message):
        AtomicData(**({"positions": POSITIONS, "atomic_numbers": NUMBERS} | fields))


def test_a_large_finite_cell_is_finite():
    assert AtomicData(POSITIONS, NUMBERS, cell=torch.full((3, 3), 3e38)).cell.isfinite().all()


def test_narrower_floats_are_widened():
    assert AtomicData(POSITIONS.double(), NUMBERS, cell=torch.eye(3)).cell.dtype == torch.float64


def test_custom_fields_at_every_level():
    data = water(neighbor_list=[[0, 1], [0, 2]])
    data.add_node_property("donor", [True, False, False])
    data.add_edge_property("bond_order", torch.tensor([1.0, 1.0]))
    data.add_system_property("name_hash", [[7]])
    data.add_system_property("temperature", 300.0)
    levels = {name: data.level(name) for name in ("donor", "bond_order", "name_hash", "temperature")}
    assert levels == {"donor": "node", "bond_order": "edge", "name_hash": "system", "temperature": "system"}
    assert data.temperature.shape == ()


@pytest.mark.parametrize(
    "name", ["keys", "num_nodes", "append", "batch_idx", "index_select", "info", "_x", "a b", ""]
)
def test_a_field_cannot_hide_a_method_of_a_structure_or_a_batch(name):
    with pytest.raises(ValueError, match="cannot name a field"):
        water().add_node_property(name, torch.zeros(3))
    with pytest.raises(ValueError, match="cannot name a field"):
        Batch.from_data_list([water()]).add_key(name, torch.zeros(3), "node")


@pytest.mark.parametrize(
    ("key", "values", "level", "message"),
    [
        ("foo", [1, 2, 3], None, "'foo' is not in the schema table: say its level"),
        ("foo", [1, 2, 3], "atoms", "unknown level 'atoms'"),
        ("forces", np.zeros((3, 3)), "system", "'forces' is of level 'node'"),
        ("foo", [1.0, 2.0], "node", r"'foo'.*\[num_nodes, ...\] with 3 rows, got \[2\]"),
        ("foo", [1.0, 2.0], "system", r"'foo'.*\[num_systems, ...\] with 1 rows, got \[2\]"),
        ("foo", ["a", "b", "c"], "node", "'foo' must consist of numbers"),
    ],
)
def test_add_key_refuses(key, values, level, message):
    with pytest.raises(ValueError, match=message):
        water().add_key(key, values, level)


def test_absent_fields():
    data = water()
    assert "energy" not in data
    assert not hasattr(data, "energy")
    assert data.get("energy") is None
    with pytest.raises(
        AttributeError, match=r"AtomicData\(3 atoms\) has no field 'energy'; it has positions, atomic_n"
    ):
        _ = data.energy
    with pytest.raises(KeyError, match="no field 'energy'"):
        _ = data["energy"]
    with pytest.raises(KeyError, match="no field 'energy'"):
        data.level("energy")
    with pytest.raises(KeyError, match="no field 'energy'"):
        del data.energy


def test_positions_cannot_be_removed_or_change_in_number():
    data = water()
    with pytest.raises(ValueError, match="'positions' cannot be removed"):
        del data.positions
    with pytest.raises(ValueError, match=r"'positions'.*with 3 rows"):
        data.positions = torch.zeros(4, 3)


def test_setting_a_known_field_as_an_attribute():
    data = water()
    data.forces = np.ones((3, 3))
    assert data.level("forces") == "node"
    assert data.forces.dtype == torch.float32
    del data.forces
    assert "forces" not in data


def test_one_structure_is_no_sequence():
    with pytest.raises(TypeError, match="not a sequence"):
        list(water())
    with pytest.raises(TypeError, match="not a sequence"):
        Batch.from_data_list(water())


def full():
    data = water(cell=torch.eye(3) * 9, neighbor_list=[[0, 1]], energy=-1.0, info={"name": "w"})
    data.add_system_property("temperature", 300.0)
    return data


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert a.info == b.info
    for name, tensor in a.items():
        assert a.level(name) == b.level(name)
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize(
    "duplicate", [AtomicData.clone, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))]
)
def test_copies_share_nothing(duplicate):
    data = full()
    other = duplicate(data)
    assert_same(data, other)
    other.positions += 1
    other.add_node_property("extra", torch.zeros(3))
    assert_same(data, full())


def test_a_shallow_copy_shares_tensors_but_not_the_set_of_fields():
    data = full()
    other = copy.copy(data)
    other.remove_key("energy")
    assert "energy" in data
    assert other.positions is data.positions


def test_clone_makes_a_transposed_cell_contiguous():
    cell = torch.arange(9.0).reshape(3, 3).T
    clone = water(cell=cell).clone()
    assert clone.cell.is_contiguous()
    assert torch.equal(clone.cell[0], cell)


def test_to_changes_floats_only_and_leaves_the_original():
    data = full()
    other = data.to(dtype=torch.float64)
    assert other.dtype == other.cell.dtype == other.temperature.dtype == torch.float64
    assert other.pbc.dtype == torch.bool
    assert other.atomic_numbers.dtype == torch.int64
    assert data.dtype == torch.float32
    moved = data.to("meta")
    assert all(tensor.device.type == "meta" for _, tensor in moved.items())
    assert "3 atoms" in repr(moved)


def test_to_says_what_is_wrong():
    with pytest.raises(ValueError, match="floating-point"):
        water().to(dtype=torch.int32)
    with pytest.raises(TypeError):
        water().to(torch.float64)


def test_registering_a_field():
    row = Field("test_time_step", "system", (1,), "float", "fs", "step of a test", persistent=False)
    assert register_field(row) is row
    register_field(Field("test_time_step", "system", (1,), "float", "fs", "step of a test", persistent=False))
    with pytest.raises(ValueError, match="'test_time_step' is already registered"):
        register_field(Field("test_time_step", "node", (1,), "float"))
    data = water(test_time_step=0.5)
    assert data.level("test_time_step") == "system"
    assert "test_time_step" not in data.to_atoms().info


def test_every_row_of_the_table_is_consistent():
    for name, field in FIELDS.items():
        assert field.name == name
        assert as_level(field.level) == field.level
        assert field.describe_shape().startswith(f"[num_{field.level}s")
        if field.neutral is not None and field.kind != "float":
            # Integers and booleans have no NaN: their neutral value is a whole number.
            assert float(field.neutral).is_integer()
        assert not field.refers_to_atoms or field.kind == "int"


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        ("float", {torch.float32, torch.float64, torch.bfloat16}),
        ("int", {torch.int8, torch.int64}),
        ("bool", {torch.bool}),
        ("number", {torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64}),
    ],
)
def test_kinds(kind, dtypes):
    every = [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
    ]
    assert {dtype for dtype in every if kind_matches(kind, dtype)} == dtypes


def test_info_of_a_copy_is_its_own():
    data = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([1]), info={"name": "a"})
    for twin in (data.clone(), data.to(dtype=torch.float64), data.detach()):
        twin.info["name"] = "b"
    assert data.info == {"name": "a"}
