"""Joining structures and batches into one: offsets, missing fields, and errors that name the graphs."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.schema import FIELDS, Level

if TYPE_CHECKING:
    from nvalchemi.data.batch import Batch

Part = "AtomicData | Batch"
Joined = tuple[
    Tensor, Tensor | None, Mapping[str, Level], Mapping[str, Tensor], frozenset[str], list[dict[str, Any]]
]


def join_fields(parts: "Sequence[AtomicData | Batch]", *, missing: Literal["error", "fill"]) -> Joined:
    """Everything :meth:`Batch._make` takes, for the concatenation of ``parts``."""
    levels, scalars = parts[0]._levels, parts[0]._scalars
    if any(part._levels != levels or part._scalars != scalars for part in parts):
        parts = _with_same_fields(parts, missing)
        levels, scalars = parts[0]._levels, parts[0]._scalars
    attributes = [part.__dict__ for part in parts]
    nodes = [a["positions"].shape[0] for a in attributes]
    first_node = [0, *accumulate(nodes)]
    tensors: dict[str, Tensor] = {}
    for name in levels:
        column = [a[name] for a in attributes]
        if name in scalars:
            column = [t.reshape(-1) for t in column]
        if name in FIELDS and FIELDS[name].refers_to_atoms and levels[name] == "edge":
            column = [t + first if first else t for t, first in zip(column, first_node, strict=False)]
        elif FIELDS.get(name) is not None and None in (FIELDS[name].shape or ()):
            column = _widened(name, column, nodes, first_node)
        tensors[name] = _concatenate(name, column, parts)
    device = tensors["positions"].device
    ptr = _join_ptr([_ptr(part, n) for part, n in zip(parts, nodes, strict=True)], device)
    edge_ptr = None
    if "edge" in levels.values():
        edge_ptr = _join_ptr([_edge_ptr(part) for part in parts], device)
    info = [i for part in parts for i in ([part._info] if isinstance(part, AtomicData) else part._info)]
    return ptr, edge_ptr, levels, tensors, scalars, info


def _ptr(part: "AtomicData | Batch", nodes: int) -> int | Tensor:
    return nodes if isinstance(part, AtomicData) else part.batch_ptr


def _edge_ptr(part: "AtomicData | Batch") -> int | Tensor:
    return part.num_edges if isinstance(part, AtomicData) else part.edge_ptr


def _join_ptr(pieces: Sequence[int | Tensor], device: torch.device) -> Tensor:
    """Row pointers of the joined batch from sizes (of single structures) and pointers (of batches)."""
    sizes: list[int] = []
    for piece in pieces:
        if isinstance(piece, Tensor):
            sizes.extend(piece.diff().tolist())
        else:
            sizes.append(piece)
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int64, device=device)


def _widened(name: str, column: list[Tensor], nodes: list[int], first_node: list[int]) -> list[Tensor]:
    """Rows of a padded matrix brought to one width, atom indices made batch-global."""
    width = max(t.shape[1] for t in column)
    refers, total = FIELDS[name].refers_to_atoms, first_node[-1]
    out: list[Tensor] = []
    for t, n, first in zip(column, nodes, first_node, strict=False):
        if refers:
            t = torch.where(t >= n, total, t + first)
        grown = t.new_full((t.shape[0], width, *t.shape[2:]), total if refers else 0)
        grown[:, : t.shape[1]] = t
        out.append(grown)
    return out


def _concatenate(name: str, column: list[Tensor], parts: "Sequence[AtomicData | Batch]") -> Tensor:
    if len({t.dtype for t in column}) > 1:
        # torch.cat would promote in silence.
        raise ValueError(f"field {name!r} has different dtypes: {_where(column, parts, lambda t: str(t.dtype))}")
    try:
        return torch.cat(column)
    except RuntimeError as error:
        if len({t.device for t in column}) > 1:
            raise ValueError(f"field {name!r} is on different devices: {_where(column, parts, lambda t: str(t.device))}") from error
        shapes = _where(column, parts, lambda t: str(list(t.shape[1:])))
        raise ValueError(f"field {name!r} has different shapes behind its leading dimension: {shapes}") from error


def _where(column: Sequence[Tensor], parts: "Sequence[AtomicData | Batch]", key: Any) -> str:
    """Which value occurs in which graphs: ``[3] in graphs 0, 1; [4] in graph 2``."""
    groups: dict[str, list[int]] = {}
    graph = 0
    for tensor, part in zip(column, parts, strict=True):
        groups.setdefault(key(tensor), []).extend(range(graph, graph + part.num_graphs))
        graph += part.num_graphs
    return "; ".join(f"{value} in {_graphs(graphs)}" for value, graphs in groups.items())


def _graphs(graphs: Sequence[int]) -> str:
    shown = ", ".join(map(str, graphs[:8])) + (f" and {len(graphs) - 8} more" if len(graphs) > 8 else "")
    return f"graph{'s' if len(graphs) > 1 else ''} {shown}"


def _with_same_fields(parts: "Sequence[AtomicData | Batch]", missing: str) -> "list[AtomicData | Batch]":
    """Copies of the parts that all have the same fields, or an error that says which graphs lack what."""
    if missing not in ("error", "fill"):
        raise ValueError(f"missing must be 'error' or 'fill', got {missing!r}")
    holders: dict[str, Any] = {}
    for part in parts:
        for name in part._levels:
            holders.setdefault(name, part)
    parts = [part._copy_with({}) for part in parts]
    for name, holder in holders.items():
        level: Level = holder._levels[name]
        starts = [0, *accumulate(part.num_graphs for part in parts)]
        lacking = [(start, part) for start, part in zip(starts, parts, strict=False) if name not in part._levels]
        for part in parts:
            if name in part._levels and (part._levels[name] != level or (name in part._scalars) != (name in holder._scalars)):
                raise ValueError(f"field {name!r} is of level {level!r} (or of shape []) in some graphs and not in others")
        if not lacking:
            continue
        known = FIELDS.get(name)
        if level == "edge" or (known is not None and known.refers_to_atoms) or name in _MATRIX_FIELDS:
            for part in parts:
                if name in part._levels:
                    part.remove_key(name)
            continue
        neutral = None if known is None else known.neutral
        if neutral is None and missing == "error":
            graphs = [g for start, part in lacking for g in range(start, start + part.num_graphs)]
            raise ValueError(
                f"field {name!r} is missing in {_graphs(graphs)} of {starts[-1]} while others have it; add it there, remove it "
                f"elsewhere, or pass missing='fill'"
            )
        for _, part in lacking:
            part._store(name, _filler(name, holder, part, neutral), level)
            part._scalars = holder._scalars | part._scalars if name in holder._scalars else part._scalars
    order = tuple(holders)
    for part in parts:
        part._levels = {name: part._levels[name] for name in order if name in part._levels}
    return parts


_MATRIX_FIELDS = frozenset({"num_neighbors", "neighbor_matrix_shifts"})


def _filler(name: str, holder: "AtomicData | Batch", part: "AtomicData | Batch", neutral: float | None) -> Tensor:
    like: Tensor = holder.__dict__[name]
    value = neutral if neutral is not None else float("nan") if like.is_floating_point() else 0
    if name in holder._scalars:
        return like.new_full((), value) if isinstance(part, AtomicData) else like.new_full((part.num_graphs,), value)
    rows = part.num_nodes if holder._levels[name] == "node" else part.num_graphs
    return like.new_full((rows, *like.shape[1:]), value, device=part.device)
