"""Evaluation of a model on the graphs that are active, in pieces of bounded size.

A :class:`Batch` keeps its graphs for a whole run, but a graph that is done must not cost a model
evaluation. A :class:`PieceEvaluator` holds small batches with the active graphs, made anew only when the
active set or the neighbour list changed; in between only the fields that changed (positions, cell) are
copied over.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nvalchemi.data import FIELDS, Batch
from nvalchemi.dynamics.segments import sum_per_graph

Cutter = Callable[[Sequence[int]], Sequence[tuple[int, int]]]
"""Chooses pieces from the number of edges of each active graph: pairs (start, stop) that cover them in order."""

_SMALLEST_PIECE = 256
"""Edges; below, the cost of a call outweighs that of its edges for every potential tried."""
_CLEARLY_SLOWER = 1.2
_TRIAL_SECONDS = 0.05

OUTPUTS = frozenset({"energy", "forces", "stress", "virial", "dipole"})
"""Fields that the engine takes from a model's outputs into the batch."""

_NOT_READ_BY_MODELS = OUTPUTS | {"velocities", "momenta", "status", "system_step", "image_flags"}

_LIST_FIELDS = (
    "neighbor_list",
    "neighbor_list_shifts",
    "neighbor_matrix",
    "num_neighbors",
    "neighbor_matrix_shifts",
    "shifts",
)


def cut_by_edges(max_edges: int) -> Cutter:
    """Pieces of consecutive graphs with at most ``max_edges`` edges; a larger graph is a piece of its own.

    >>> cut_by_edges(10)([4, 6, 7, 12, 1])
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """

    def cut(edges: Sequence[int]) -> list[tuple[int, int]]:
        pieces: list[tuple[int, int]] = []
        start, total = 0, 0
        for graph, count in enumerate(edges):
            if graph > start and total + count > max_edges:
                pieces.append((start, graph))
                start, total = graph, 0
            total += count
        if len(edges) > start:
            pieces.append((start, len(edges)))
        return pieces

    return cut


def as_cutter(
    max_edges_per_eval: "int | Cutter | Literal['auto'] | None",
) -> "Cutter | Literal['auto'] | None":
    """Validate the engine's argument of that name; ``None`` means one piece."""
    if max_edges_per_eval is None or callable(max_edges_per_eval):
        return max_edges_per_eval
    if max_edges_per_eval == "auto":
        return "auto"
    if (
        isinstance(max_edges_per_eval, bool)
        or not isinstance(max_edges_per_eval, int)
        or max_edges_per_eval < 1
    ):
        raise ValueError(
            f"max_edges_per_eval must be an int ≥ 1, 'auto', a function or None, got {max_edges_per_eval!r}"
        )
    return cut_by_edges(max_edges_per_eval)


def store_outputs(batch: Batch, outputs: Mapping[str, Tensor]) -> None:
    """Copy a model's outputs for the whole batch into its fields, in place where they exist."""
    for name, value in outputs.items():
        if name not in OUTPUTS:
            continue
        target: Tensor | None = batch.get(name)
        if target is None:
            batch.add_key(name, value.detach().clone())
        elif target.shape != value.shape:
            raise ValueError(
                f"model output {name!r} has shape {list(value.shape)}, the batch's has {list(target.shape)}"
            )
        elif target is not value:
            target.copy_(value)


@dataclass
class _Piece:
    batch: Batch
    graphs: Tensor
    nodes: Tensor
    copied: dict[str, tuple[Tensor, int]]
    """Field → the tensor of the whole batch it was last copied from, and that tensor's version then."""


