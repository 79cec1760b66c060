"""A batch of fixed capacity, for places where memory is allocated once: see :meth:`Batch.empty`."""

from typing import Any

import torch
from torch import Tensor

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.schema import FIELDS, LEVELS, Level

_PADDED = ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts")
"""Padded tables are as wide as the widest batch, which no capacity can bound; they can be computed again."""


class FixedBatch:
    """Room for so many systems, atoms and edges, filled from the front.

    Parameters
    ----------
    num_systems, num_nodes, num_edges : int
        Capacity.
    template : Batch or AtomicData
        Has the fields (with dtypes, shapes and device) that are kept. Padded neighbour matrices are left out.

    Raises
    ------
    ValueError
        A negative capacity.
    """

    def __init__(
        self, num_systems: int, num_nodes: int, num_edges: int, template: Batch | AtomicData
    ) -> None:
        if min(num_systems, num_nodes, num_edges) < 0:
            raise ValueError(f"capacities must be ≥ 0, got {(num_systems, num_nodes, num_edges)}")
        like = template if isinstance(template, Batch) else Batch.from_data_list([template])
        self.capacity: dict[Level, int] = {"system": num_systems, "node": num_nodes, "edge": num_edges}
        self._levels: dict[str, Level] = {n: like.level(n) for n in like.keys() if n not in _PADDED}
        self._scalars = frozenset(name for name in like._scalars if name in self._levels)
        self._tensors = {
            name: like[name].new_zeros(self.capacity[level], *like[name].shape[1:])
            for name, level in self._levels.items()
        }
        self._ptr = {
            level: torch.zeros(num_systems + 1, dtype=torch.int64, device=like.device) for level in LEVELS
        }
        self._has_edges = "edge" in self._levels.values()
        self._info: list[dict[str, Any]] = []
        self._used: dict[Level, int] = dict.fromkeys(LEVELS, 0)

    @property
    def num_graphs(self) -> int:
        """Number of graphs held."""
        return self._used["system"]

    @property
    def num_nodes(self) -> int:
        """Number of atoms held."""
        return self._used["node"]

    @property
    def num_edges(self) -> int:
        """Number of edges held."""
        return self._used["edge"]

    def put(self, src: Batch, mask: Tensor | None = None) -> Tensor:
        """Copy graphs behind those held, in order, as long as there is room.

        Parameters
        ----------
        src : Batch
            With every field of the template. Fields that the template lacks must be working state, which is not
            kept.
        mask : Tensor, bool [B], optional
            Graphs to copy; default all.

        Returns
        -------
        Tensor, bool [B]
            Graphs that were copied. From the first that does not fit, none is.
        """
        fits = self.room_for(src, mask)
        chosen = src.index_select(fits)
        if chosen.num_graphs > 0:
            self._append(chosen)
        return fits

    def room_for(self, src: Batch, mask: Tensor | None = None) -> Tensor:
        """Graphs that :meth:`put` would copy, bool ``[B]``."""
        self._check(src)
        wanted = torch.ones(src.num_graphs, dtype=torch.bool, device=src.device) if mask is None else mask
        fits = wanted.clone()
        sizes: dict[Level, Tensor] = {
            "system": torch.ones_like(src.batch_ptr[1:]),
            "node": src.num_nodes_per_graph,
        }
        if self._has_edges:
            sizes["edge"] = src.num_edges_per_graph
        for level, size in sizes.items():
            total = torch.cumsum(torch.where(wanted, size, 0), 0)
            fits &= total <= self.capacity[level] - self._used[level]
        return fits

    def _append(self, chosen: Batch) -> None:
        first_atom = self._used["node"]
        counts: dict[Level, int] = {"system": chosen.num_graphs, "node": chosen.num_nodes, "edge": 0}
        if self._has_edges:
            counts["edge"] = chosen.num_edges
        for name, level in self._levels.items():
            rows = chosen[name]
            if name in FIELDS and FIELDS[name].refers_to_atoms:
                rows = rows + first_atom
            start = self._used[level]
            self._tensors[name][start : start + counts[level]] = rows
        first, last = self.num_graphs, self.num_graphs + chosen.num_graphs
        self._ptr["node"][first : last + 1] = chosen.batch_ptr + first_atom
        if self._has_edges:
            self._ptr["edge"][first : last + 1] = chosen.edge_ptr + self._used["edge"]
        self._info += chosen.info
        for level, count in counts.items():
            self._used[level] += count

    def _check(self, src: Batch) -> None:
        missing = [name for name in self._levels if name not in src]
        extra = [
            name
            for name in src.keys()
            if name not in self._levels
            and name not in _PADDED
            and (name not in FIELDS or FIELDS[name].persistent)
        ]
        if missing or extra:
            raise ValueError(
                f"the buffer was made for other fields: what is put in lacks {missing} and has {extra} besides"
            )

    def view(self) -> Batch:
        """What is held, as a batch that shares the memory of this buffer until the next change of it."""
        used = self._used
        tensors = {name: self._tensors[name][: used[level]] for name, level in self._levels.items()}
        edge_ptr = self._ptr["edge"][: self.num_graphs + 1] if self._has_edges else None
        ptr = self._ptr["node"][: self.num_graphs + 1]
        return Batch._make(ptr, edge_ptr, self._levels, tensors, self._scalars, list(self._info))

    def defrag(self, copied_mask: Tensor) -> None:
        """Remove the graphs marked (bool ``[num_graphs]``), which were copied elsewhere, and close the gaps."""
        rest = self.view().index_select(~copied_mask)
        self.zero()
        if rest.num_graphs > 0:
            self._append(rest)

    def zero(self) -> None:
        """Remove everything; the memory is kept and set to zero."""
        for tensor in (*self._tensors.values(), *self._ptr.values()):
            tensor.zero_()
        self._info = []
        self._used = dict.fromkeys(LEVELS, 0)
