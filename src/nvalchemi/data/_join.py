"""Joining structures and batches into one: offsets, missing fields, and errors that name the graphs."""

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.schema import FIELDS, Level

if TYPE_CHECKING:
    from nvalchemi.data.batch import Batch

# What a neighbour search writes: it can be computed again, and the rows of the matrix are padded to one width.
_NEIGHBOR_FIELDS = frozenset(
    [
        "neighbor_list",
        "neighbor_list_shifts",
        "shifts",
        "neighbor_matrix",
        "num_neighbors",
        "neighbor_matrix_shifts",
    ]
)
Joined = tuple[
    Tensor, Tensor | None, Mapping[str, Level], Mapping[str, Tensor], frozenset[str], list[dict[str, Any]]
]


def join_fields(parts: "Sequence[AtomicData | Batch]", *, missing: Literal["error", "fill"]) -> Joined:
    """Concatenate ``parts`` into what :meth:`Batch._make` takes."""
    # A batch has thousands of small parts: loops over them run inside map and list.count where they can.
    attributes = list(map(vars, parts))
    levels, scalars = parts[0]._levels, parts[0]._scalars
    same_levels, same_scalars = (
        [a[key] for a in attributes].count(value) == len(parts)
        for key, value in (("_levels", levels), ("_scalars", scalars))
    )
    if not (same_levels and same_scalars):
        parts = _with_same_fields(parts, missing)
        attributes = list(map(vars, parts))
        levels, scalars = parts[0]._levels, parts[0]._scalars
    nodes = list(map(Tensor.numel, [a["atomic_numbers"] for a in attributes]))
    first_node = [0, *accumulate(nodes)]
    tensors: dict[str, Tensor] = {}
    for name in levels:
        column = [a[name] for a in attributes]
        if name in scalars:
            column = [t.reshape(-1) for t in column]
        if name in FIELDS and FIELDS[name].refers_to_atoms and levels[name] == "edge":
            column = [t + first if first else t for t, first in zip(column, first_node, strict=False)]
        elif name in ("neighbor_matrix", "neighbor_matrix_shifts"):
            column = _widened(name, column, nodes, first_node)
        tensors[name] = _concatenate(name, column, parts)
    device = tensors["positions"].device
    if all(issubclass(kind, AtomicData) for kind in set(map(type, parts))):
        ptr = torch.from_numpy(np.array(first_node, dtype=np.int64)).to(device)
        info = [a["_info"] for a in attributes]
    else:
        ptr = _join_ptr([_ptr(part) for part in parts], device)
        info = [i for part in parts for i in ([part._info] if isinstance(part, AtomicData) else part._info)]
    edge_ptr = None
    if "edge" in levels.values():
        edge_ptr = _join_ptr([_edge_ptr(part) for part in parts], device)
    return ptr, edge_ptr, levels, tensors, scalars, info


def _ptr(part: "AtomicData | Batch") -> int | Tensor:
    return part.num_nodes if isinstance(part, AtomicData) else part.batch_ptr


def _edge_ptr(part: "AtomicData | Batch") -> int | Tensor:
    return part.num_edges if isinstance(part, AtomicData) else part.edge_ptr


def _join_ptr(pieces: Sequence[int | Tensor], device: torch.device) -> Tensor:
    """Make the row pointers of the joined batch from sizes (of single structures) and pointers (of batches)."""
    sizes: list[int] = []
    for piece in pieces:
        if isinstance(piece, Tensor):
            sizes.extend(piece.diff().tolist())
        else:
            sizes.append(piece)
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int64, device=device)


def _widened(name: str, column: list[Tensor], nodes: list[int], first_node: list[int]) -> list[Tensor]:
    """Bring the rows of a padded matrix to one width and make its atom indices batch-global."""
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
    try:
        joined = torch.cat(column)
    except RuntimeError as error:
        if len({t.device for t in column}) > 1:
            raise ValueError(
                f"field {name!r} is on different devices: {_where(column, parts, lambda t: str(t.device))}"
            ) from error
        shapes = _where(column, parts, lambda t: str(list(t.shape[1:])))
        raise ValueError(
            f"field {name!r} has different shapes behind its leading dimension: {shapes}"
        ) from error
    # torch.cat promotes in silence. A charge may be 1 in one file and 0.5 in another, and floating-point fields are
    # widened to the type of the positions everywhere; anything else is an error.
    kind = FIELDS[name].kind if name in FIELDS else None
    widened = kind == "float" and name != "positions" and joined.dtype == parts[0].dtype
    if not widened and kind not in ("number", "bool") and len({t.dtype for t in column}) > 1:
        raise ValueError(
            f"field {name!r} has different dtypes: {_where(column, parts, lambda t: str(t.dtype))}"
        )
    return joined


def _where(column: Sequence[Tensor], parts: "Sequence[AtomicData | Batch]", key: Any) -> str:
    """Say which value occurs in which graphs: ``[3] in graphs 0, 1; [4] in graph 2``."""
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
    """Copy the parts so that all have the same fields, or raise an error that says which graphs lack what."""
    if missing not in ("error", "fill"):
        raise ValueError(f"missing must be 'error' or 'fill', got {missing!r}")
    holders: dict[str, AtomicData | Batch] = {}
    for part in parts:
        for name in part._levels:
            holders.setdefault(name, part)
    parts = [copy(part) for part in parts]
    starts = list(accumulate((part.num_graphs for part in parts), initial=0))
    for name, holder in holders.items():
        level = holder._levels[name]
        lacking = [
            (start, part) for start, part in zip(starts, parts, strict=False) if name not in part._levels
        ]
        for part in parts:
            if name in part._levels and (part._levels[name], name in part._scalars) != (
                level,
                name in holder._scalars,
            ):
                raise ValueError(
                    f"field {name!r} is of level {level!r} (or of shape []) in some graphs and not in others"
                )
        if not lacking:
            continue
        known = FIELDS.get(name)
        if name in _NEIGHBOR_FIELDS:
            for part in parts:
                if name in part._levels:
                    part.remove_key(name)
            continue
        neutral = None if known is None else known.neutral
        if neutral is None and missing == "error":
            graphs = [g for start, part in lacking for g in range(start, start + part.num_graphs)]
            raise ValueError(
                f"field {name!r} is missing in {_graphs(graphs)} of {starts[-1]} while others have it; add it there, "
                f"remove it elsewhere, or pass missing='fill'"
            )
        for _, part in lacking:
            part._store(name, _filler(name, holder, part, neutral), level)
            if name in holder._scalars:
                part._scalars = part._scalars | {name}
    for part in parts:
        part._levels = {name: part._levels[name] for name in holders if name in part._levels}
    return parts


def _filler(
    name: str, holder: "AtomicData | Batch", part: "AtomicData | Batch", neutral: float | None
) -> Tensor:
    like: Tensor = vars(holder)[name]
    value = neutral if neutral is not None else float("nan") if like.is_floating_point() else 0
    if name in holder._scalars and isinstance(part, AtomicData):
        return like.new_full((), value, device=part.device)
    rows = {"node": part.num_nodes, "edge": part.num_edges, "system": part.num_graphs}[holder._levels[name]]
    tail = () if name in holder._scalars else like.shape[1:]
    return like.new_full((rows, *tail), value, device=part.device)
