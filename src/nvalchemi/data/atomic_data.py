"""One structure: :class:`AtomicData`."""

from collections.abc import Mapping
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data._container import FieldContainer
from nvalchemi.data.schema import FIELDS, Field, Kind, Level
from nvalchemi.typing import Float

if TYPE_CHECKING:
    from ase import Atoms
    from pymatgen.core import Molecule, Structure


class AtomicData(FieldContainer):
    """One structure: atoms, an optional cell and any number of fields.

    Parameters
    ----------
    positions : Tensor or array, shape [n, 3]
        Cartesian positions, Å. A tensor keeps its floating-point type (and is not copied); anything else
        takes ``dtype``.
    atomic_numbers : Tensor or array, shape [n]
        Atomic numbers, 0 (a dummy atom) to 118.
    info : Mapping, optional
        Anything that is not a tensor (names, provenance); travels along.
    dtype : torch.dtype, optional
        Floating-point type for values that are not tensors; default: that of ``positions``, float32 if that
        is no tensor.
    **fields : Tensor or array
        Fields of the schema table (:data:`nvalchemi.data.schema.FIELDS`). A system field may leave out its
        leading 1: ``cell=[3, 3]``, ``energy=-1.0`` and ``pbc=True`` are understood. ``None`` means absent.
        Floating-point tensors are widened to the type of the positions; a wider one is an error, for it would
        lose digits.

    Raises
    ------
    ValueError
        Wrong shape, dtype or device, a non-finite cell, an unknown element, a neighbour that does not exist
        or an unknown field name. The message names the field, what was expected and what was given.

    Notes
    -----
    ``atomic_masses`` default to the standard atomic weights. ``pbc`` defaults to periodic along all three
    vectors when a cell is given, and to not periodic without one. Other names go through
    :meth:`add_node_property`, :meth:`add_edge_property` and :meth:`add_system_property`.

    Examples
    --------
    >>> import torch
    >>> water = AtomicData(
    ...     positions=torch.tensor([[0.0, 0.0, 0.12], [0.0, 0.76, -0.48], [0.0, -0.76, -0.48]]),
    ...     atomic_numbers=torch.tensor([8, 1, 1]),
    ... )
    >>> water.num_nodes, water.pbc.tolist(), "cell" in water
    (3, [[False, False, False]], False)
    """

    _info: dict[str, Any]

    def __init__(
        self,
        positions: Any,
        atomic_numbers: Any,
        *,
        info: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        attributes = vars(self)
        attributes["_levels"] = {}
        attributes["_scalars"] = frozenset()
        attributes["_info"] = dict(info) if info else {}
        if not isinstance(positions, Tensor):
            positions = _as_tensor("positions", positions, "float", dtype or torch.float32)
            positions = positions if positions.numel() else positions.reshape(0, 3)
        if positions.ndim != 2 or positions.shape[1] != 3 or not positions.dtype.is_floating_point:
            raise ValueError(
                f"field 'positions' must have shape [num_atoms, 3] and a floating-point type, "
                f"got {list(positions.shape)} of {positions.dtype}"
            )
        self._store("positions", positions, "node")
        self._set("atomic_numbers", atomic_numbers, "node")
        attributes["atomic_numbers"] = attributes["atomic_numbers"].long()
        if fields.get("atomic_masses") is None:
            self._store("atomic_masses", self._standard_masses(), "node")
        for name, value in fields.items():
            if value is not None:
                if name not in FIELDS:
                    raise ValueError(
                        f"unknown field {name!r}: add it with add_node_property, add_edge_property or "
                        "add_system_property"
                    )
                self._set(name, value, FIELDS[name].level)
        # The sum is the cheap test; it may overflow where every number is finite.
        if "cell" in self._levels and not (
            isfinite(attributes["cell"].sum()) or attributes["cell"].isfinite().all()
        ):
            raise ValueError(
                f"field 'cell' of {self._describe()} must be finite, got {attributes['cell'][0].tolist()}"
            )
        if "pbc" not in self._levels:
            periodic = "cell" in self._levels and bool(attributes["cell"].any())
            self._store("pbc", torch.full((1, 3), periodic, device=positions.device), "system")

    # ------------------------------------------------------------------ structure
    @property
    def num_graphs(self) -> int:
        """Number of structures, 1."""
        return 1

    @property
    def num_nodes(self) -> int:
        """Number of atoms."""
        return vars(self)["positions"].shape[0]

    @property
    def num_edges(self) -> int:
        """Number of edges (pairs in the neighbour list), 0 without one."""
        for name, level in self._levels.items():
            if level == "edge":
                return vars(self)[name].shape[0]
        return 0

    def _copy_with(self, tensors: Mapping[str, Tensor]) -> Self:
        new = super()._copy_with(tensors)
        vars(new)["_info"] = dict(self._info)
        return new

    @property
    def info(self) -> dict[str, Any]:
        """What is not a tensor: names, provenance, ASE's ``info``."""
        return self._info

    @property
    def chemical_formula(self) -> str:
        """Formula in Hill order.

        >>> AtomicData(positions=[[0, 0, 0], [0, 0, 1.1]], atomic_numbers=[6, 8]).chemical_formula
        'CO'
        """
        from ase.formula import Formula

        return Formula.from_list(self._symbols()).format("hill")

    def _symbols(self) -> list[str]:
        from ase.data import chemical_symbols

        return [chemical_symbols[z] for z in vars(self)["atomic_numbers"].tolist()]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {list(t.shape)}" for name, t in self.items())
        return f"AtomicData({self.num_nodes} atoms; {fields})"

    # ------------------------------------------------------------------ fields
    def add_node_property(self, name: str, values: Any) -> None:
        """Add a field with one row per atom, shape [n, ...]."""
        self.add_key(name, values, "node")

    def add_edge_property(self, name: str, values: Any) -> None:
        """Add a field with one row per edge, shape [e, ...]."""
        self.add_key(name, values, "edge")

    def add_system_property(self, name: str, values: Any) -> None:
        """Add a field of the whole structure, shape [1, ...], or a scalar of shape []."""
        self.add_key(name, values, "system")

    def add_key(self, key: str, values: Any, level: str | None = None) -> None:
        """Add or replace a field; arrays and numbers are converted (see :meth:`FieldContainer.add_key`)."""
        self._set(key, values, self._resolve_level(key, level))

    def _set(self, name: str, values: Any, level: Level) -> None:
        known = FIELDS.get(name)
        positions: Tensor = vars(self)["positions"]
        if not isinstance(values, Tensor):
            kind = "number" if known is None else known.kind
            values = _as_tensor(name, values, kind, positions.dtype).to(positions.device)
        if known is not None:
            values = _completed(values, known, positions.dtype)
        scalar = known is None and level == "system" and values.ndim == 0
        self._check(name, values.reshape(1) if scalar else values, level, self._count(level))
        if known is not None and known.refers_to_atoms and values.numel():
            low, high = (int(bound) for bound in values.aminmax())
            if low < 0 or (level == "edge" and high >= self.num_nodes):
                raise ValueError(
                    f"field {name!r} of {self._describe()} refers to atom {low if low < 0 else high}"
                )
        if scalar != (name in self._scalars):
            self._scalars = self._scalars ^ {name}
        self._store(name, values, level)

    def _count(self, level: Level) -> int | None:
        match level:
            case "node":
                return self.num_nodes
            case "system":
                return 1
            case "edge":
                return self.num_edges if "edge" in self._levels.values() else None

    def _describe(self) -> str:
        return f"AtomicData({self.num_nodes} atoms)"

    def _standard_masses(self) -> Tensor:
        positions, numbers = vars(self)["positions"], vars(self)["atomic_numbers"]
        table = standard_masses(positions.dtype, positions.device)
        try:
            return table.index_select(0, numbers)
        except (IndexError, RuntimeError) as error:
            wrong = numbers[(numbers < 0) | (numbers >= len(table))].tolist()
            raise ValueError(
                f"field 'atomic_numbers' must lie in 0 … {len(table) - 1}, got {wrong[:5]}"
            ) from error

    # ------------------------------------------------------------------ other libraries
    @classmethod
    def from_atoms(cls, atoms: "Atoms", **options: Any) -> Self:
        """Convert an ASE ``Atoms``; see :func:`nvalchemi.data.ase.from_atoms` for the options."""
        from nvalchemi.data.ase import from_atoms

        return from_atoms(atoms, cls=cls, **options)

    def to_atoms(self) -> "Atoms":
        """Convert to an ASE ``Atoms``; see :func:`nvalchemi.data.ase.to_atoms`."""
        from nvalchemi.data.ase import to_atoms

        return to_atoms(self)

    @classmethod
    def from_structure(cls, structure: "Structure | Molecule", **options: Any) -> Self:
        """Convert a pymatgen ``Structure`` or ``Molecule``; options as in :meth:`from_atoms`."""
        from pymatgen.io.ase import AseAtomsAdaptor

        return cls.from_atoms(cast("Atoms", AseAtomsAdaptor.get_atoms(structure, msonable=False)), **options)

    def to_structure(self) -> "Structure | Molecule":
        """Convert to a pymatgen ``Structure``, or a ``Molecule`` where nothing is periodic."""
        from pymatgen.io.ase import AseAtomsAdaptor

        atoms: Any = self.to_atoms()  # pymatgen has a name of its own for the same class
        return (
            AseAtomsAdaptor.get_structure(atoms) if atoms.pbc.any() else AseAtomsAdaptor.get_molecule(atoms)
        )


def _as_tensor(name: str, values: Any, kind: Kind, dtype: torch.dtype) -> Tensor:
    """Make a tensor of the kind a field wants, always a copy; ``dtype`` is for floating-point values."""
    try:
        array = np.array(values, order="C")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"field {name!r} cannot be made a tensor from {type(values).__name__}: {error}"
        ) from error
    if array.dtype.kind not in "biufc":
        raise ValueError(
            f"field {name!r} must consist of numbers, got a {type(values).__name__} ({array.dtype})"
        )
    tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    if kind == "float" and tensor.dtype != torch.bool:
        return tensor.to(dtype)
    if kind in ("int", "bool") and tensor.is_floating_point() and not tensor.numel():
        return tensor.to(torch.int64 if kind == "int" else torch.bool)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _completed(values: Tensor, field: Field, dtype: torch.dtype) -> Tensor:
    """Bring to the table's form what is unmistakable: ``cell [3, 3]``, ``energy []``, ``pbc`` of 0 and 1."""
    if field.kind == "float" and values.is_floating_point() and values.dtype != dtype:
        if torch.promote_types(values.dtype, dtype) != dtype:
            raise ValueError(
                f"field {field.name!r} is {values.dtype} while the positions are {dtype}: convert one of them"
            )
        values = values.to(dtype)
    elif field.kind == "bool" and values.dtype != torch.bool and bool(((values == 0) | (values == 1)).all()):
        values = values.to(torch.bool)
    if field.shape is None or None in field.shape:
        return values
    tail = cast(tuple[int, ...], field.shape)
    if field.level == "system":
        if values.ndim == 0 and (tail == (1,) or field.name == "pbc"):
            return values.expand(1, *tail).clone()
        if values.shape == tail:
            return values.unsqueeze(0)
    elif values.ndim == 1 and (tail == (1,) or values.numel() == 0):
        return values.reshape(-1, *tail) if tail == (1,) else values.reshape(0, *tail)
    return values


@lru_cache(maxsize=8)
def standard_masses(dtype: torch.dtype, device: torch.device) -> Float[Tensor, "119"]:
    """Standard atomic weights (amu) by atomic number, shape [119]; 1 for the dummy atom 0."""
    from ase.data import atomic_masses

    return torch.as_tensor(atomic_masses, dtype=dtype, device=device)
