"""The table of known fields: name, level, shape, kind, unit. Validation, batching and files are driven by it.

A field belongs to one of three levels. With B graphs, N atoms and E edges in a batch its leading dimension is

========== ================= ==========================================
level      leading dimension examples
========== ================= ==========================================
``node``   atoms, N          ``positions [N, 3]``, ``forces [N, 3]``
``edge``   edges, E          ``neighbor_list [E, 2]``
``system`` graphs, B         ``cell [B, 3, 3]``, ``energy [B, 1]``
========== ================= ==========================================

``"atom"`` is an alias of ``"node"``. Names that are not in the table are allowed everywhere once their level is given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

Level = Literal["node", "edge", "system"]
Kind = Literal["float", "int", "bool", "number"]

LEVELS: tuple[Level, ...] = ("node", "edge", "system")

FREE = 0
"""Value of ``atom_categories`` for an atom that moves."""
FIXED = 1
"""Value of ``atom_categories`` for an atom that is held where it is (ASE's ``FixAtoms``)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One row of the table.

    Parameters
    ----------
    name : str
        Name of the field.
    level : {"node", "edge", "system"}
        What its leading dimension counts.
    shape : tuple of (int or None) or None
        Shape behind the leading dimension; ``None`` as an entry means any length there, ``None`` as a whole any
        shape.
    kind : {"float", "int", "bool", "number"}
        Kind of dtype; ``"number"`` takes integers and floats.
    unit : str
        Unit, empty when it has none.
    doc : str
        One line of meaning.
    neutral : float or None
        Value that stands for "not given" when some graphs of a batch have the field and others do not. ``None``: there
        is no such value, and joining such graphs is an error unless a fill is asked for.
    refers_to_atoms : bool
        The values are indices of atoms: batch-global in a batch, local in a single structure.
    persistent : bool
        Whether files keep it. Neighbour lists and the working state of integrators are not kept.
    """

    name: str
    level: Level
    shape: tuple[int | None, ...] | None
    kind: Kind
    unit: str = ""
    doc: str = ""
    neutral: float | None = None
    refers_to_atoms: bool = False
    persistent: bool = True

    def describe_shape(self) -> str:
        """Shape with the leading dimension by name, as error messages print it.

        >>> FIELDS["cell"].describe_shape()
        '[num_systems, 3, 3]'
        """
        tail = ("...",) if self.shape is None else tuple("K" if s is None else str(s) for s in self.shape)
        return "[" + ", ".join((f"num_{self.level}s", *tail)) + "]"


# fmt: off
_rows = [
    Field("positions", "node", (3,), "float", "Å", "Cartesian positions"),
    Field("atomic_numbers", "node", (), "int", "", "atomic numbers, 0 for a dummy atom"),
    Field("atomic_masses", "node", (), "float", "amu", "masses; standard atomic weights when not given"),
    Field("velocities", "node", (3,), "float", "sqrt(eV/amu)", "velocities"),
    Field("momenta", "node", (3,), "float", "sqrt(eV·amu)", "momenta"),
    Field("forces", "node", (3,), "float", "eV/Å", "forces"),
    Field("charges", "node", (), "float", "e", "partial charges"),
    Field("atom_categories", "node", (), "int", "", "0 = free, 1 = fixed, others are the user's", neutral=FREE),
    Field("tags", "node", (), "int", "", "ASE's tags", neutral=0),
    Field("kinetic_energies", "node", (1,), "float", "eV", "kinetic energy of each atom"),
    Field("node_attrs", "node", None, "float", "", "node attributes of a model"),
    Field("node_embeddings", "node", None, "float", "", "learned node features"),
    Field("image_flags", "node", (3,), "int", "", "cell crossings; unwrapped = position + flags · cell", neutral=0),
    Field("neighbor_matrix", "node", (None,), "int", "", "neighbours, padded", refers_to_atoms=True, persistent=False),
    Field("num_neighbors", "node", (), "int", "", "length of each row of neighbor_matrix", persistent=False),
    Field("neighbor_matrix_shifts", "node", (None, 3), "int", "", "cell shifts of neighbor_matrix", persistent=False),
    Field("neighbor_list", "edge", (2,), "int", "", "pairs (i, j)", refers_to_atoms=True, persistent=False),
    Field("neighbor_list_shifts", "edge", (3,), "int", "", "cell shift S of each pair", persistent=False),
    Field("shifts", "edge", (3,), "float", "Å", "Cartesian shift S · cell of each pair", persistent=False),
    Field("edge_embeddings", "edge", None, "float", "", "learned edge features", persistent=False),
    Field("cell", "system", (3, 3), "float", "Å", "rows are lattice vectors, zero where there is none", neutral=0),
    Field("pbc", "system", (3,), "bool", "", "periodic along each lattice vector", neutral=0),
    Field("energy", "system", (1,), "float", "eV", "potential energy"),
    Field("stress", "system", (3, 3), "float", "eV/Å³", "Cauchy stress, tensile positive"),
    Field("virial", "system", (3, 3), "float", "eV", "virial, −stress · volume"),
    Field("dipole", "system", (3,), "float", "e·Å", "dipole moment"),
    Field("charge", "system", (1,), "number", "e", "total charge"),
    Field("spin", "system", (1,), "number", "", "spin multiplicity, 2S + 1"),
    Field("graph_embeddings", "system", None, "float", "", "learned features of the whole structure"),
    Field("status", "system", (1,), "int", "", "stage a structure is in; ≥ exit status: done, < 0: failed"),
    Field("system_id", "system", (1,), "int", "", "identity of a structure over a run"),
    Field("system_step", "system", (1,), "int", "", "steps a structure has made"),
]
# fmt: on
_fields: dict[str, Field] = {row.name: row for row in _rows}

FIELDS: Mapping[str, Field] = MappingProxyType(_fields)
"""Known fields by name (read-only view; add rows with :func:`register_field`)."""


def register_field(field: Field) -> Field:
    """Add a row to the table, so that a field's shape is checked and its level need not be repeated.

    State that must follow a graph (a minimiser's time step, a thermostat's chain) is registered once with
    ``persistent=False``; selection, refill and restart then carry it with no extra code.

    Parameters
    ----------
    field : Field
        The row. Registering an equal row again does nothing.

    Returns
    -------
    Field
        The row.

    Raises
    ------
    ValueError
        A different row of that name exists.
    """
    known = _fields.setdefault(field.name, field)
    if known != field:
        raise ValueError(f"field {field.name!r} is already registered as {known}; it cannot also be {field}")
    return field


def as_level(level: str) -> Level:
    """Resolve a level's name or alias; ``ValueError`` for anything else.

    >>> as_level("atom")
    'node'
    """
    match level:
        case "node" | "atom":
            return "node"
        case "edge":
            return "edge"
        case "system":
            return "system"
        case _:
            pass
    raise ValueError(f"unknown level {level!r}; levels are 'node' (or 'atom'), 'edge' and 'system'")


def kind_matches(kind: Kind, dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype may hold a field of this kind.

    >>> import torch
    >>> kind_matches("float", torch.int64)
    False
    """
    if kind == "float":
        return dtype.is_floating_point
    if kind == "bool":
        return dtype == torch.bool
    if kind == "int":
        return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
    return not dtype.is_complex and dtype != torch.bool
