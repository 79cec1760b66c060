"""The commit record: one small JSON object that says which part of a store counts.

Arrays may be longer than the record says, because they are written first. A frame exists when the record counts it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

from nvalchemi.data.schema import Level, as_level

FORMAT_VERSION = 1

RECORD_KEY = "nvalchemi"
"""Attribute of the root group that holds the record."""

POINTERS: dict[str, str] = {"node": "node_ptr", "edge": "edge_ptr", "info": "info_ptr"}
"""Array of row pointers, [num_frames + 1], of each ragged level."""

SIGNATURE = "signature"
"""Array [num_frames]: which set of fields each frame has."""

INFO = "info"
"""Array of bytes: the JSON of each frame's ``info``, one after another."""


@dataclass(frozen=True, slots=True)
class StoredField:
    """How one field is stored.

    Parameters
    ----------
    level : {"node", "edge", "system"}
        What its rows count.
    dtype : str
        NumPy's name of the stored type.
    shape : tuple of int
        Shape of one row.
    scalar : bool
        A system field whose values have shape [] in a single structure.
    """

    level: Level
    dtype: str
    shape: tuple[int, ...]
    scalar: bool = False

    def path(self, name: str) -> str:
        """Path of the array of field ``name`` in the store."""
        return f"{self.level}/{name}"


@dataclass(slots=True)
class Record:
    """What is committed: number of frames and rows, the fields, the sets of fields that frames have."""

    num_frames: int = 0
    num_nodes: int = 0
    num_edges: int = 0
    num_info: int = 0
    fields: dict[str, StoredField] = field(default_factory=dict[str, StoredField])
    signatures: list[list[str]] = field(default_factory=list[list[str]])

    def rows(self, level: str) -> int:
        """Number of rows of a level (``"info"``: bytes of JSON)."""
        return {
            "node": self.num_nodes,
            "edge": self.num_edges,
            "system": self.num_frames,
            "info": self.num_info,
        }[level]

    def arrays(self) -> dict[str, int]:
        """Path and committed length of every array."""
        lengths = {stored.path(name): self.rows(stored.level) for name, stored in self.fields.items()}
        lengths.update(dict.fromkeys(POINTERS.values(), self.num_frames + 1))
        return lengths | {SIGNATURE: self.num_frames, INFO: self.num_info}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON object, as stored."""
        return {
            "version": FORMAT_VERSION,
            "num_frames": self.num_frames,
            "num_nodes": self.num_nodes,
            "num_edges": self.num_edges,
            "num_info": self.num_info,
            "fields": {
                name: {"level": f.level, "dtype": f.dtype, "shape": list(f.shape), "scalar": f.scalar}
                for name, f in self.fields.items()
            },
            "signatures": self.signatures,
        }

    @classmethod
    def from_json(cls, attributes: Mapping[str, Any], store: str) -> Self:
        """Record in the attributes of a root group; ``ValueError`` where there is none that can be read."""
        stored = attributes.get(RECORD_KEY)
        if not isinstance(stored, Mapping):
            raise ValueError(f"{store} is a Zarr group but holds no structures (no attribute {RECORD_KEY!r})")
        content = cast(Mapping[str, Any], stored)
        if content.get("version") != FORMAT_VERSION:
            raise ValueError(
                f"{store} is written in version {content.get('version')} of the format, this package reads "
                f"{FORMAT_VERSION}"
            )
        try:
            return cls(
                num_frames=content["num_frames"],
                num_nodes=content["num_nodes"],
                num_edges=content["num_edges"],
                num_info=content["num_info"],
                fields={
                    name: StoredField(as_level(f["level"]), f["dtype"], tuple(f["shape"]), f["scalar"])
                    for name, f in content["fields"].items()
                },
                signatures=[list(names) for names in content["signatures"]],
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{store}: the record in zarr.json is damaged: {error!r}") from error
