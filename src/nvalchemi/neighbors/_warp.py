"""Neighbour search by the Warp kernels of nvalchemi-toolkit-ops, for GPUs."""

import importlib.util

import torch

from nvalchemi.neighbors._failure import Describe
from nvalchemi.neighbors._torch import check_structures, is_pair
from nvalchemi.typing import Bool, Float, Int, Tensor


def is_installed() -> bool:
    """Whether the package can be imported."""
    return importlib.util.find_spec("nvalchemiops") is not None


def find_pairs(
    positions: Float[Tensor, "N 3"],
    batch_ptr: Int[Tensor, "B_plus_1"],
    cell: Float[Tensor, "B 3 3"],
    pbc: Bool[Tensor, "B 3"],
    cutoff: float,
    half_list: bool,
    describe: Describe,
) -> tuple[Int[Tensor, "E 2"], Int[Tensor, "E 3"], Int[Tensor, "N"]]:
    """Pairs sorted by graph, by i, by j and by shift, their shifts, and the number of neighbours of each atom."""
    from nvalchemiops.torch.neighbors import neighbor_list  # pyright: ignore

    s = check_structures(positions, batch_ptr, cell, pbc, describe)
    atoms = len(s.x)
    options = {
        "cell": s.lattice,
        "pbc": pbc,
        "batch_idx": s.graph.int(),
        "batch_ptr": batch_ptr.int(),
    }
    if atoms == 0:
        empty = torch.zeros(0, 3, dtype=torch.int32, device=s.x.device)
        return empty[:, :2].long(), empty, empty[:, 0]
    matrix, counts, shifts = neighbor_list(s.x, cutoff, **options)
    longest = int(counts.max())
    if longest > matrix.shape[1]:  # rows are cut there, the counts are not
        matrix, counts, shifts = neighbor_list(s.x, cutoff, max_neighbors=longest, **options)
    i, column = (torch.arange(matrix.shape[1], device=matrix.device) < counts.unsqueeze(-1)).nonzero(
        as_tuple=True
    )
    j, shift = matrix[i, column].long(), shifts[i, column].int()
    keep = is_pair(i, j, shift, half_list)
    i, j, shift = i[keep], j[keep], shift[keep]
    # Threads of a GPU write a row in any order; sorted, a result can be had again.
    order = torch.arange(len(i), device=i.device)
    for key in (*shift.unbind(-1)[::-1], i * atoms + j):
        order = order[torch.argsort(key[order], stable=True)]
    i = i[order]
    return torch.stack((i, j[order]), -1), shift[order], torch.bincount(i, minlength=atoms).int()
