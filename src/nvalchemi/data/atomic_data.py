"""One structure: :class:`AtomicData`."""

from collections.abc import Mapping
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from nvalchemi.data._container import FieldContainer
from nvalchemi.data.schema import FIELDS, Kind, Level

if TYPE_CHECKING:
    from ase import Atoms
    from pymatgen.core import Molecule, Structure


class AtomicData(FieldContainer):
    """One structure: atoms, an optional cell and any number of fields.

    Parameters
    ----------
    positions : Tensor or array, shape [n, 3]
        Cartesian positions, Å. A tensor keeps its floating-point type; anything else takes ``dtype``.
    atomic_numbers : Tensor or array, shape [n]
        Atomic numbers, 0 (a dummy atom) to 118.
    info : Mapping, optional
        Anything that is not a tensor (names, provenance); travels along.
    dtype : torch.dtype, optional
        Floating-point type for values that are not tensors; default: that of ``positions``, float32 if that is no tensor.
    **fields : Tensor or array
        Fields of the schema table (:data:`nvalchemi.data.schema.FIELDS`). A system field may leave out its leading 1:
        ``cell=[3, 3]`` and ``energy=-1.0`` are understood. ``None`` means absent.

    Raises
    ------
    ValueError
        Wrong shape, dtype or device, a non-finite cell, an unknown element or an unknown field name. The message names the
        field, what was expected and what was given.

    Notes
    -----
    ``atomic_masses`` default to the standard atomic weights. ``pbc`` defaults to periodic along all three vectors when a
    cell is given, and to not periodic without one. Other names go through :meth:`add_node_property`,
    :meth:`add_edge_property` and :meth:`add_system_property`.

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
        attributes = self.__dict__
        attributes["_levels"] = {}
        attributes["_scalars"] = frozenset()
        attributes["_info"] = dict(info) if info else {}
        if not isinstance(positions, Tensor):
            positions = torch.as_tensor(positions, dtype=dtype or torch.float32).reshape(-1, 3)
        if positions.ndim != 2 or positions.shape[1] != 3 or not positions.dtype.is_floating_point:
            raise ValueError(
                f"field 'positions' must have shape [num_atoms, 3] and a floating-point type, "
                f"got {list(positions.shape)} of {positions.dtype}"
            )
        self._store("positions", positions, "node")
        self._set("atomic_numbers", atomic_numbers)
        if fields.get("atomic_masses") is None:
            self._store("atomic_masses", self._standard_masses(), "node")
        for name, value in fields.items():
            if value is not None:
                if name not in FIELDS:
                    raise ValueError(
                        f"unknown field {name!r}: add it with add_node_property, add_edge_property or add_system_property"
                    )
                self._set(name, value)
        if "cell" in self._levels and not isfinite(float(attributes["cell"].sum())):
            raise ValueError(f"field 'cell' of {self._describe()} must be finite, got {attributes['cell'][0].tolist()}")
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
        return self.__dict__["positions"].shape[0]

    @property
    def num_edges(self) -> int:
        """Number of edges (pairs in the neighbour list), 0 without one."""
        for name, level in self._levels.items():
            if level == "edge":
                return self.__dict__[name].shape[0]
        return 0

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

        return [chemical_symbols[z] for z in self.__dict__["atomic_numbers"].tolist()]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {list(t.shape)}" for name, t in self.items())
        return f"AtomicData({self.chemical_formula}, {fields})"

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
        resolved = self._resolve_level(key, level)
        self._check_name(key)
        self._set(key, values, resolved)

    def _set(self, name: str, values: Any, level: Level | None = None) -> None:
        known = FIELDS.get(name)
        resolved: Level = known.level if known is not None else level or "system"
        positions: Tensor = self.__dict__["positions"]
        if not isinstance(values, Tensor):
            values = _as_tensor(name, values, positions, known.kind if known is not None else "number")
        elif values.device != positions.device:
            raise ValueError(f"field {name!r} is on {values.device} while the positions are on {positions.device}")
        if known is not None and known.shape is not None:
            values = _with_leading_dimension(values, known.level, known.shape)
        if known is None and resolved == "system" and values.ndim == 0:
            self._scalars |= {name}
        else:
            self._scalars -= {name}
            self._check(name, values, resolved, self._count(resolved))
        self._store(name, values, resolved)

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
        positions, numbers = self.__dict__["positions"], self.__dict__["atomic_numbers"]
        table = standard_masses(positions.dtype, positions.device)
        try:
            return table.index_select(0, numbers)
        except (IndexError, RuntimeError) as error:
            wrong = numbers[(numbers < 0) | (numbers >= len(table))].tolist()
            raise ValueError(f"field 'atomic_numbers' must lie in 0 … {len(table) - 1}, got {wrong[:5]}") from error

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

        return cls.from_atoms(AseAtomsAdaptor.get_atoms(structure, msonable=False), **options)

    def to_structure(self) -> "Structure | Molecule":
        """Convert to a pymatgen ``Structure``, or a ``Molecule`` where nothing is periodic."""
        from pymatgen.io.ase import AseAtomsAdaptor

        atoms = self.to_atoms()
        return AseAtomsAdaptor.get_structure(atoms) if atoms.pbc.any() else AseAtomsAdaptor.get_molecule(atoms)


def _as_tensor(name: str, values: Any, positions: Tensor, kind: Kind) -> Tensor:
    """Tensor of the kind a field wants, on the device of the positions."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"field {name!r} cannot be made a tensor from {type(values).__name__}: {error}") from error
    if kind == "float" and tensor.dtype != torch.bool or tensor.dtype.is_floating_point:
        tensor = tensor.to(positions.dtype)
    elif kind == "bool" and tensor.dtype != torch.bool and bool(((tensor == 0) | (tensor == 1)).all()):
        tensor = tensor.to(torch.bool)
    return tensor.to(positions.device)


def _with_leading_dimension(values: Tensor, level: Level, tail: tuple[int | None, ...]) -> Tensor:
    """Complete ``cell [3, 3]``, ``energy []`` and ``kinetic_energies [n]`` to the shapes the table has."""
    if level == "system" and None not in tail:
        if tuple(values.shape) == tail:
            return values.unsqueeze(0)
        if tail == (1,) and values.ndim == 0:
            return values.reshape(1, 1)
    elif tail == (1,) and values.ndim == 1:
        return values.unsqueeze(-1)
    return values


@lru_cache(maxsize=8)
def standard_masses(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard atomic weights (amu) by atomic number, shape [119]; 1 for the dummy atom 0."""
    from ase.data import atomic_masses

    return torch.as_tensor(atomic_masses, dtype=dtype, device=device)
