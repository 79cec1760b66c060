"""Time and memory of a model evaluation against its size: found by trying, kept on disk.

An evaluation that is small pays for calls, one that is large for caches that its numbers do not fit into; in between
the time per edge is flat, and where that is depends on model, device and threads. So sizes are doubled from a small one
until they are clearly slower, and the smallest is taken that is as good as the best.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nvalchemi import _cache
from nvalchemi.data import Batch
from nvalchemi.models.base import BaseModelMixin

Evaluate = Callable[[Batch], Mapping[str, Tensor]]
Sample = Callable[[int], tuple[Batch, Sequence[Batch]] | None]

SMALLEST_SIZE = 256
"""Edges; below, the cost of a call outweighs that of its edges for every potential tried."""
_AS_GOOD = 1.03
_CLEARLY_SLOWER = 1.2
_FAR_BEYOND_BEST = 8
_TRIAL_SECONDS = 0.1
_LARGEST = 2**62
"""No number of a trial can be as large."""
_SHARE_OF_MEMORY = {"cuda": 0.8, "cpu": 0.4}
"""What an evaluation may take. On the CPU only what is kept for the derivatives is counted, not what is in use."""


class Trial(NamedTuple):
    """One evaluation that was measured."""

    atoms: int
    edges: int
    seconds: float
    bytes: int
    relative: float
    """Time per edge over that with evaluations of the smallest size."""


class PieceBound(NamedTuple):
    """What may be evaluated at once."""

    max_edges: int
    """Edges with the least time per edge, or as many as fit into memory."""
    bytes_per_atom: float
    bytes_per_edge: float
    max_bytes: float


class EvaluationCost:
    """Measured evaluations of one model on one device.

    Parameters
    ----------
    trials : mapping of int to Trial
        By size: the bound on edges that the evaluation was to fill.
    complete : bool
        Larger sizes need no trial: they are slower. That they do not fit into memory may be different next time.
    """

    def __init__(self, trials: Mapping[int, Trial] | None = None, complete: bool = False) -> None:
        self.trials = dict(trials or {})
        self.complete = complete

    def covers(self, edges: int) -> bool:
        """Whether a set of this many edges can be cut without further trials."""
        return self.complete or edges <= max(self.trials, default=SMALLEST_SIZE)

    @property
    def best_size(self) -> int | None:
        """Smallest size as good as that with the least time per edge; ``None`` before any was tried."""
        if not self.trials:
            return None
        least = min(trial.relative for trial in self.trials.values())
        return min(size for size, trial in self.trials.items() if trial.relative <= _AS_GOOD * least)

    def seconds(self) -> tuple[float, float, float]:
        """Seconds of an evaluation: a constant, per atom, per edge."""
        return self._fit([trial.seconds for trial in self.trials.values()])

    def memory(self) -> tuple[float, float, float]:
        """Bytes of an evaluation: a constant, per atom, per edge."""
        return self._fit([trial.bytes for trial in self.trials.values()])

    def _fit(self, measured: Sequence[float]) -> tuple[float, float, float]:
        """Non-negative coefficients with the least relative deviations from what was measured."""
        weight = 1 / np.maximum(measured, 1e-9)
        rows = np.array([(1.0, trial.atoms, trial.edges) for trial in self.trials.values()]) * weight[:, None]
        best, least = (0.0, 0.0, 0.0), math.inf
        for columns in ([0, 1, 2], [0, 2], [0, 1], [1, 2], [2], [1], [0]):
            fit = np.linalg.lstsq(rows[:, columns], measured * weight, rcond=None)[0]
            residual = float(np.square(rows[:, columns] @ fit - measured * weight).sum())
            if (fit >= 0).all() and residual < least:
                found = np.zeros(3)
                found[columns] = fit
                best, least = (float(found[0]), float(found[1]), float(found[2])), residual
        return best

    def bound(self, device: torch.device) -> PieceBound | None:
        """Best size, and what the memory that is free now allows; ``None`` before any trial."""
        best = self.best_size
        if best is None:
            return None
        constant, per_atom, per_edge = self.memory()
        largest = max(trial.bytes for trial in self.trials.values())
        # What was measured to fit is allowed, whatever else takes memory now.
        free = max(_SHARE_OF_MEMORY.get(device.type, 0.4) * _free_bytes(device) - constant, largest, 1.0)
        return PieceBound(best, per_atom, per_edge, free)

    def measure(self, evaluate: Evaluate, sample: Sample, total: int) -> "EvaluationCost":
        """Try sizes until larger ones are clearly slower or too large for the memory, or up to ``total`` edges.

        Parameters
        ----------
        evaluate : callable
            The model.
        sample : callable
            Gives for a size a batch that fills it, and the same structures in batches of half that size; ``None`` where
            there is none. How structures differ then does not count.
        total : int
            Edges there are.

        Returns
        -------
        EvaluationCost
            Itself.
        """
        size, relative = SMALLEST_SIZE, 1.0
        while not self.complete:
            if size not in self.trials and (batches := sample(size)) is not None:
                trial = _try(evaluate, *batches, relative if self.trials else None)
                if trial is None:
                    break
                self.trials[size] = trial
            best = self.best_size
            if best is not None and size in self.trials:
                relative = self.trials[size].relative
                slower = relative > _CLEARLY_SLOWER * self.trials[best].relative
                self.complete = size > best and (slower or size >= _FAR_BEYOND_BEST * best)
            if size >= total:
                break
            size *= 2
        return self

    # ------------------------------------------------------------------ on disk
    def save(self, key: Mapping[str, Any]) -> None:
        """Keep for other runs."""
        trials = {str(size): list(trial) for size, trial in self.trials.items()}
        _cache.store("evaluation_cost", key, {"trials": trials, "complete": self.complete})

    @classmethod
    def of(cls, key: Mapping[str, Any]) -> "EvaluationCost":
        """What earlier runs have measured; nothing where that is damaged."""
        stored = _cache.load("evaluation_cost", key)
        try:
            trials = {
                int(size): Trial(int(atoms), int(edges), float(seconds), int(taken), float(relative))
                for size, (atoms, edges, seconds, taken, relative) in stored["trials"].items()
            }
            sound = all(
                SMALLEST_SIZE <= size < _LARGEST
                and 0 <= t.bytes < _LARGEST
                and all(0 < value < _LARGEST for value in (t.atoms, t.edges, t.seconds, t.relative))
                for size, t in trials.items()
            )
            return cls(trials, bool(stored["complete"]) and bool(trials)) if sound else cls()
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
            return cls()


def cost_key(model: BaseModelMixin, batch: Batch) -> dict[str, Any]:
    """What the cost of an evaluation depends on besides its size: the shapes of weights, outputs, device, threads."""
    config = {
        name: sorted(value) if isinstance(value, frozenset) else repr(value)
        for name, value in model.model_config
        if name != "active_outputs"
    }
    weights = hashlib.sha256()
    if isinstance(model, nn.Module):
        for name, tensor in model.state_dict().items():
            weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
    device = batch.device
    unit = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "configuration": config,
        "weights": weights.hexdigest(),
        "outputs": sorted(model.requested_outputs(batch)),
        "dtype": str(batch.dtype),
        "device": f"{device.type} {unit} {os.cpu_count()}",
        "threads": torch.get_num_threads(),
        "versions": [version("nvalchemi"), torch.__version__],
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an evaluation failed for want of memory, of a device or of the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def fits_into_memory(call: Callable[[], None], device: torch.device) -> bool:
    """Call a function; ``False`` when it ran out of memory, all of which is free again then."""
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return False


def _try(evaluate: Evaluate, whole: Batch, halves: Sequence[Batch], before: float | None) -> Trial | None:
    """Measure an evaluation, after one to warm up; ``None`` when it does not fit into memory.

    ``before`` is the relative time per edge of half the size, ``None`` for the first trial.
    """
    taken: list[int] = []
    at_once: list[float] = []
    in_halves: list[float] = []
    compared = before is not None and len(halves) > 1

    def run() -> None:
        taken.append(_bytes(evaluate, whole))
        # The least of several: whatever else the machine does only adds.
        while len(at_once) < 2 or (len(at_once) < 10 and sum(at_once) < _TRIAL_SECONDS):
            at_once.append(_seconds(evaluate, [whole]))
            if compared:
                in_halves.append(_seconds(evaluate, halves))

    if not fits_into_memory(run, whole.device):
        return None
    relative = (before or 1.0) * (min(at_once) / min(in_halves) if compared else 1.0)
    edges = max(int(edges_per_graph(whole).sum()), 1)
    return Trial(whole.num_nodes, edges, min(at_once), taken[0], relative)


def _seconds(evaluate: Evaluate, batches: Sequence[Batch]) -> float:
    device = batches[0].device
    # On one thread the time that other programs take from this one can be left out.
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for batch in batches:
        evaluate(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def _bytes(evaluate: Evaluate, batch: Batch) -> int:
    """Memory that an evaluation takes: its peak on a GPU, on the CPU what is kept for derivatives."""
    if batch.device.type == "cuda":
        before = torch.cuda.memory_allocated(batch.device)
        torch.cuda.reset_peak_memory_stats(batch.device)
        evaluate(batch)
        return torch.cuda.max_memory_allocated(batch.device) - before
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        evaluate(batch)
    return sum(kept.values())


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def edges_per_graph(batch: Batch) -> Tensor:
    """Number of edges of each graph, or of atoms where there is no neighbour list."""
    if "neighbor_list" in batch:
        return batch.num_edges_per_graph
    if "num_neighbors" in batch:
        counts = batch.num_neighbors.new_zeros(batch.num_graphs, dtype=torch.int64)
        return counts.index_add_(0, batch.batch_idx, batch.num_neighbors.long())
    return batch.num_nodes_per_graph
