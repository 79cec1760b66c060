"""AlignCellHook: structures turn until their cell is upper-triangular, and nothing else changes."""

import numpy as np
import pytest
import torch
from ase.build import bulk
from scipy.spatial.transform import Rotation

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import LBFGS, NPH, NVE, CellCoordinates, DynamicsStage, FIREVariableCell
from nvalchemi.dynamics.hooks import AlignCellHook, SnapshotHook
from nvalchemi.hooks import DynamicsContext, HookOrderWarning, NeighborListHook


def turned_crystal(seed=0, *, left_handed=False, repeat=(2, 2, 2)):
    """A strained, rattled argon crystal in any orientation, with velocities."""
    rng = np.random.default_rng(seed)
    atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat(repeat)
    strain = np.eye(3) + rng.normal(0, 0.03, (3, 3))
    rotation = Rotation.from_rotvec(rng.normal(0, 1, 3)).as_matrix()
    cell = atoms.cell.array @ strain @ rotation
    atoms.set_cell(cell[[1, 0, 2]] if left_handed else cell, scale_atoms=True)
    atoms.positions += rng.normal(0, 0.05, atoms.positions.shape)
    data = AtomicData.from_atoms(atoms, dtype=torch.float64)
    data.add_node_property("velocities", torch.as_tensor(rng.normal(0, 0.02, atoms.positions.shape)))
    return data


def align(batch, **mask):
    AlignCellHook()(DynamicsContext(batch=batch, **mask), DynamicsStage.BEFORE_STEP)


def scaled_positions(batch, graph=0):
    rows = batch.batch_idx == graph
    return batch.positions[rows] @ torch.linalg.inv(batch.cell[graph])


@pytest.mark.parametrize("left_handed", [False, True])
def test_cell_is_upper_triangular_with_the_same_lengths_angles_and_handedness(left_handed):
    batch = Batch.from_data_list([turned_crystal(seed, left_handed=left_handed) for seed in range(4)])
    before = batch.cell.clone()
    align(batch)
    after = batch.cell
    assert (after.tril(-1) == 0).all()
    torch.testing.assert_close(after @ after.mT, before @ before.mT)
    torch.testing.assert_close(torch.linalg.det(after), torch.linalg.det(before))
    assert (after.diagonal(dim1=-2, dim2=-1) > 0).tolist() == [[not left_handed, True, True]] * 4


def test_scaled_positions_and_speeds_stay_and_vectors_turn_together():
    batch = Batch.from_data_list([turned_crystal(1), turned_crystal(2)])
    scaled = [scaled_positions(batch, g) for g in (0, 1)]
    speed = batch.velocities.norm(dim=-1)
    along = (batch.positions * batch.velocities).sum(-1)
    align(batch)
    for graph in (0, 1):
        torch.testing.assert_close(scaled_positions(batch, graph), scaled[graph])
    torch.testing.assert_close(batch.velocities.norm(dim=-1), speed)
    torch.testing.assert_close((batch.positions * batch.velocities).sum(-1), along)


def test_forces_and_stress_turn_into_those_the_model_gives_for_the_turned_structure(argon):
    batch = Batch.from_data_list([turned_crystal(3)])
    NVE(argon, dt=1.0).run(batch, 0)
    energy, stress = batch.energy.clone(), batch.stress.clone()
    align(batch)
    forces, turned_stress = batch.forces.clone(), batch.stress.clone()
    assert (stress - turned_stress).abs().max() > 1e-4  # the test turns something
    NVE(argon, dt=1.0).run(batch, 0)
    torch.testing.assert_close(batch.energy, energy)
    torch.testing.assert_close(batch.forces, forces)
    torch.testing.assert_close(batch.stress, turned_stress)