class PieceEvaluator:
    """Evaluate a model on the active graphs of a batch and scatter the results.

    Every field travels with a graph except those that engines write and models do not read (velocities,
    results, state of integrators), so that charges, spins and fields of the user's own reach the model.

    Parameters
    ----------
    cutter : callable or "auto", optional
        Chooses the pieces; ``None``: one piece. ``"auto"``: of the size that takes the least time per edge, which is
        tried on the first batch. Another size changes results by round-off, so that it is part of the state.
    """

    def __init__(self, cutter: "Cutter | Literal['auto'] | None") -> None:
        self._cutter = cutter
        self.max_edges: int | None = None
        """Edges per piece that were found to be best, once ``"auto"`` has tried."""
        self._pieces: list[_Piece] = []
        self._objects: tuple[object, ...] = ()
        self._versions: tuple[object, ...] = ()

    def __call__(
        self, model: Callable[[Batch], Mapping[str, Tensor]], batch: Batch, active: Tensor | None
    ) -> None:
        """Write the model's results for the graphs marked in ``active`` (``None``: all) into the batch."""
        lists = [batch.get(name) for name in _LIST_FIELDS]
        objects = (batch, batch.batch_ptr, active, *lists)
        versions = (batch.keys(), *[None if t is None else t._version for t in lists])
        same = len(objects) == len(self._objects) and all(
            a is b for a, b in zip(objects, self._objects, strict=True)
        )
        if not same or versions != self._versions:
            self._pieces = self._cut(model, batch, active)
            self._objects, self._versions = objects, versions
        if active is None and len(self._pieces) == 1:
            store_outputs(batch, model(batch))
            return
        for piece in self._pieces:
            _refresh(piece, batch)
            _scatter(model(piece.batch), piece, batch)

    def state_dict(self) -> dict[str, int | None]:
        """The size that ``"auto"`` found."""
        return {"max_edges": self.max_edges}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Take up a size."""
        self.max_edges = state["max_edges"]

    def _cut(
        self, model: Callable[[Batch], Mapping[str, Tensor]], batch: Batch, active: Tensor | None
    ) -> list[_Piece]:
        graphs = torch.arange(batch.num_graphs, device=batch.device)
        if active is not None:
            graphs = graphs[active]
        if graphs.shape[0] == 0:
            return []
        cuts: Sequence[tuple[int, int]] = [(0, graphs.shape[0])]
        if self._cutter is not None:
            edges: list[int] = _edges_per_graph(batch)[graphs].tolist()
            if isinstance(self._cutter, str):
                if self.max_edges is None:
                    self.max_edges = _fastest_size(model, batch, graphs, edges)
                cuts = cut_by_edges(self.max_edges)(edges)
            else:
                cuts = self._cutter(edges)
            bounds = [bound for cut in cuts for bound in cut]
            if [0, *bounds[1::2]] != [*bounds[::2], graphs.shape[0]]:
                raise ValueError(
                    f"max_edges_per_eval must cut {graphs.shape[0]} graphs into pieces that cover all, got {cuts}"
                )
        return [_make_piece(batch, graphs[start:stop]) for start, stop in cuts]


def _fastest_size(
    model: Callable[[Batch], Mapping[str, Tensor]], batch: Batch, graphs: Tensor, edges: Sequence[int]
) -> int:
    """Edges per evaluation with the least time per edge; sizes are doubled until they are clearly slower."""
    size, best, least = _SMALLEST_PIECE, max(sum(edges), 1), math.inf
    while True:
        counts = {cut: sum(edges[slice(*cut)]) for cut in cut_by_edges(size)(edges)}
        # A graph with more edges than this size is a piece of its own, and says nothing of the size.
        fitting = {cut: count for cut, count in counts.items() if 0 < count <= size}
        if fitting:
            (start, stop), count = max(fitting.items(), key=lambda item: item[1])
            seconds = _seconds(model, _make_piece(batch, graphs[start:stop]).batch) / count
            if seconds < least:
                best, least = size, seconds
            elif seconds > _CLEARLY_SLOWER * least:
                return best
        if len(counts) == 1 or size > sum(edges):
            return best
        size *= 2


def _seconds(model: Callable[[Batch], Mapping[str, Tensor]], batch: Batch) -> float:
    """Time of an evaluation after one to warm up; the least of several where that costs little."""
    least, spent = math.inf, 0.0
    for trial in range(5):
        start = time.perf_counter()
        model(batch)
        if batch.device.type == "cuda":
            torch.cuda.synchronize(batch.device)
        seconds = time.perf_counter() - start
        spent += seconds
        if trial > 0:
            least = min(least, seconds)
            if spent > _TRIAL_SECONDS:
                break
    return least


def _edges_per_graph(batch: Batch) -> Tensor:
    """Number of edges of each graph, or of atoms where there is no neighbour list."""
    if "neighbor_list" in batch:
        return batch.num_edges_per_graph
    if "num_neighbors" in batch:
        return sum_per_graph(batch.num_neighbors.double(), batch.batch_ptr).long()
    return batch.num_nodes_per_graph


def _is_read(name: str) -> bool:
    if name in _NOT_READ_BY_MODELS:
        return False
    return name in _LIST_FIELDS or name not in FIELDS or FIELDS[name].persistent


def _make_piece(batch: Batch, graphs: Tensor) -> _Piece:
    piece = batch.index_select(graphs)
    for name in piece.keys():
        if not _is_read(name):
            piece.remove_key(name)
    member = torch.zeros(batch.num_graphs, dtype=torch.bool, device=batch.device)
    member[graphs] = True
    nodes = member[batch.batch_idx].nonzero().squeeze(1)
    copied = {
        name: (batch[name], batch[name]._version)
        for name in piece.keys()
        if piece.level(name) != "edge" and name not in _LIST_FIELDS
    }
    return _Piece(piece, graphs, nodes, copied)


def _refresh(piece: _Piece, batch: Batch) -> None:
    """Copy the fields that changed since the last time."""
    for name, (tensor, version) in piece.copied.items():
        now: Tensor = batch[name]
        if now is tensor and now._version == version:
            continue
        rows = piece.nodes if batch.level(name) == "node" else piece.graphs
        torch.index_select(now, 0, rows, out=piece.batch[name])
        piece.copied[name] = (now, now._version)


def _scatter(outputs: Mapping[str, Tensor], piece: _Piece, batch: Batch) -> None:
    for name, value in outputs.items():
        # A piece may give more than the whole batch can, such as the stress when the only molecule is not
        # in it.
        if name not in OUTPUTS or name not in batch:
            continue
        rows = piece.nodes if batch.level(name) == "node" else piece.graphs
        target: Tensor = batch[name]
        if value.shape != (rows.shape[0], *target.shape[1:]):
            raise ValueError(
                f"model output {name!r} has shape {list(value.shape)}, expected {[rows.shape[0], *target.shape[1:]]}"
            )
        target.index_copy_(0, rows, value)
