"""pymatgen both ways."""

import numpy as np
import pytest
import torch

from nvalchemi.data import AtomicData, Batch

core = pytest.importorskip("pymatgen.core")


def test_a_structure_comes_back():
    lattice = core.Lattice.from_parameters(3.0, 4.0, 5.0, 80, 95, 110)
    structure = core.Structure(lattice, ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.4]])
    data = AtomicData.from_structure(structure, dtype=torch.float64)
    assert np.allclose(data.cell[0], lattice.matrix)
    assert np.allclose(data.positions, structure.cart_coords)
    assert data.pbc.all()
    back = Batch.from_data_list([data])[0].to_structure()
    assert back.composition == structure.composition
    assert np.allclose(back.lattice.matrix, lattice.matrix)
    assert np.allclose(back.frac_coords, structure.frac_coords)


def test_a_molecule_comes_back():
    water = core.Molecule(["O", "H", "H"], [[0, 0, 0.12], [0, 0.76, -0.48], [0, -0.76, -0.48]])
    data = AtomicData.from_structure(water, dtype=torch.float64)
    assert "cell" not in data
    assert not data.pbc.any()
    back = data.to_structure()
    assert isinstance(back, core.Molecule)
    assert np.allclose(back.cart_coords, water.cart_coords)


def test_site_properties_become_fields():
    structure = core.Structure(core.Lattice.cubic(3), ["Fe"], [[0, 0, 0]], site_properties={"weight": [2.5]})
    assert AtomicData.from_structure(structure).weight.tolist() == [2.5]


def test_disorder_is_refused():
    mixed = core.Structure(core.Lattice.cubic(3), [{"Fe": 0.5, "Ni": 0.5}], [[0, 0, 0]])
    with pytest.raises(ValueError, match="ordered"):
        AtomicData.from_structure(mixed)