def test_dynamics_goes_on_as_it_would_have_without_a_new_neighbour_list(argon):
    plain, aligned = (Batch.from_data_list([turned_crystal(4)]) for _ in range(2))
    NVE(argon, dt=2.0).run(plain, 30)
    neighbors = NeighborListHook(argon.model_config.neighbor_config, skin=1.0)
    NVE(argon, dt=2.0, hooks=[AlignCellHook(), neighbors]).run(aligned, 30)
    assert (aligned.cell.tril(-1) == 0).all()
    torch.testing.assert_close(aligned.energy, plain.energy, rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled_positions(aligned), scaled_positions(plain), rtol=0, atol=1e-11)
    assert neighbors.num_builds == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda model, hooks: FIREVariableCell(model, hooks=hooks),
        # A limit on the step that never acts: it looks at the rows of the cell part, which turning mixes.
        lambda model, hooks: LBFGS(model, coordinates=CellCoordinates(), max_step=50.0, hooks=hooks),
        lambda model, hooks: NPH(
            model, 2.0, pressure=0.0, barostat_time=200.0, pressure_coupling="triclinic", hooks=hooks
        ),
    ],
    ids=["FIREVariableCell", "LBFGS", "NPH"],
)
def test_what_engines_remember_turns_along_where_the_cell_moves(argon, make):
    plain, aligned = (Batch.from_data_list([turned_crystal(5, repeat=(2, 2, 2))]) for _ in range(2))
    make(argon, []).run(plain, 20)
    make(argon, [AlignCellHook(frequency=7)]).run(aligned, 20)
    torch.testing.assert_close(aligned.energy, plain.energy, rtol=1e-10, atol=0)
    torch.testing.assert_close(scaled_positions(aligned), scaled_positions(plain), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        aligned.cell @ aligned.cell.mT, plain.cell @ plain.cell.mT, rtol=1e-9, atol=1e-8
    )


def test_edge_vectors_and_own_fields_turn_along():
    batch = Batch.from_data_list([turned_crystal(6), turned_crystal(7)])
    pairs = torch.tensor([[0, 1], [40, 41], [41, 40]])
    shifts = torch.tensor([[1.0, -1.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    graph = torch.tensor([0, 1, 1])
    cartesian = lambda: (shifts.unsqueeze(1) @ batch.cell[graph]).squeeze(1)  # noqa: E731
    batch.set_edges(torch.tensor([0, 1, 3]), neighbor_list=pairs, shifts=cartesian())
    batch.add_key("field", batch.cell[:, 2].clone(), "system")
    batch.add_key("gradient", batch.cell.mT @ batch.cell, "system")
    hook = AlignCellHook(vectors=["field"], tensors=["gradient"])
    hook(DynamicsContext(batch=batch), DynamicsStage.BEFORE_STEP)
    torch.testing.assert_close(batch.shifts, cartesian())
    torch.testing.assert_close(batch.field, batch.cell[:, 2])
    torch.testing.assert_close(batch.gradient, batch.cell.mT @ batch.cell)


def test_left_to_the_bit_are_aligned_cells_molecules_slabs_without_third_vector_and_inactive_structures(
    cluster,
):
    straight, slab = turned_crystal(8), turned_crystal(9)
    straight.cell = torch.tensor([[[9.0, 1.0, 2.0], [0.0, 8.0, -1.0], [0.0, 0.0, -7.0]]], dtype=torch.float64)
    slab.cell[0, 2] = 0
    inactive, turns = turned_crystal(10), turned_crystal(11)
    molecule = cluster(3)
    molecule.add_node_property("velocities", torch.ones(3, 3, dtype=torch.float64))
    batch = Batch.from_data_list([straight, slab, molecule, inactive, turns])
    inactive_rows = batch.batch_idx == 3
    batch.velocities[inactive_rows] = torch.nan  # as in a structure that failed
    before = batch.clone()
    align(batch, active_graph_mask=torch.tensor([True, True, True, False, True]))
    assert torch.equal(batch.cell[:4], before.cell[:4])
    same = batch.batch_idx < 4
    assert torch.equal(batch.positions[same], before.positions[same])
    assert torch.equal(batch.velocities[batch.batch_idx < 3], before.velocities[before.batch_idx < 3])
    assert (batch.cell[4].tril(-1) == 0).all()
    assert batch.velocities[~same].isfinite().all()


def test_aligning_twice_changes_nothing():
    batch = Batch.from_data_list([turned_crystal(12)])
    align(batch)
    once = batch.clone()
    align(batch)
    assert torch.equal(batch.positions, once.positions)


def test_single_precision_keeps_lengths():
    batch = Batch.from_data_list([turned_crystal(13)]).to(dtype=torch.float32)
    before = batch.cell.clone()
    align(batch)
    assert batch.positions.dtype == batch.cell.dtype == torch.float32
    torch.testing.assert_close(batch.cell @ batch.cell.mT, before @ before.mT)
    assert (batch.cell.tril(-1) == 0).all()


def test_a_snapshot_before_it_at_the_same_stage_is_questioned(argon):
    class Sink:
        def write(self, batch, mask=None): ...

        def close(self): ...

    engine = NVE(argon, dt=1.0, hooks=[SnapshotHook(Sink(), stage=DynamicsStage.BEFORE_STEP)])
    with pytest.warns(HookOrderWarning, match="SnapshotHook is registered before AlignCellHook"):
        engine.register_hook(AlignCellHook())
