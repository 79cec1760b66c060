"""BiasedPotentialHook."""

from enum import Enum

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.hooks import BiasedPotentialHook, DynamicsContext, HookContext


class Stage(Enum):
    AFTER_COMPUTE = 0


@pytest.fixture
def batch():
    atoms = [
        AtomicData(
            positions=torch.rand(2, 3, dtype=torch.float64),
            atomic_numbers=torch.tensor([18, 18]),
            forces=torch.ones(2, 3, dtype=torch.float64),
            energy=torch.ones(1, 1, dtype=torch.float64),
            stress=torch.zeros(1, 3, 3, dtype=torch.float64),
            cell=(10.0 * torch.eye(3, dtype=torch.float64)).unsqueeze(0),
            pbc=torch.ones(1, 3, dtype=torch.bool),
        )
        for _ in range(3)
    ]
    return Batch.from_data_list(atoms)


def _bias(batch):
    return torch.full_like(batch.energy, 2.0), torch.full_like(batch.forces, 3.0)


def test_bias_is_added_in_place(batch):
    energy, forces = batch.energy, batch.forces
    BiasedPotentialHook(_bias)(HookContext(batch=batch), Stage.AFTER_COMPUTE)
    assert batch.energy is energy
    assert batch.forces is forces
    assert bool((energy == 3.0).all())
    assert bool((forces == 4.0).all())


def test_bias_replaces_the_tensors_when_asked_to(batch):
    energy, forces = batch.energy, batch.forces
    BiasedPotentialHook(_bias, inplace=False)(HookContext(batch=batch), Stage.AFTER_COMPUTE)
    assert bool((energy == 1.0).all())
    assert bool((forces == 1.0).all())
    assert bool((batch.energy == 3.0).all())
    assert bool((batch.forces == 4.0).all())


def test_inactive_graphs_are_left_untouched_even_by_nan(batch):
    def bias(batch):
        energy, forces = _bias(batch)
        energy[1] = forces[2:4] = float("nan")
        return energy, forces

    ctx = DynamicsContext(batch=batch, active_graph_mask=torch.tensor([True, False, True]))
    BiasedPotentialHook(bias)(ctx, Stage.AFTER_COMPUTE)
    assert batch.energy[:, 0].tolist() == [3.0, 1.0, 3.0]
    assert batch.forces[:, 0].tolist() == [4.0, 4.0, 1.0, 1.0, 4.0, 4.0]


def test_volume_dependent_bias_changes_the_stress_by_its_strain_derivative_over_the_volume(batch):
    # E = c V, so dE/dε = c V 1 and the stress changes by c 1.
    c = 0.01

    def bias(batch):
        volume = torch.linalg.det(batch.cell).reshape(-1, 1)
        return (
            c * volume,
            torch.zeros_like(batch.forces),
            c * torch.eye(3, dtype=batch.dtype).expand_as(batch.stress),
        )

    BiasedPotentialHook(bias)(HookContext(batch=batch), Stage.AFTER_COMPUTE)
    torch.testing.assert_close(batch.stress, 0.01 * torch.eye(3, dtype=torch.float64).expand(3, 3, 3))
    torch.testing.assert_close(batch.energy, torch.full((3, 1), 11.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (
            lambda b: (torch.zeros(1, 3, dtype=b.dtype), b.forces),
            r"bias energy is \[1, 3\].*energy is \[3, 1\]",
        ),
        (lambda b: (b.energy[:, 0], b.forces), r"bias energy is \[3\].*energy is \[3, 1\]"),
        (lambda b: (b.energy, b.forces.float()), r"bias forces is \[6, 3\] torch.float32.*torch.float64"),
        (lambda b: (b.energy, b.forces, b.stress[:1]), r"bias stress is \[1, 3, 3\].*\[3, 3, 3\]"),
        (lambda b: b.energy, "must return"),
    ],
)
def test_wrong_shape_or_dtype_is_an_error_with_both_and_nothing_broadcasts(batch, bias, message):
    with pytest.raises(ValueError, match=message):
        BiasedPotentialHook(bias)(HookContext(batch=batch), Stage.AFTER_COMPUTE)
