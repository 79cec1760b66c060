"""ASE both ways without loss: ``Atoms`` to :class:`AtomicData` and back.

====================================  ==========================================================
ASE                                   here
====================================  ==========================================================
``positions, numbers, cell, pbc``     the same; an all-zero cell is no cell
``momenta``                           ``velocities`` (= momenta / masses)
``masses`` where set                  ``atomic_masses``
``tags``, ``initial_charges``         ``tags``, ``charges``
``FixAtoms``                          ``atom_categories`` = 1 (:data:`~nvalchemi.data.schema.FIXED`)
other constraints                     kept in ``info["constraints"]`` and restored
``info["charge"]``, ``info["spin"]``  ``charge``, ``spin``
calculator's energy, forces, …        fields of the same names; Voigt stress becomes a matrix
other per-atom arrays                 node fields of the same name
other ``info``                        ``info``
====================================  ==========================================================
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from torch import Tensor

from nvalchemi.data.atomic_data import AtomicData, standard_masses
from nvalchemi.data.schema import FIELDS, FIXED, FREE

# Position of Voigt component k (xx yy zz yz xz xy, ASE's order) in the 3 × 3 matrix.
_VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))
# What ASE's calculators return, by the level it has here. energy, forces and stress have keys of their own.
_SYSTEM_RESULTS = ("dipole", "magmom")
_NODE_RESULTS = ("magmoms", "energies")
_OWN_ARRAYS = frozenset({"numbers", "positions", "momenta", "masses", "initial_charges"})
_INFO_FIELDS = ("charge", "spin")


def voigt_to_matrix(stress: Any) -> np.ndarray:
    """Symmetric 3 × 3 matrix from six Voigt components (xx yy zz yz xz xy), or from nine in a row.

    >>> voigt_to_matrix([1, 2, 3, 4, 5, 6]).tolist()
    [[1.0, 6.0, 5.0], [6.0, 2.0, 4.0], [5.0, 4.0, 3.0]]
    """
    values = np.asarray(stress, dtype=float)
    if values.shape == (6,):
        matrix = np.empty((3, 3))
        for value, (i, j) in zip(values, _VOIGT, strict=True):
            matrix[i, j] = matrix[j, i] = value
        return matrix
    if values.size == 9:
        return values.reshape(3, 3)
    raise ValueError(f"stress must have 6 (Voigt) or 9 components, got shape {list(values.shape)}")


def matrix_to_voigt(stress: Any) -> np.ndarray:
    """Six Voigt components (xx yy zz yz xz xy) of the symmetric part of a 3 × 3 matrix.

    >>> matrix_to_voigt([[1, 6, 5], [6, 2, 4], [5, 4, 3]]).tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    matrix = np.asarray(stress, dtype=float)
    return np.array([(matrix[i, j] + matrix[j, i]) / 2 for i, j in _VOIGT])


def from_atoms(
    atoms: Atoms,
    *,
    energy_key: str = "energy",
    forces_key: str = "forces",
    stress_key: str = "stress",
    fields: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    cls: type[AtomicData] = AtomicData,
) -> Any:
    """Convert an ASE ``Atoms`` (see the table at the top of this module).

    Parameters
    ----------
    atoms : ase.Atoms
        The structure. Results of its calculator are taken when they belong to the present positions; nothing is computed.
    energy_key, forces_key, stress_key : str
        Where labels are: looked up among the calculator's results, then in ``atoms.info`` and ``atoms.arrays``. What is not
        found stays absent.
    fields : mapping of str to str, optional
        Further entries of ``atoms.info`` (to system fields) and ``atoms.arrays`` (to node fields), as source → field name.
    device, dtype : optional
        Device and floating-point type of the result.
    cls : type, default AtomicData
        Class to make.

    Returns
    -------
    AtomicData

    Examples
    --------
    >>> from ase.build import molecule
    >>> data = AtomicData.from_atoms(molecule("H2O"))
    >>> data.pbc.any().item(), "cell" in data, "forces" in data
    (False, False, False)
    """
    reader = _Reader(atoms, device, dtype)
    for source, name in {energy_key: "energy", forces_key: "forces", stress_key: "stress", **(fields or {})}.items():
        reader.take(source, name)
    reader.take_results()
    reader.take_arrays()
    reader.take_info()
    cell = np.array(atoms.cell)
    data = cls(
        positions=reader.float_tensor(atoms.positions),
        atomic_numbers=torch.tensor(atoms.numbers, dtype=torch.int64, device=device),
        info=reader.info,
        cell=reader.float_tensor(cell) if cell.any() else None,
        pbc=torch.tensor(np.array(atoms.pbc), device=device),
        **reader.known,
    )
    for name, value in reader.node_fields.items():
        data.add_node_property(name, value)
    for name, value in reader.system_fields.items():
        data.add_system_property(name, value)
    return data


