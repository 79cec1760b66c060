"""Sums and maxima over the atoms of each graph.

Every graph is reduced on its own, in the order of its atoms, so the result does not depend on what else is
in the batch.
"""

import torch
from torch import Tensor


def sum_per_graph(values: Tensor, ptr: Tensor) -> Tensor:
    """Sum of ``values`` [N, ...] over each graph's atoms, from ``ptr[i]`` to ``ptr[i + 1]``: [B, ...]; 0 for none."""
    return torch.segment_reduce(values, "sum", offsets=ptr, axis=0, unsafe=True, initial=0)


def max_per_graph(values: Tensor, ptr: Tensor) -> Tensor:
    """Largest of ``values`` ≥ 0, [N], over each graph's atoms: [B]; 0 for none, NaN if one is NaN."""
    return torch.segment_reduce(values, "max", offsets=ptr, axis=0, unsafe=True, initial=0)
