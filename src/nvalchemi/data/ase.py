"""ASE both ways without loss: ``Atoms`` to :class:`AtomicData` and back.

=========================================  ==========================================================
ASE                                        here
=========================================  ==========================================================
``positions, numbers, cell, pbc``          the same; an all-zero cell is no cell
``momenta``                                ``velocities`` (= momenta / masses)
``masses`` where set                       ``atomic_masses``
``tags``, ``initial_charges``              ``tags``, ``charges``
``FixAtoms``                               ``atom_categories`` = 1 (:data:`~nvalchemi.data.schema.FIXED`)
other constraints                          kept in ``info["constraints"]`` and restored
``info``'s charge, spin, virial, dipole    fields of the same names, where they have the right size
results of the calculator                  fields of the same names; Voigt stress becomes a matrix;
                                           ``initial_charges`` then is a field beside ``charges``
other per-atom arrays of numbers           node fields of the same name
other per-atom arrays                      kept in ``info["arrays"]`` and restored
``celldisp`` where set                     kept in ``info["celldisp"]`` and restored
other ``info``                             ``info``
=========================================  ==========================================================

On the way back further system fields become entries of ``info``; ``from_atoms(..., fields={"name": "name"})``
makes them fields again. The state of a run (``status``, ``system_id``, ``system_step``) is written so too,
but never taken from there.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, cast

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixConstraint
from torch import Tensor

from nvalchemi.data._container import is_field_name
from nvalchemi.data.atomic_data import AtomicData, standard_masses
from nvalchemi.data.schema import FIELDS, FIXED, FREE

# Position of Voigt component k (xx yy zz yz xz xy, ASE's order) in the 3 × 3 matrix.
_VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))
# ASE's names of results.
_LABELS = ("energy", "forces", "stress")
_NODE_RESULTS = ("forces", "charges", "magmoms", "energies", "stresses", "born_effective_charges")
_SYSTEM_RESULTS = ("energy", "free_energy", "stress", "dipole", "magmom", "dielectric_tensor", "polarization")
# Arrays of ASE and fields of the constructor that are treated one by one.
_OWN = frozenset(["numbers", "positions", "momenta", "masses", "initial_charges", "atomic_numbers"])
# Fields that to_atoms puts in places of their own.
_PLACED = frozenset(
    [
        "positions",
        "atomic_numbers",
        "atomic_masses",
        "velocities",
        "momenta",
        "cell",
        "pbc",
        "atom_categories",
        "initial_charges",
    ]
)
BOOKKEEPING = frozenset(["spacegroup_kinds"])
"""What ASE's readers note for themselves; as a field it would keep a cif from joining a structure of another file."""
_INFO_FIELDS = ("charge", "spin", "virial", "dipole")


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
        The structure. Results of its calculator are taken when they belong to the present positions; nothing
        is computed.
    energy_key, forces_key, stress_key : str
        Where labels are: looked up among the calculator's results, then in ``atoms.info`` and
        ``atoms.arrays``. What is not found (or is ``None``) stays absent.
    fields : mapping of str to str, optional
        Further entries of ``atoms.info`` (to system fields) and ``atoms.arrays`` (to node fields), as source
        → field name.
    device, dtype : optional
        Device and floating-point type of the result.
    cls : type, default AtomicData
        Class to make.

    Returns
    -------
    AtomicData

    Raises
    ------
    ValueError
        A label is no number or has the wrong shape; the message names it.

    Examples
    --------
    >>> from ase.build import molecule
    >>> data = AtomicData.from_atoms(molecule("H2O"))
    >>> data.pbc.any().item(), "cell" in data, "forces" in data
    (False, False, False)
    """
    if not isinstance(atoms, Atoms):
        raise TypeError(f"from_atoms takes one ase.Atoms, not a {type(atoms).__name__}")
    reader = _Reader(atoms, device, dtype)
    keys = {"energy": energy_key, "forces": forces_key, "stress": stress_key}
    for name, source in [*keys.items(), *((name, source) for source, name in (fields or {}).items())]:
        reader.take(source, name)
    reader.take_results()
    reader.take_momenta()
    reader.take_constraints()
    reader.take_arrays()
    reader.take_info()
    cell = np.array(atoms.cell)
    data = cls(
        positions=reader.tensor(atoms.positions, "float"),
        atomic_numbers=reader.tensor(atoms.numbers),
        info=reader.info,
        cell=reader.tensor(cell, "float") if cell.any() else None,
        pbc=reader.tensor(np.array(atoms.pbc)),
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
        self.arrays: dict[str, np.ndarray] = {k: v for k, v in atoms.arrays.items() if k not in _OWN}
        self.left: dict[str, np.ndarray] = {k: v for k, v in atoms.arrays.items() if k == "atomic_numbers"}
        self.results: dict[str, Any] = {}
        if isinstance(atoms.calc, BaseCalculator) and not atoms.calc.check_state(atoms):
            # No change since the calculation: the results belong to these positions.
            self.results = {name: value for name, value in atoms.calc.results.items() if value is not None}
        self.known: dict[str, Any] = {}
        self.node_fields: dict[str, Tensor] = {}
        self.system_fields: dict[str, Tensor] = {}

    def tensor(self, values: Any, kind: str = "number") -> Tensor:
        array = np.asarray(values)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"expected numbers, got {str(values)[:40]!r} ({array.dtype})")
        if kind == "float" or array.dtype.kind == "f":
            return torch.tensor(array.astype(np.float64), device=self.device).to(self.dtype)
        return torch.tensor(
            array.astype(np.bool_ if array.dtype.kind == "b" else np.int64), device=self.device
        )

    def take(self, source: str, name: str) -> None:
        """Field ``name`` from wherever the key ``source`` is; nothing happens where it is not or is ``None``."""
        field = FIELDS.get(name)
        places = [self.results, self.info] if field is not None and field.level == "system" else []
        for place in places or [self.results, self.info, self.arrays]:
            if place.get(source) is None:
                continue
            value = place.pop(source)
            try:
                value = self.tensor(
                    voigt_to_matrix(value) if name == "stress" else value, field.kind if field else "number"
                )
            except ValueError as error:
                raise ValueError(f"{source!r} of the Atoms cannot be the field {name!r}: {error}") from error
            if field is not None:
                self.known[name] = value
            elif place is self.arrays or (place is self.results and source in _NODE_RESULTS):
                self.node_fields[name] = value
            else:
                self.system_fields[name] = value[None] if value.ndim else value.reshape(1, 1)
            return

    def take_results(self) -> None:
        free, energy = self.results.get("free_energy"), self.known.get("energy")
        if free is not None and energy is not None and self.tensor(free, "float") == energy:
            del self.results["free_energy"]
        for name in (*_SYSTEM_RESULTS, *_NODE_RESULTS):
            if name not in _LABELS and name in self.results:
                self.take(name, name)
        initial = self.tensor(self.atoms.get_initial_charges(), "float")
        if "charges" in self.known:
            self.node_fields["initial_charges"] = initial
        elif self.atoms.has("initial_charges"):
            self.known["charges"] = initial

    def take_momenta(self) -> None:
        atoms = self.atoms
        if atoms.has("masses"):
            self.known["atomic_masses"] = self.tensor(atoms.get_masses(), "float")
        if atoms.has("momenta"):
            momenta, masses = atoms.get_momenta(), atoms.get_masses()[:, None]
            # A particle without mass (a shell, a dummy) has no velocity of its own.
            velocities = np.divide(momenta, masses, out=np.zeros_like(momenta), where=masses > 0)
            self.known["velocities"] = self.tensor(velocities, "float")

    def take_constraints(self) -> None:
        fixed = np.zeros(len(self.atoms), dtype=bool)
        others: list[FixConstraint] = []
        for constraint in self.atoms.constraints:
            if isinstance(constraint, FixAtoms):
                fixed[constraint.index] = True
            else:
                others.append(constraint)
        if fixed.any():
            categories = self.arrays.pop("atom_categories", np.full(len(fixed), FREE))
            self.known["atom_categories"] = self.tensor(np.where(fixed, FIXED, categories))
        if others:
            self.info["constraints"] = others

    def take_arrays(self) -> None:
        for name, array in self.arrays.items():
            if name in self.known or name in self.node_fields or not _fits(name, array):
                self.left[name] = array
            elif name in FIELDS:
                self.known[name] = self.tensor(array, FIELDS[name].kind)
            else:
                self.node_fields[name] = self.tensor(array)
        if self.left:
            self.info["arrays"] = self.left

    def take_info(self) -> None:
        for name in _INFO_FIELDS:
            shape = cast(tuple[int, ...], FIELDS[name].shape)
            value = self.info.get(name)
            if name in self.known or not isinstance(value, int | float | np.number | np.ndarray):
                continue
            array = np.asarray(value)
            if array.dtype.kind in "fiu" and array.size == prod(shape):
                self.known[name] = self.tensor(array, FIELDS[name].kind).reshape(1, *shape)
                del self.info[name]
        if self.atoms.get_celldisp().any():
            self.info["celldisp"] = self.atoms.get_celldisp()


def _fits(name: str, array: np.ndarray) -> bool:
    """Whether a per-atom array can be a node field: numbers, a usable name, and as the table says of that name."""
    if array.dtype.kind not in "fiub" or not is_field_name(name) or name in BOOKKEEPING:
        return False
    field = FIELDS.get(name)
    if field is None:
        return True
    right_kind = array.dtype.kind in {"float": "fiu", "int": "iu", "bool": "b", "number": "fiu"}[field.kind]
    right_shape = field.shape is None or array.shape[1:] in (
        field.shape,
        () if field.shape == (1,) else field.shape,
    )
    return field.level == "node" and field.persistent and right_kind and right_shape


def to_atoms(data: AtomicData) -> Atoms:
    """Convert to an ASE ``Atoms`` (see the table at the top of this module).

    Energies, forces and stress become results of a ``SinglePointCalculator``; labels that are NaN are left
    out. Neighbour lists and the working state of integrators are not written.
    """
    info = dict(data.info)
    constraints: list[FixConstraint] = []
    if _all_of_type(info.get("constraints"), FixConstraint):
        constraints = list(info.pop("constraints"))
    arrays: Mapping[str, np.ndarray] = {}
    if isinstance(info.get("arrays"), Mapping) and _all_of_type(list(info["arrays"].values()), np.ndarray):
        arrays = info.pop("arrays")
    atoms = Atoms(
        numbers=_numpy(data.atomic_numbers),
        positions=_numpy(data.positions),
        cell=_numpy(data.cell[0]) if "cell" in data else None,
        celldisp=info.pop("celldisp") if isinstance(info.get("celldisp"), np.ndarray) else None,
        pbc=_numpy(data.pbc[0]) if "pbc" in data else None,
        info=info,
    )
    masses = data.get("atomic_masses")
    if masses is not None and not torch.equal(
        masses, standard_masses(masses.dtype, masses.device).index_select(0, data.atomic_numbers)
    ):
        atoms.set_masses(_numpy(masses))  # pyright: ignore[reportArgumentType]
    if "velocities" in data:
        atoms.set_velocities(_numpy(data.velocities))
    elif "momenta" in data:
        atoms.set_momenta(_numpy(data.momenta))
    if "atom_categories" in data:
        categories = _numpy(data.atom_categories)
        if (categories == FIXED).any():
            constraints = [FixAtoms(indices=np.flatnonzero(categories == FIXED)), *constraints]
        if not np.isin(categories, (FREE, FIXED)).all():
            atoms.set_array("atom_categories", categories)
    if "initial_charges" not in data and "charges" in data:
        atoms.set_initial_charges(_numpy(data.charges))
    elif "initial_charges" in data and data["initial_charges"].any():
        atoms.set_initial_charges(_numpy(data["initial_charges"]))
    results: dict[str, Any] = {}
    for name, tensor in data.items():
        level, field = data.level(name), FIELDS.get(name)
        if name in _PLACED or level == "edge" or (field is not None and not field.persistent):
            continue
        if name in (_NODE_RESULTS if level == "node" else _SYSTEM_RESULTS):
            results[name] = _numpy(tensor) if level == "node" else _plain(tensor)
        elif level == "node":
            atoms.set_array(name, _numpy(tensor))
        else:
            atoms.info[name] = _plain(tensor)
    if "initial_charges" not in data:
        results.pop("charges", None)
    if "stress" in results:
        results["stress"] = matrix_to_voigt(results["stress"])
    for name, array in arrays.items():
        atoms.set_array(name, array)
    atoms.set_constraint(constraints)
    # Labels that are NaN throughout were filled in for structures that have none.
    results = {
        name: value for name, value in results.items() if not np.size(value) or not np.isnan(value).all()
    }
    if results:
        atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def _all_of_type(values: Any, kind: type) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(v, kind) for v in cast(list[Any], values))
    )


def _numpy(tensor: Tensor) -> np.ndarray:
    """Array that shares no memory with the tensor."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def _plain(tensor: Tensor) -> Any:
    """Python number for a single value, array without the leading 1 for more."""
    value = _numpy(tensor)
    return value.reshape(-1)[0].item() if value.size == 1 else value.reshape(value.shape[1:])
