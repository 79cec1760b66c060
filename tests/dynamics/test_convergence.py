"""Criteria and the convergence hook."""

import pytest
import torch

from nvalchemi.data import Batch
from nvalchemi.dynamics import FIRE, NVE, ConvergenceHook, FIREVariableCell


@pytest.fixture
def batch(atoms_in_wells):
    batch = atoms_in_wells(count=3, size=2)
    batch.forces = torch.zeros_like(batch.positions)
    batch.forces[0, 0] = 0.3
    batch.forces[3] = torch.tensor([0.03, 0.04, 0.0])
    batch.energy = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    batch.stress = 0.01 * torch.arange(3).double()[:, None, None] * torch.eye(3, dtype=torch.float64)
    batch.status = torch.zeros(3, 1, dtype=torch.int64)
    return batch


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (ConvergenceHook(), [False, True, True]),
        (ConvergenceHook.from_fmax(0.049), [False, False, True]),
        (ConvergenceHook.from_forces(0.05), [False, True, True]),
        (ConvergenceHook({"key": "forces", "threshold": 0.04, "reduce_op": "abs_max"}), [False, True, True]),
        (ConvergenceHook({"key": "energy", "threshold": 2.0}), [True, True, False]),
        (ConvergenceHook.from_stress(0.015), [True, True, False]),
        (ConvergenceHook.from_stress(0.015, pressure=-0.02), [False, True, True]),
        (
            ConvergenceHook([{"key": "fmax", "threshold": 0.05}, {"key": "energy", "threshold": 2.0}]),
            [False, True, False],
        ),
        (
            ConvergenceHook({"key": "energy", "threshold": 0.0, "custom_op": lambda e: e[:, 0] > 1.5}),
            [False, True, True],
        ),
        (
            ConvergenceHook({"key": "energy", "threshold": 1.5, "custom_op": lambda e: 4 - e}),
            [False, False, True],
        ),
    ],
)
def test_all_criteria_must_hold(batch, hook, expected):
    assert hook.evaluate(batch).tolist() == expected


def test_nan_never_converges(batch):
    batch.forces[4] = batch.energy[2] = float("nan")
    assert ConvergenceHook.from_fmax(1e3).evaluate(batch).tolist() == [True, True, False]
    assert ConvergenceHook({"key": "energy", "threshold": 1e3}).evaluate(batch).tolist() == [
        True,
        True,
        False,
    ]


def test_fixed_atoms_do_not_count(batch):
    batch.atom_categories = torch.tensor([1, 0, 0, 0, 0, 0])
    assert ConvergenceHook.from_fmax(0.05).evaluate(batch).tolist() == [True, True, True]
    assert ConvergenceHook({"key": "forces", "threshold": 0.05}).evaluate(batch).tolist() == [
        True,
        True,
        True,
    ]


def test_only_graphs_of_the_source_status_move_to_the_target(batch, well):
    batch.status = torch.tensor([[0], [1], [0]])
    batch.positions[2:] = 0.0
    hook = ConvergenceHook.from_fmax(1e-9, source_status=1, target_status=2)
    NVE(well, 1.0, hooks=[hook], exit_status=3).run(batch, 1)
    assert batch.status[:, 0].tolist() == [0, 2, 0]


def test_hook_in_the_list_and_as_argument_are_the_same_thing(well, atoms_in_wells):
    steps = []
    for arguments in (
        {"hooks": [ConvergenceHook.from_fmax(1e-3)]},
        {"convergence_hook": ConvergenceHook.from_fmax(1e-3)},
    ):
        engine = FIRE(well, **arguments)
        batch = engine.run(atoms_in_wells())
        assert batch.status[:, 0].tolist() == [1, 1, 1]
        steps.append(engine.step_count)
    assert steps[0] == steps[1]
    with pytest.raises(ValueError, match="convergence hook already"):
        FIRE(well, hooks=[ConvergenceHook()], convergence_hook=ConvergenceHook())


def test_frequency_of_the_test_is_honoured(well, atoms_in_wells):
    batch = atoms_in_wells(count=1)
    batch.positions.zero_()
    engine = NVE(well, 1.0, convergence_hook=ConvergenceHook.from_fmax(1.0, frequency=4))
    engine.step_count = 1
    engine.run(batch, 20)
    assert engine.step_count == 5


def test_one_atom_in_its_cell_is_not_converged_before_its_cell_is(argon):
    from ase.build import bulk

    from nvalchemi.data import AtomicData

    def primitive():
        return Batch.from_data_list([AtomicData.from_atoms(bulk("Ar", "fcc", 5.0), dtype=torch.float64)])

    for hook in (ConvergenceHook.from_fmax(0.001), ConvergenceHook.from_forces(0.001)):
        engine = FIREVariableCell(argon, convergence_hook=hook)
        batch = engine.run(primitive(), 500)
        assert engine.step_count > 5
        assert batch.status.item() == 1
        assert float(engine.max_force(batch)) <= 0.001


def test_criteria_that_make_no_sense_are_errors(batch):
    with pytest.raises(ValueError, match="at least one"):
        ConvergenceHook([])
    with pytest.raises(ValueError, match="'missing' is not a field"):
        ConvergenceHook({"key": "missing", "threshold": 1.0}).evaluate(batch)
    with pytest.raises(ValueError, match="threshold of criterion 'fmax' must be ≥ 0"):
        ConvergenceHook.from_fmax(-1.0)
    with pytest.raises(ValueError, match="must not contain dimension 0"):
        ConvergenceHook({"key": "forces", "threshold": 1.0, "reduce_dims": 0}).evaluate(batch)
    with pytest.raises(ValueError, match="not one number per row"):
        ConvergenceHook({"key": "stress", "threshold": 1.0, "reduce_dims": 1}).evaluate(batch)
