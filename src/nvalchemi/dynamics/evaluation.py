"""Evaluation of a model on the graphs that are active, in pieces of bounded size.

A :class:`Batch` keeps its graphs for a whole run, but a graph that is done must not cost a model
evaluation. A :class:`PieceEvaluator` holds small batches with the active graphs, made anew only when the
active set or the neighbour list changed; in between only the fields that changed (positions, cell) are
copied over.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nvalchemi.data import FIELDS, Batch
from nvalchemi.dynamics.cost import (
    EvaluationCost,
    PieceBound,
    cost_key,
    edges_per_graph,
    fits_into_memory,
)
from nvalchemi.models.base import BaseModelMixin

logger = logging.getLogger(__name__)

Cutter = Callable[[Sequence[int]], Sequence[tuple[int, int]]]
"""Chooses pieces from the number of edges of each active graph: pairs (start, stop) that cover them in order."""

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
        return cut_by_loads([edges], [max_edges])

    return cut


def cut_by_loads(loads: Sequence[Sequence[float]], limits: Sequence[float]) -> list[tuple[int, int]]:
    """Pieces of consecutive graphs that keep within several limits; a larger graph is a piece of its own.

    Parameters
    ----------
    loads : sequence of sequence of float
        For each limit, the load of each graph.
    limits : sequence of float
        What the loads of a piece may add up to.
    """
    pieces: list[tuple[int, int]] = []
    start, totals = 0, [0.0] * len(limits)
    for graph, load in enumerate(zip(*loads, strict=True)):
        sums = [total + more for total, more in zip(totals, load, strict=True)]
        if graph > start and any(value > limit for value, limit in zip(sums, limits, strict=True)):
            pieces.append((start, graph))
            start, sums = graph, list(load)
        totals = sums
    if len(loads[0]) > start:
        pieces.append((start, len(loads[0])))
    return pieces


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


def forget_outputs(batch: Batch, graphs: Sequence[int]) -> None:
    """Make NaN of the results of graphs that could not be evaluated."""
    mask = torch.zeros(batch.num_graphs, dtype=torch.bool, device=batch.device)
    mask[list(graphs)] = True
    for name in OUTPUTS:
        if name in batch:
            target: Tensor = batch[name]
            rows = mask[batch.batch_idx] if batch.level(name) == "node" else mask
            target.masked_fill_(rows.view(-1, *[1] * (target.ndim - 1)), torch.nan)


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

    A piece that does not fit into memory is halved, again if it must be, and later ones are not made larger.

    Parameters
    ----------
    cutter : callable or "auto", optional
        Chooses the pieces; ``None``: one piece. ``"auto"``: of the size that takes the least time per edge
        (:mod:`nvalchemi.dynamics.cost`), which is measured where no earlier run did. Another size changes results by
        round-off, so that it is part of the state.
    model : BaseModelMixin
        Whose cost it is.
    """

    def __init__(self, cutter: "Cutter | Literal['auto'] | None", model: BaseModelMixin) -> None:
        self._cutter = cutter
        self._model = model
        self.bound: PieceBound | None = None
        """What ``"auto"`` has found."""
        self._covered = 0
        self._memory_limit: int | None = None
        """Edges, half of those of the smallest piece that did not fit."""
        self._pieces: list[_Piece] = []
        self._objects: tuple[object, ...] = ()
        self._versions: tuple[object, ...] = ()

    def __call__(
        self, model: Callable[[Batch], Mapping[str, Tensor]], batch: Batch, active: Tensor | None
    ) -> list[int]:
        """Write the model's results for the graphs marked in ``active`` (``None``: all) into the batch.

        Returns
        -------
        list of int
            Graphs that do not fit into memory even alone, and got no results.
        """
        lists = [batch.get(name) for name in _LIST_FIELDS]
        objects = (batch, batch.batch_ptr, active, *lists)
        versions = (batch.keys(), *[None if t is None else t._version for t in lists])
        same = len(objects) == len(self._objects) and all(
            a is b for a, b in zip(objects, self._objects, strict=True)
        )
        if not same or versions != self._versions:
            self._pieces = self._cut(model, batch, active)
            self._objects, self._versions = objects, versions
        too_large: list[int] = []
        done = 0
        while done < len(self._pieces):
            piece = self._pieces[done]
            whole = active is None and len(self._pieces) == 1
            if fits_into_memory(lambda p=piece, w=whole: _evaluate(model, p, batch, w), batch.device):
                done += 1
            elif piece.graphs.shape[0] > 1:
                self._pieces[done : done + 1] = self._halves(batch, piece)
            else:
                too_large.append(int(piece.graphs))
                done += 1
        return too_large

    def find_bound(
        self, model: Callable[[Batch], Mapping[str, Tensor]], batch: Batch, *, total: int | None = None
    ) -> PieceBound:
        """What may be evaluated at once, measured on the structures of a batch where no earlier run did.

        Parameters
        ----------
        model : callable
            The model.
        batch : Batch
            Structures with neighbour lists.
        total : int, optional
            Edges that there will be; structures are repeated to fill evaluations that are larger than the batch.
            Default: as many as the batch has.
        """
        edges: list[int] = edges_per_graph(batch).tolist()
        wanted = sum(edges) if total is None else total

        def sample(size: int) -> tuple[Batch, list[Batch]] | None:
            times = 1 if total is None else -(-size // max(sum(edges), 1))
            counts = edges * times
            cuts = {cut: sum(counts[slice(*cut)]) for cut in cut_by_edges(size)(counts)}
            # A graph with more edges than this size is a piece of its own, and says nothing of the size.
            fitting = {cut: count for cut, count in cuts.items() if 0 < count <= size}
            if not fitting:
                return None
            start, stop = max(fitting, key=lambda cut: fitting[cut])
            graphs = torch.arange(batch.num_graphs, device=batch.device).repeat(times)[start:stop]
            halves = cut_by_edges(size // 2)(counts[start:stop])
            return _make_piece(batch, graphs).batch, [
                _make_piece(batch, graphs[slice(*cut)]).batch for cut in halves
            ]

        key = cost_key(self._model, batch)
        cost = EvaluationCost.of(key)
        if not cost.covers(wanted):
            cost.measure(model, sample, wanted).save(key)
        self._covered = max(wanted, self._covered)
        self.bound = cost.bound(batch.device) or PieceBound(max(wanted, 1), 0.0, 0.0, 1.0)
        return self.bound

    def atoms_at_once(
        self, model: Callable[[Batch], Mapping[str, Tensor]], batch: Batch, total_atoms: int
    ) -> int:
        """Atoms of one evaluation of structures like those of ``batch``, of which there are ``total_atoms``."""
        edges_per_atom = max(int(edges_per_graph(batch).sum()), 1) / batch.num_nodes
        bound = self.find_bound(model, batch, total=math.ceil(total_atoms * edges_per_atom))
        bytes_per_atom = bound.bytes_per_atom + bound.bytes_per_edge * edges_per_atom
        return int(min(bound.max_edges / edges_per_atom, bound.max_bytes / max(bytes_per_atom, 1e-9)))

    def state_dict(self) -> dict[str, Any]:
        """What ``"auto"`` has found, and what did not fit."""
        bound = None if self.bound is None else list(self.bound)
        return {"bound": bound, "covered": self._covered, "memory_limit": self._memory_limit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what another run has found."""
        self.bound = None if state["bound"] is None else PieceBound(*state["bound"])
        self._covered, self._memory_limit = state["covered"], state["memory_limit"]

    def _cut(
        self, model: Callable[[Batch], Mapping[str, Tensor]], batch: Batch, active: Tensor | None
    ) -> list[_Piece]:
        graphs = torch.arange(batch.num_graphs, device=batch.device)
        if active is not None:
            graphs = graphs[active]
        if graphs.shape[0] == 0:
            return []
        if graphs.shape[0] == 1 or (self._cutter is None and self._memory_limit is None):
            return [_make_piece(batch, graphs)]
        edges: list[int] = edges_per_graph(batch)[graphs].tolist()
        cuts: Sequence[tuple[int, int]] = [(0, len(edges))]
        if isinstance(self._cutter, str):
            if self.bound is None or sum(edges) > 2 * self._covered:
                self.find_bound(model, batch.index_select(graphs))
            cuts = self._cut_by_bound(edges, batch.num_nodes_per_graph[graphs].tolist())
        elif self._cutter is not None:
            cuts = self._cutter(edges)
        bounds = [bound for cut in cuts for bound in cut]
        if [0, *bounds[1::2]] != [*bounds[::2], graphs.shape[0]]:
            raise ValueError(
                f"max_edges_per_eval must cut {graphs.shape[0]} graphs into pieces that cover all, got {cuts}"
            )
        if self._memory_limit is not None:
            finer = cut_by_edges(self._memory_limit)
            cuts = [(start + a, start + b) for start, stop in cuts for a, b in finer(edges[start:stop])]
        return [_make_piece(batch, graphs[start:stop]) for start, stop in cuts]

    def _cut_by_bound(self, edges: Sequence[int], atoms: Sequence[int]) -> list[tuple[int, int]]:
        assert self.bound is not None
        max_edges, per_atom, per_edge, max_bytes = self.bound
        taken = [per_atom * n + per_edge * e for n, e in zip(atoms, edges, strict=True)]
        return cut_by_loads([edges, taken], [max_edges, max_bytes])

    def _halves(self, batch: Batch, piece: _Piece) -> list[_Piece]:
        """Two pieces of about as many edges, in place of one that did not fit into memory."""
        up_to = edges_per_graph(piece.batch).cumsum(0)
        total = int(up_to[-1])
        middle = min(max(int((up_to <= total // 2).sum()), 1), piece.graphs.shape[0] - 1)
        half = max(total // 2, 1)
        # Pieces that were cut before the limit was found may be larger than it.
        self._memory_limit = half if self._memory_limit is None else min(half, self._memory_limit)
        logger.warning(
            "an evaluation of %d edges does not fit into the memory of %s: at most %d from now on",
            total, batch.device, self._memory_limit,
        )  # fmt: skip
        return [_make_piece(batch, graphs) for graphs in (piece.graphs[:middle], piece.graphs[middle:])]


def _evaluate(
    model: Callable[[Batch], Mapping[str, Tensor]], piece: _Piece, batch: Batch, whole: bool
) -> None:
    if whole:
        store_outputs(batch, model(batch))
        return
    _refresh(piece, batch)
    _scatter(model(piece.batch), piece, batch)


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
