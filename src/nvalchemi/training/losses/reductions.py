"""Sums and means over the atoms of each graph, accumulated in float32 or more."""

import torch

from nvalchemi.typing import Float, Int, Tensor

__all__ = ["at_least_float32", "per_graph_mean", "per_graph_sum"]


def at_least_float32(values: Tensor) -> Tensor:
    """Cast half precision up to float32; float32 and float64 pass through.

    >>> (
    ...     at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype,
    ...     at_least_float32(torch.zeros(1).double()).dtype,
    ... )
    (torch.float32, torch.float64)
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def per_graph_sum(
    values: Float[Tensor, "N *shape"], batch_idx: Int[Tensor, " N"], num_graphs: int
) -> Float[Tensor, "{num_graphs} *shape"]:
    """Sum over the rows of each graph.

    Parameters
    ----------
    values : Tensor, shape [N, …]
        One row per atom; half precision is summed in float32.
    batch_idx : Tensor, shape [N]
        Graph of each row.
    num_graphs : int
        Number of graphs, B.

    Returns
    -------
    Tensor, shape [B, …]
        In float32, or float64 for float64 values; 0 for a graph without rows.

    Examples
    --------
    >>> half = torch.full((64,), 1600.0, dtype=torch.float16)
    >>> per_graph_sum(half, torch.zeros(64, dtype=torch.int64), 2).tolist()
    [102400.0, 0.0]
    """
    rows = at_least_float32(values)
    return rows.new_zeros(num_graphs, *rows.shape[1:]).index_add(0, batch_idx, rows)


def per_graph_mean(
    values: Float[Tensor, "N *shape"], batch_idx: Int[Tensor, " N"], num_graphs: int
) -> Float[Tensor, "{num_graphs} *shape"]:
    """Mean over the rows of each graph (see :func:`per_graph_sum`); 0 for a graph without rows.

    >>> per_graph_mean(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]), 2).tolist()
    [2.0, 5.0]
    """
    total = per_graph_sum(values, batch_idx, num_graphs)
    sizes = torch.bincount(batch_idx, minlength=num_graphs).clamp(min=1)
    return total / sizes.reshape(-1, *(1,) * (total.ndim - 1)).to(total.dtype)