class _Reader:
    """Sorts what an ``Atoms`` carries into schema fields, custom fields and info."""

    def __init__(self, atoms: Atoms, device: torch.device | str | None, dtype: torch.dtype) -> None:
        self.atoms, self.device, self.dtype = atoms, device, dtype
        self.info: dict[str, Any] = dict(atoms.info)
        self.arrays: dict[str, np.ndarray] = {k: v for k, v in atoms.arrays.items() if k not in _OWN_ARRAYS}
        self.results: dict[str, Any] = {}
        if atoms.calc is not None:
            for name in atoms.calc.results:
                # Without allowing a calculation, ASE answers None for results of other positions.
                value = atoms.calc.get_property(name, atoms, allow_calculation=False)
                if value is not None:
                    self.results[name] = value
        self.known: dict[str, Tensor] = {}
        self.node_fields: dict[str, Tensor] = {}
        self.system_fields: dict[str, Tensor] = {}

    def float_tensor(self, values: Any) -> Tensor:
        return torch.tensor(np.asarray(values), dtype=self.dtype, device=self.device)

    def tensor(self, values: Any) -> Tensor:
        array = np.asarray(values)
        if array.dtype.kind == "f":
            return self.float_tensor(array)
        return torch.tensor(array, dtype=torch.bool if array.dtype.kind == "b" else torch.int64, device=self.device)

    def take(self, source: str, name: str) -> None:
        """Field ``name`` from wherever the key ``source`` is."""
        per_atom = source not in self.results and source not in self.info and source in self.arrays
        for place in (self.results, self.info, self.arrays):
            if source in place:
                value = place.pop(source)
                break
        else:
            return
        if name == "stress":
            value = voigt_to_matrix(value)[None]
        if name in FIELDS:
            floats = FIELDS[name].kind == "float"
            self.known[name] = self.float_tensor(value) if floats else self.tensor(value)
        elif per_atom:
            self.node_fields[name] = self.tensor(value)
        else:
            self.system_fields[name] = self.tensor(np.asarray(value)[None])

    def take_results(self) -> None:
        free_energy = self.results.get("free_energy")
        energy = self.known.get("energy")
        if free_energy is not None and (energy is None or self.float_tensor(free_energy) != energy):
            self.system_fields["free_energy"] = self.float_tensor([[free_energy]])
        for name in _SYSTEM_RESULTS:
            if name in self.results:
                self.take(name, name)
        for name in _NODE_RESULTS:
            if name in self.results:
                self.node_fields[name] = self.float_tensor(self.results[name])
        if "charges" in self.results:
            self.known["charges"] = self.float_tensor(self.results["charges"])

    def take_arrays(self) -> None:
        atoms = self.atoms
        if atoms.has("masses"):
            self.known["atomic_masses"] = self.float_tensor(atoms.get_masses())
        if atoms.has("momenta"):
            self.known["velocities"] = self.float_tensor(atoms.get_velocities())
        if atoms.has("initial_charges"):
            charges = self.float_tensor(atoms.get_initial_charges())
            if "charges" in self.known:
                self.node_fields["initial_charges"] = charges
            else:
                self.known["charges"] = charges
        fixed = np.zeros(len(atoms), dtype=np.int64)
        others = []
        for constraint in atoms.constraints:
            if isinstance(constraint, FixAtoms):
                fixed[constraint.index] = FIXED
            else:
                others.append(constraint)
        if fixed.any() and "atom_categories" not in self.arrays:
            self.known["atom_categories"] = torch.tensor(fixed, device=self.device)
        if others:
            self.info["constraints"] = others
        texts: dict[str, np.ndarray] = {}
        for name, array in self.arrays.items():
            if name in self.known or name in self.node_fields:
                continue
            if array.dtype.kind not in "fiub" or not name.isidentifier() or name.startswith("_"):
                texts[name] = array
            elif name in FIELDS and FIELDS[name].level == "node":
                self.known[name] = self.float_tensor(array) if FIELDS[name].kind == "float" else self.tensor(array)
            else:
                self.node_fields[name] = self.tensor(array)
        if texts:
            self.info["arrays"] = texts

    def take_info(self) -> None:
        for name in _INFO_FIELDS:
            if name not in self.known and np.asarray(self.info.get(name)).dtype.kind in "fiu":
                self.known[name] = self.tensor(self.info.pop(name)).reshape(1, 1)


