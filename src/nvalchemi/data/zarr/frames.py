"""Structures as NumPy columns, between the containers of this package and the arrays of a store."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.schema import FIELDS, Level
from nvalchemi.data.zarr.stores import encode_info


@dataclass(slots=True)
class Frames:
    """Consecutive structures with the same fields: the rows of each field, and how many belong to each structure."""

    columns: dict[str, np.ndarray]
    levels: Mapping[str, Level]
    scalars: frozenset[str]
    num_nodes: np.ndarray
    num_edges: np.ndarray
    info: list[bytes]

    @property
    def num_frames(self) -> int:
        """Number of structures."""
        return len(self.num_nodes)

    @property
    def nbytes(self) -> int:
        """Memory of the columns."""
        return sum(column.nbytes for column in self.columns.values())

    def rows(self, level: Level) -> int:
        """Number of rows of the fields of a level."""
        if level == "system":
            return self.num_frames
        return int((self.num_nodes if level == "node" else self.num_edges).sum())


def frames_from_data(data: AtomicData, fields: Collection[str] | None) -> Frames:
    """One structure as columns (copied, so that it may change afterwards)."""
    names = _chosen(data, fields)
    edges = data.num_edges if any(data.level(name) == "edge" for name in names) else 0
    columns = {name: _array(name, data[name]) for name in names}
    scalars = data._scalars.intersection(columns)
    for name in scalars:
        columns[name] = columns[name].reshape(1)
    return Frames(
        columns=columns,
        levels={name: data.level(name) for name in names},
        scalars=scalars,
        num_nodes=np.array([data.num_nodes]),
        num_edges=np.array([edges]),
        info=[encode_info(data.info)],
    )


def frames_from_batch(batch: Batch, fields: Collection[str] | None) -> Frames:
    """A batch as columns, with atom indices counted from the first atom of their own graph again."""
    names = _chosen(batch, fields)
    num_nodes = batch.num_nodes_per_graph.cpu().numpy()
    has_edges = any(batch.level(name) == "edge" for name in names)
    num_edges = batch.num_edges_per_graph.cpu().numpy() if has_edges else np.zeros_like(num_nodes)
    columns: dict[str, np.ndarray] = {}
    for name in names:
        column = _array(name, batch[name])
        if batch.level(name) == "edge" and name in FIELDS and FIELDS[name].refers_to_atoms:
            first = np.repeat(batch.batch_ptr[:-1].cpu().numpy(), num_edges).astype(column.dtype)
            column -= first.reshape(-1, *[1] * (column.ndim - 1))
        columns[name] = column
    return Frames(
        columns=columns,
        levels={name: batch.level(name) for name in names},
        scalars=batch._scalars.intersection(columns),
        num_nodes=num_nodes,
        num_edges=num_edges,
        info=[encode_info(info) for info in batch.info],
    )


def _chosen(data: AtomicData | Batch, fields: Collection[str] | None) -> list[str]:
    if fields is None:
        return [name for name in data.keys() if _kept_by_default(name)]
    return [name for name in data.keys() if name in fields]


def _kept_by_default(name: str) -> bool:
    # Edges are kept: in a store for training they are the expensive part. Padded matrices and the working state of
    # integrators are not.
    known = FIELDS.get(name)
    return known is None or known.persistent or known.level == "edge"


def _array(name: str, tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        # NumPy has no bfloat16; every value is a float32.
        tensor = tensor.to(torch.float32)
    return np.array(tensor.detach().cpu().numpy(), order="C", copy=True)


def filler(name: str, dtype: np.dtype, rows: int, shape: Sequence[int]) -> np.ndarray:
    """Rows of a field for frames that do not have it: its neutral value, NaN for floats, 0 for anything else."""
    known = FIELDS.get(name)
    value: Any = known.neutral if known is not None and known.neutral is not None else None
    if value is None:
        value = np.nan if dtype.kind in "fc" else 0
    return np.full((rows, *shape), value, dtype=dtype)
