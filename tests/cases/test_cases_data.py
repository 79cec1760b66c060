"""Cases from the field: structures, files, batches."""

import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms

from nvalchemi.data import AtomicData, read, write
from nvalchemi.dynamics import NVE
from nvalchemi.dynamics.hooks import SnapshotHook
from nvalchemi.dynamics.sinks import ExtxyzTrajectory
from nvalchemi.models.derivatives import graph_periodicity


def test_molecule_without_calculator_has_neither_cell_nor_labels():
    data = AtomicData.from_atoms(molecule("H2O"))
    assert set(data.keys()) == {"positions", "atomic_numbers", "atomic_masses", "pbc"}
    assert data.pbc.tolist() == [[False, False, False]]
    assert not data.to_atoms().cell[:].any()


@pytest.mark.parametrize("suffix", ["extxyz", "traj", "db", "json", "aselmdb", "zarr"])
def test_file_data_to_atoms_file_gives_the_same_set(suffix):
    if suffix == "aselmdb":
        pytest.importorskip("ase_db_backends", reason="LMDB comes with the package ase-db-backends")
    atoms = molecule("CH3OH", vacuum=4.0)
    atoms.pbc = [True, True, False]
    atoms.set_momenta(np.linspace(-1, 1, 18).reshape(6, 3))
    atoms.set_tags([0, 1, 2, 0, 1, 2])
    atoms.set_initial_charges(np.linspace(-0.5, 0.5, 6))
    atoms.set_constraint(FixAtoms([1, 4]))
    atoms.info = {"charge": -1, "spin": 2, "name": "methanol", "scan": np.array([1.5, 2.5])}
    atoms.calc = SinglePointCalculator(atoms, energy=-3.5, forces=atoms.positions - 1, stress=np.arange(6.0))
    ase.io.write("start.extxyz", atoms)
    (data,) = read("start.extxyz", dtype=torch.float64)
    write(f"there.{suffix}", data)
    (back,) = read(f"there.{suffix}", dtype=torch.float64)
    write("end.extxyz", back)
    start, end = ase.io.read("start.extxyz"), ase.io.read("end.extxyz")
    assert set(start.arrays) == set(end.arrays)
    for name, array in start.arrays.items():
        np.testing.assert_allclose(end.arrays[name], array, atol=1e-8, err_msg=name)
    assert start.info.keys() == end.info.keys()
    assert all(np.all(start.info[name] == end.info[name]) for name in start.info)
    assert (start.cell == end.cell).all()
    assert (start.pbc == end.pbc).all()
    assert [c.todict() for c in start.constraints] == [c.todict() for c in end.constraints]
    for name, value in start.calc.results.items():
        np.testing.assert_allclose(end.calc.results[name], value, atol=1e-8, err_msg=name)
    assert (back.charge.item(), back.spin.item(), back.info["name"]) == (-1, 2, "methanol")


@pytest.mark.parametrize("suffix", ["extxyz", "db", "json", "zarr"])
def test_custom_atom_field_survives_files_that_have_a_place_for_it(suffix):
    data = AtomicData.from_atoms(molecule("H2O"))
    data.add_node_property("shielding", torch.rand(3, 2))
    write(f"a.{suffix}", [data, data])
    for back in read(f"a.{suffix}"):
        assert torch.allclose(back.shielding, data.shielding, atol=1e-7)


def test_custom_atom_field_lost_in_a_trajectory_file_is_named():
    data = AtomicData.from_atoms(molecule("H2O"))
    data.add_node_property("shielding", torch.rand(3, 2))
    with pytest.warns(UserWarning, match=r"a\.traj: format 'traj' has no place for .* shielding"):
        write("a.traj", data)


def test_charge_and_spin_survive_collate_index_append_a_step_and_a_snapshot(argon, chain, join):
    states = {2: (0, 1), 3: (1, 2), 4: (-1, 2)}  # by the number of atoms
    structures = []
    for n, (charge, spin) in states.items():
        data = chain(n)
        data.charge, data.spin = torch.tensor([[charge]]), torch.tensor([[spin]])
        structures.append(data)
    batch = join(*structures)
    picked = batch[[2, 0]]
    picked.append(batch[1])
    NVE(argon, 1.0, hooks=[SnapshotHook(ExtxyzTrajectory("path.extxyz"))]).run(picked, 1)
    back = read("path.extxyz")
    assert [data.num_nodes for data in back] == [4, 2, 3]
    assert {d.num_nodes: (d.charge.item(), d.spin.item()) for d in back} == states


def test_transposed_cell_gives_the_path_of_its_contiguous_copy(argon, join):
    # A triclinic cell, for which the transpose is another one.
    atoms = bulk("Ar", "fcc", 5.3) * (2, 1, 1)
    atoms.rattle(0.1, seed=0)
    plain = AtomicData.from_atoms(atoms, dtype=torch.float64)
    view = plain.clone()
    view.cell = plain.cell.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.cell.is_contiguous()
    batches = join(plain), join(view)
    batches[1].cell = view.cell
    for batch in batches:
        NVE(argon, 2.0).run(batch, 20)
    assert torch.equal(batches[0].positions, batches[1].positions)
    assert torch.equal(batches[0].stress, batches[1].stress)


def test_lone_atom_beside_a_dimer_out_of_reach_has_a_force_of_shape_1_3(argon, chain, join):
    batch = NVE(argon, 1.0).run(join(chain(1), chain(2, distance=20.0)), 1)
    assert int(batch.num_neighbors.sum()) == 0
    assert torch.equal(batch[0].forces, torch.zeros(1, 3, dtype=torch.float64))
    assert batch.energy.tolist() == [[0.0], [0.0]]


def test_appending_a_structure_without_velocities_is_an_error_or_a_fill(crystal, join):
    moving, still = crystal(), crystal()
    moving.velocities = torch.ones(4, 3, dtype=torch.float64)
    batch = join(moving)
    with pytest.raises(ValueError, match="'velocities' is missing in graph 1 of 2"):
        batch.append(still)
    assert batch.num_graphs == 1
    batch.append(still, missing="fill")
    assert bool((batch.velocities[:4] == 1).all())
    assert bool(batch.velocities[4:].isnan().all())


def test_molecules_and_crystals_in_one_batch_come_back_as_they_were(crystal, chain, join):
    batch = join(chain(2), crystal(), chain(1))
    assert not graph_periodicity(batch).all_full
    assert batch.cell[[0, 2]].abs().sum() == 0
    for data, cells in zip(batch, (False, True, False), strict=True):
        ase.io.write("one.extxyz", data.to_atoms())
        back = read("one.extxyz", 0)
        assert ("cell" in back, bool(back.pbc.all())) == (cells, cells)