def to_atoms(data: AtomicData) -> Atoms:
    """Convert to an ASE ``Atoms`` (see the table at the top of this module).

    Energies, forces and stress become results of a ``SinglePointCalculator``; labels that are NaN are left out. Neighbour lists
    and the working state of integrators are not written.
    """
    info = dict(data.info)
    constraints = list(info.pop("constraints", ()))
    texts: Mapping[str, np.ndarray] = info.pop("arrays", {})
    atoms = Atoms(
        numbers=_numpy(data.atomic_numbers),
        positions=_numpy(data.positions),
        cell=_numpy(data.cell[0]) if "cell" in data else None,
        pbc=_numpy(data.pbc[0]),
        info=info,
    )
    for name, array in texts.items():
        atoms.set_array(name, array)
    masses = data.atomic_masses
    if not torch.equal(masses, standard_masses(masses.dtype, masses.device).index_select(0, data.atomic_numbers)):
        atoms.set_masses(_numpy(masses))
    if "velocities" in data:
        atoms.set_velocities(_numpy(data.velocities))
    elif "momenta" in data:
        atoms.set_momenta(_numpy(data.momenta))
    if "tags" in data:
        atoms.set_tags(_numpy(data.tags))
    if "atom_categories" in data:
        categories = _numpy(data.atom_categories)
        if (categories == FIXED).any():
            constraints.append(FixAtoms(indices=np.flatnonzero(categories == FIXED)))
        if not np.isin(categories, (FREE, FIXED)).all():
            atoms.set_array("atom_categories", categories)
    results = _results(data)
    if "initial_charges" in data:
        results["charges"] = _numpy(data.charges)
        atoms.set_initial_charges(_numpy(data["initial_charges"]))
    elif "charges" in data:
        atoms.set_initial_charges(_numpy(data.charges))
    for name, tensor in data.items():
        if name in _WRITTEN or name in results or (name in FIELDS and not FIELDS[name].persistent):
            continue
        match data.level(name):
            case "node":
                atoms.set_array(name, _numpy(tensor))
            case "system":
                atoms.info[name] = _plain(tensor)
            case "edge":
                pass  # ASE has no place for edges.
    atoms.set_constraint(constraints)
    if results:
        atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


_WRITTEN = frozenset(
    "positions atomic_numbers atomic_masses velocities momenta cell pbc tags atom_categories charges initial_charges "
    "energy forces stress free_energy dipole magmom magmoms energies".split()
)


def _results(data: AtomicData) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("energy", "free_energy", "magmom"):
        if name in data:
            results[name] = float(data[name])
    for name in ("forces", "magmoms", "energies"):
        if name in data:
            results[name] = _numpy(data[name])
    if "dipole" in data:
        results["dipole"] = _numpy(data.dipole[0])
    if "stress" in data:
        results["stress"] = matrix_to_voigt(_numpy(data.stress[0]))
    return {name: value for name, value in results.items() if not np.isnan(value).all()}


def _numpy(tensor: Tensor) -> np.ndarray:
    """Array that shares no memory with the tensor."""
    return tensor.detach().cpu().numpy().copy()


def _plain(tensor: Tensor) -> Any:
    """Python number for a single value, array without the leading 1 for more."""
    value = _numpy(tensor)
    return value.reshape(-1)[0].item() if value.size == 1 else value.reshape(value.shape[1:])
