"""One evaluation of the model ahead of a run: which structures it cannot take, all of them and why."""

from collections.abc import Iterator, Sequence

import torch

from nvalchemi.cli.session import without_graph_names
from nvalchemi.data import Batch
from nvalchemi.dynamics.session import ModelSession
from nvalchemi.models.base import BaseModelMixin
from nvalchemi.neighbors import compute_neighbors

_ATOMS_PER_PIECE = 2048


def unusable(batch: Batch, model: BaseModelMixin) -> dict[int, str]:
    """Structures of a batch that the model cannot evaluate, by number, with the reason. The batch stays as it is."""
    if not all(name in batch for name in model.model_config.required_inputs):
        return {}  # which no structure alone is to blame for; the engine says so
    bad: dict[int, str] = {}
    with ModelSession(model, frozenset({"energy", "forces"})):
        for graphs in _pieces(batch):
            bad.update(_try(batch, graphs, model))
    return bad


def _pieces(batch: Batch) -> Iterator[list[int]]:
    piece: list[int] = []
    atoms = 0
    for graph, size in enumerate(batch.num_nodes_per_graph.tolist()):
        if piece and atoms + size > _ATOMS_PER_PIECE:
            yield piece
            piece, atoms = [], 0
        piece.append(graph)
        atoms += size
    yield piece


def _try(batch: Batch, graphs: Sequence[int], model: BaseModelMixin) -> dict[int, str]:
    """Evaluate; where that is refused, halve until those to blame are found."""
    part = batch.index_select(torch.tensor(graphs, device=batch.device))
    part.system_id = torch.tensor(graphs, device=batch.device)[:, None]
    neighbors = model.model_config.neighbor_config
    try:
        if neighbors is not None:
            compute_neighbors(part, config=neighbors)
        outputs = model(part)
    except ValueError as error:
        if len(graphs) == 1:
            return {graphs[0]: without_graph_names(str(error))}
        middle = len(graphs) // 2
        return _try(batch, graphs[:middle], model) | _try(batch, graphs[middle:], model)
    except (RuntimeError, MemoryError):
        return {}  # too much at once, perhaps, which the engine knows how to cut into pieces
    wrong = ~outputs["energy"][:, 0].isfinite()
    wrong[part.batch_idx[~outputs["forces"].isfinite().all(dim=1)]] = True
    return {
        graphs[k]: "energy or forces are not finite; do atoms overlap?"
        for k in wrong.nonzero()[:, 0].tolist()
    }
