"""Many structures in one: :class:`Batch`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, overload

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data._container import FieldContainer
from nvalchemi.data._join import join_fields
from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.schema import FIELDS, Level
from nvalchemi.typing import Int

if TYPE_CHECKING:
    from nvalchemi.data._fixed import FixedBatch

Indices = Sequence[int] | Sequence[bool] | np.ndarray | Tensor


class Batch(FieldContainer):
    """Several structures (graphs) whose atoms, edges and systems are concatenated.

    Made by :meth:`from_data_list`. Fields are read as attributes (``batch.positions`` of shape [N, 3],
    ``batch.cell`` of shape [B, 3, 3]); the atoms of graph ``i`` are rows ``batch_ptr[i]`` to
    ``batch_ptr[i + 1]``. Indices of atoms (``neighbor_list``, ``neighbor_matrix``) count over the whole batch
    and become local again in ``batch[i]``.

    Where only some graphs have a ``cell``, the others get a zero cell: a zero cell means no cell.

    Examples
    --------
    >>> import torch
    >>> atom = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([18]))
    >>> dimer = AtomicData(positions=torch.eye(3)[:2], atomic_numbers=torch.tensor([18, 18]))
    >>> batch = Batch.from_data_list([atom, dimer])
    >>> batch.num_graphs, batch.num_nodes, batch.batch_idx.tolist()
    (2, 3, [0, 1, 1])
    >>> batch[1].positions.shape
    torch.Size([2, 3])
    """

    _ptr: Tensor
    _edge_ptr: Tensor | None
    _idx: Tensor | None
    _info: list[dict[str, Any]]

    # ------------------------------------------------------------------ making
    def __init__(self) -> None:
        raise TypeError("a Batch is made by Batch.from_data_list([...])")

    @classmethod
    def _make(
        cls,
        ptr: Tensor,
        edge_ptr: Tensor | None,
        levels: Mapping[str, Level],
        tensors: Mapping[str, Tensor],
        scalars: frozenset[str],
        info: list[dict[str, Any]],
    ) -> Self:
        new = object.__new__(cls)
        vars(new).update(
            _ptr=ptr, _edge_ptr=edge_ptr, _idx=None, _levels=dict(levels), _scalars=scalars, _info=info
        )
        vars(new).update(tensors)
        return new

    @classmethod
    def from_data_list(
        cls,
        data_list: "Iterable[AtomicData | Batch]",
        *,
        missing: Literal["error", "fill"] = "error",
        device: torch.device | str | None = None,
    ) -> Self:
        """Join structures (or batches) in the order given.

        Parameters
        ----------
        data_list : iterable of AtomicData or Batch
            What to join; at least one.
        missing : {"error", "fill"}, default "error"
            What to do with a field that only some of them have. ``"fill"`` writes NaN for floats, 0 for
            integers and False for booleans. Fields with a neutral value (``cell``, ``pbc``,
            ``atom_categories``, ``tags``, ``image_flags``: 0) are completed with it either way. Neighbour
            lists and matrices that only some have are dropped either way: they can be computed again.
        device : torch.device or str, optional
            Move the result there.

        Raises
        ------
        ValueError
            Nothing to join; a field present in some only; shapes, dtypes or devices that do not fit. The
            message names the field and the graphs.
        """
        parts = list(data_list)
        if not parts:
            raise ValueError("Batch.from_data_list needs at least one structure")
        for kind in set(map(type, parts)):
            if not issubclass(kind, AtomicData | Batch):
                i = next(i for i, part in enumerate(parts) if type(part) is kind)
                raise TypeError(
                    f"element {i} is a {kind.__name__}, not an AtomicData (AtomicData.from_atoms converts)"
                )
        batch = cls._make(*join_fields(parts, missing=missing))
        return batch if device is None else batch.to(device)

    @staticmethod
    def empty(
        num_systems: int, num_nodes: int, num_edges: int, template: "Batch | AtomicData"
    ) -> "FixedBatch":
        """Room of fixed capacity for structures like ``template``, to be filled with ``put``.

        Parameters
        ----------
        num_systems, num_nodes, num_edges : int
            Capacity.
        template : Batch or AtomicData
            Has the fields, with dtypes, shapes and device.
        """
        from nvalchemi.data._fixed import FixedBatch

        return FixedBatch(num_systems, num_nodes, num_edges, template)

    # ------------------------------------------------------------------ structure
    @property
    def num_graphs(self) -> int:
        """Number of structures, B."""
        return self._ptr.shape[0] - 1

    @property
    def num_nodes(self) -> int:
        """Number of atoms, N."""
        return vars(self)["positions"].shape[0]

    @property
    def num_edges(self) -> int:
        """Number of edges, E; 0 without a neighbour list."""
        for name, level in self._levels.items():
            if level == "edge":
                return vars(self)[name].shape[0]
        return 0

    @property
    def batch_ptr(self) -> Int[Tensor, " graphs_plus_1"]:
        """First atom of each graph and, last, the number of atoms; int64 [B + 1]."""
        return self._ptr

    @property
    def batch_idx(self) -> Int[Tensor, " atoms"]:
        """Graph of each atom; int64 [N]."""
        if self._idx is None:
            graphs = torch.arange(self.num_graphs, device=self._ptr.device)
            self._idx = torch.repeat_interleave(graphs, self._ptr.diff(), output_size=self.num_nodes)
        return self._idx

    @property
    def edge_ptr(self) -> Int[Tensor, " graphs_plus_1"]:
        """First edge of each graph and, last, the number of edges; int64 [B + 1]."""
        if self._edge_ptr is None:
            return torch.zeros_like(self._ptr)
        return self._edge_ptr

    @property
    def num_nodes_per_graph(self) -> Int[Tensor, " graphs"]:
        """Number of atoms of each graph; int64 [B]."""
        return self._ptr.diff()

    @property
    def num_edges_per_graph(self) -> Int[Tensor, " graphs"]:
        """Number of edges of each graph; int64 [B]."""
        return self.edge_ptr.diff()

    @property
    def info(self) -> list[dict[str, Any]]:
        """What is not a tensor, one dictionary per graph."""
        return self._info

    def __len__(self) -> int:
        return self.num_graphs

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {list(t.shape)}" for name, t in self.items())
        return f"Batch({self.num_graphs} graphs, {self.num_nodes} atoms, {self.num_edges} edges; {fields})"

    def _describe(self) -> str:
        return f"Batch({self.num_graphs} graphs, {self.num_nodes} atoms)"

    def describe_graph(self, index: int) -> str:
        """Words for one graph in error messages: its index and, where known, its ``system_id``."""
        if "system_id" in self._levels:
            return f"graph {index} (system_id {int(vars(self)['system_id'][index])})"
        return f"graph {index}"

    def _count(self, level: Level) -> int | None:
        match level:
            case "node":
                return self.num_nodes
            case "system":
                return self.num_graphs
            case "edge":
                if self._edge_ptr is None:
                    raise ValueError(
                        "this batch has no edges yet: write the first edge field with set_edges()"
                    )
                return self.num_edges

    # ------------------------------------------------------------------ edges
    def set_edges(self, edge_ptr: Tensor, **edge_fields: Tensor) -> None:
        """Replace all edges.

        Parameters
        ----------
        edge_ptr : Tensor, int64 [B + 1]
            First edge of each graph and, last, the number of edges. Edges are sorted by graph.
        **edge_fields : Tensor, shape [E, ...]
            The new edge fields (``neighbor_list=…``, ``neighbor_list_shifts=…``); edge fields not named here
            are removed.
        """
        if edge_ptr.shape != self._ptr.shape or edge_ptr.dtype != torch.int64:
            raise ValueError(
                f"edge_ptr must have shape [{self.num_graphs + 1}] and dtype torch.int64, got {list(edge_ptr.shape)} "
                f"of {edge_ptr.dtype}"
            )
        if not edge_fields:
            raise ValueError("set_edges needs at least one edge field; remove_key removes one")
        # Reading the number of edges would make a GPU wait: there it is taken from the first field.
        first = next(iter(edge_fields.values()))
        count = int(edge_ptr[-1]) if edge_ptr.device.type == "cpu" else first.shape[0]
        for name, tensor in edge_fields.items():
            self._check(name, tensor, self._resolve_level(name, "edge"), count)
        for name in [name for name, level in self._levels.items() if level == "edge"]:
            self.remove_key(name)
        self._edge_ptr = edge_ptr
        for name, tensor in edge_fields.items():
            self._store(name, tensor, "edge")

    def remove_key(self, key: str) -> None:
        """Remove a field; with the last edge field go the edges."""
        super().remove_key(key)
        if "edge" not in self._levels.values():
            self._edge_ptr = None

    def add_key(self, key: str, values: Any, level: str | None = None) -> None:
        """Add or replace a field (see :meth:`FieldContainer.add_key`)."""
        super().add_key(key, values, level)
        if values.ndim != 1:
            self._scalars -= {key}

    # ------------------------------------------------------------------ selection
    def __iter__(self) -> Iterator[AtomicData]:
        return iter(self.to_data_list())

    @overload
    def __getitem__(self, key: str) -> Tensor: ...
    @overload
    def __getitem__(self, key: SupportsIndex) -> AtomicData: ...
    @overload
    def __getitem__(self, key: slice | Indices) -> "Batch": ...
    def __getitem__(self, key: str | SupportsIndex | slice | Indices) -> "Tensor | AtomicData | Batch":
        """Field, structure or sub-batch.

        A name gives the tensor itself. An integer gives an :class:`AtomicData` whose tensors are views, as in
        :meth:`to_data_list`: writing into them writes into the batch. Everything else (slice, list, mask,
        index tensor or array) gives a :class:`Batch` of copies, as :meth:`index_select` does.
        """
        if isinstance(key, str):
            return super().__getitem__(key)
        if isinstance(key, slice):
            return self.index_select(range(*key.indices(self.num_graphs)))
        if isinstance(key, np.ndarray | np.generic):
            key = torch.from_numpy(np.array(key))
        if (
            isinstance(key, Tensor)
            and key.ndim == 0
            and not key.dtype.is_floating_point
            and key.dtype != torch.bool
        ):
            key = int(key)
        if isinstance(key, int) and not isinstance(key, bool):
            if not -self.num_graphs <= key < self.num_graphs:
                raise IndexError(f"graph {key} is out of range: {self._describe()}")
            index = key % self.num_graphs
            return self.select_range(index, index + 1).to_data_list()[0]
        if isinstance(key, Sequence | Tensor):
            return self.index_select(key)
        raise TypeError(
            f"graphs are chosen by integers, slices, lists, masks or tensors, not by a {type(key).__name__}"
        )

    def index_select(self, index: Indices) -> Self:
        """Graphs in the order asked for, as a new batch.

        Parameters
        ----------
        index : Tensor or sequence
            Graph numbers (repeats and negative ones allowed), or a boolean mask [B].
        """
        idx = self._as_index(index)
        ptr, nodes = _gather_ranges(self._ptr, idx)
        # Old minus new number of the first atom of each graph chosen: what its atom indices move by.
        offset = self._ptr[idx] - ptr[:-1]
        edge_ptr, ptrs = None, {"node": ptr}
        rows = {"node": nodes, "system": idx}
        if self._edge_ptr is not None:
            edge_ptr, rows["edge"] = _gather_ranges(self._edge_ptr, idx)
            ptrs["edge"] = edge_ptr
        tensors: dict[str, Tensor] = {}
        for name, level in self._levels.items():
            old: Tensor = vars(self)[name]
            new = old.index_select(0, rows[level])
            if name in FIELDS and FIELDS[name].refers_to_atoms:
                move = torch.repeat_interleave(offset, ptrs[level].diff(), output_size=new.shape[0])
                moved = new - move.to(new.dtype).unsqueeze(-1)
                new = moved if level == "edge" else torch.where(new >= self.num_nodes, nodes.shape[0], moved)
            tensors[name] = new
        info = list(map(self._info.__getitem__, idx.tolist()))
        return self._make(ptr, edge_ptr, self._levels, tensors, self._scalars, info)

    def select_range(self, start: int, stop: int) -> Self:
        """Graphs ``start`` to ``stop`` as a batch whose tensors are views of this one's where no index has to move.

        Writing into the positions of the result writes into this batch; that is what makes it cheap. Raises
        ``IndexError`` unless ``0 <= start <= stop <= num_graphs``.
        """
        if not 0 <= start <= stop <= self.num_graphs:
            raise IndexError(f"graphs {start} to {stop} are no range of {self._describe()}")
        ptr = self._ptr[start : stop + 1]
        first, last = int(ptr[0]), int(ptr[-1])
        edge_ptr = None if self._edge_ptr is None else self._edge_ptr[start : stop + 1]
        first_edge, last_edge = (0, 0) if edge_ptr is None else (int(edge_ptr[0]), int(edge_ptr[-1]))
        rows = {
            "node": slice(first, last),
            "system": slice(start, stop),
            "edge": slice(first_edge, last_edge),
        }
        tensors: dict[str, Tensor] = {}
        for name, level in self._levels.items():
            tensor: Tensor = vars(self)[name][rows[level]]
            if name in FIELDS and FIELDS[name].refers_to_atoms and (first > 0 or level == "node"):
                local = tensor - first
                tensor = (
                    local if level == "edge" else torch.where(tensor >= self.num_nodes, last - first, local)
                )
            tensors[name] = tensor
        edge_ptr = None if edge_ptr is None else edge_ptr - first_edge
        return self._make(ptr - first, edge_ptr, self._levels, tensors, self._scalars, self._info[start:stop])

    def _as_index(self, index: Indices) -> Tensor:
        idx = torch.as_tensor(index, device=self._ptr.device)
        if idx.shape == (0,) and idx.dtype != torch.bool:
            # An empty list has no type of its own, and torch makes it a float.
            return torch.zeros_like(idx, dtype=torch.int64)
        if idx.dtype == torch.bool:
            if idx.shape != (self.num_graphs,):
                raise IndexError(
                    f"a mask over graphs must have shape [{self.num_graphs}], got {list(idx.shape)}"
                )
            return idx.nonzero().squeeze(-1)
        if idx.dtype.is_floating_point or idx.ndim != 1:
            raise IndexError(
                f"graphs are chosen by a 1-D integer or boolean index, got {list(idx.shape)} of {idx.dtype}"
            )
        idx = idx.to(torch.int64)
        low, high = (int(bound) for bound in idx.aminmax())
        if low < -self.num_graphs or high >= self.num_graphs:
            raise IndexError(
                f"graph {low if low < -self.num_graphs else high} is out of range: {self._describe()}"
            )
        return torch.where(idx < 0, idx + self.num_graphs, idx) if low < 0 else idx

    def append(self, other: "AtomicData | Batch", *, missing: Literal["error", "fill"] = "error") -> None:
        """Add structures at the end, in place (every tensor is replaced by a longer one).

        Parameters
        ----------
        other : AtomicData or Batch
            What to add.
        missing : {"error", "fill"}, default "error"
            As in :meth:`from_data_list`.
        """
        joined = type(self).from_data_list([self, other], missing=missing)
        vars(self).clear()
        vars(self).update(vars(joined))

    def to_data_list(self) -> list[AtomicData]:
        """Split into structures whose tensors are views of this batch's where no index has to move.

        Writing into their positions writes into the batch; ``clone()`` a structure to part it from the batch.
        """
        sizes = self._ptr.diff().tolist()
        edge_sizes = None if self._edge_ptr is None else self._edge_ptr.diff().tolist()
        columns: list[Sequence[Tensor]] = []
        for name, level in self._levels.items():
            tensor: Tensor = vars(self)[name]
            if name in FIELDS and FIELDS[name].refers_to_atoms:
                tensor = self._localised(tensor, level)
            if name in self._scalars:
                columns.append(tensor.unbind(0))
            elif level == "system":
                columns.append(tensor.split(1) if sizes else ())
            else:
                columns.append(tensor.split(sizes if level == "node" or edge_sizes is None else edge_sizes))
        names = tuple(self._levels)
        out: list[AtomicData] = []
        for info, *row in zip(self._info, *columns, strict=True):
            data = object.__new__(AtomicData)
            attributes = vars(data)
            attributes["_levels"] = dict(self._levels)
            attributes["_scalars"] = self._scalars
            attributes["_info"] = dict(info)
            attributes.update(zip(names, row, strict=True))
            out.append(data)
        return out

    def _localised(self, tensor: Tensor, level: Level) -> Tensor:
        """Atom indices counted from the first atom of their own graph."""
        ptr = self._ptr if level == "node" else self.edge_ptr
        per_row = torch.repeat_interleave(self._ptr[:-1], ptr.diff(), output_size=tensor.shape[0])
        local = tensor - per_row.to(tensor.dtype).unsqueeze(-1)
        if level == "edge":
            return local
        atoms = torch.repeat_interleave(self._ptr.diff(), ptr.diff(), output_size=tensor.shape[0])
        return torch.where(tensor >= self.num_nodes, atoms.to(tensor.dtype).unsqueeze(-1), local)

    # ------------------------------------------------------------------ moving
    def _copy_with(self, tensors: Mapping[str, Tensor]) -> Self:
        new = super()._copy_with(tensors)
        device = vars(new)["positions"].device
        vars(new)["_info"] = [dict(info) for info in self._info]
        for name in ("_ptr", "_edge_ptr", "_idx"):
            tensor = vars(self)[name]
            vars(new)[name] = None if tensor is None else tensor.to(device)
        return new


def _gather_ranges(ptr: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the ranges ``idx`` of ``ptr``, one range after another, and the new ``ptr``."""
    start = ptr[idx]
    sizes = ptr[idx + 1] - start
    new = torch.zeros(idx.shape[0] + 1, dtype=torch.int64, device=ptr.device)
    torch.cumsum(sizes, 0, out=new[1:])
    move = torch.repeat_interleave(start - new[:-1], sizes)
    return new, move.add_(torch.arange(move.shape[0], device=ptr.device))
