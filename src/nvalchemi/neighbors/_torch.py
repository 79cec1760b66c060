"""Neighbour search in plain torch operations, on any device.

The same steps as the compiled kernel (:mod:`nvalchemi._kernels.neighbors`): complete the cells, wrap, lay out image
atoms, sort them into bins, scan runs of bins. Every step is one operation over all atoms of the batch; the scan is cut
into pieces so that memory stays in proportion to the number of atoms.
"""

from dataclasses import dataclass

import torch

from nvalchemi.neighbors._failure import Describe, bad_position, degenerate_cell
from nvalchemi.typing import Bool, Float, Int, Tensor

_MIN_PLANE_DISTANCE = 1e-3  # Å, as in the compiled kernel
_LARGEST_SHIFT = 2**30
_ROUNDING = 1e-9  # widens ranges that only preselect
_BIN_WIDTH = (0.5, 0.5, 0.25)  # of the cutoff; the third axis is contiguous
_CANDIDATES_PER_PIECE = 4_000_000


def complete_cell(cell: Float[Tensor, "B 3 3"], pbc: Bool[Tensor, "B 3"]) -> Float[Tensor, "B 3 3"]:
    """Cells whose vectors along axes that are not periodic are replaced by unit vectors normal to all others."""
    lattice = torch.where(pbc.unsqueeze(-1), cell, 0.0)
    number = pbc.sum(-1)
    for axis in range(3):
        # One periodic vector v: two normals, from v and the Cartesian axis it is least along. Two: their cross product.
        v, q, r = lattice[:, axis], (axis + 1) % 3, (axis + 2) % 3
        one = ((number == 1) & pbc[:, axis]).unsqueeze(-1)
        least = torch.nn.functional.one_hot(v.abs().argmin(-1), 3).to(v.dtype)
        first = torch.nn.functional.normalize(torch.linalg.cross(v, least), dim=-1)
        second = torch.nn.functional.normalize(torch.linalg.cross(v, first), dim=-1)
        normal = torch.nn.functional.normalize(torch.linalg.cross(lattice[:, q], lattice[:, r]), dim=-1)
        two = ((number == 2) & ~pbc[:, axis]).unsqueeze(-1)
        lattice = lattice.clone()
        lattice[:, q] = torch.where(one, first, lattice[:, q])
        lattice[:, r] = torch.where(one, second, lattice[:, r])
        lattice[:, axis] = torch.where(two, normal, lattice[:, axis])
    return torch.where(
        (number == 0)[:, None, None], torch.eye(3, dtype=cell.dtype, device=cell.device), lattice
    )


@dataclass
class _Images:
    """Image atoms of all graphs, sorted by bin."""

    x: Tensor  # [M, 3] position
    t: Tensor  # [M, 3] image
    owner: Tensor  # [M] atom
    starts: Tensor  # [bins + 1] first image atom of each bin


@dataclass
class _Grid:
    """Bins of each graph."""

    low: Tensor  # [B, 3] fraction where the bins begin
    scale: Tensor  # [B, 3] bins per unit of fraction
    number: Tensor  # [B, 3]
    first: Tensor  # [B] number of the first bin

    def bins(self, frac: Tensor, graph: Tensor) -> Tensor:
        """Bin along each axis, [..., 3]."""
        index = ((frac - self.low[graph]) * self.scale[graph]).clamp(min=0).long()
        return torch.minimum(index, self.number[graph] - 1)


@dataclass
class Structures:
    """Structures that were found fit for a search, in float64."""

    x: Tensor  # [N, 3] positions as given
    graph: Tensor  # [N] graph of each atom
    lattice: Tensor  # [B, 3, 3] completed cells
    heights: Tensor  # [B, 3] distance of lattice planes
    frac: Tensor  # [N, 3] fractional coordinates, in [0, 1) along periodic axes
    wrap: Tensor  # [N, 3] cells each atom is away from its own


def check_structures(
    positions: Float[Tensor, "N 3"],
    batch_ptr: Int[Tensor, "B_plus_1"],
    cell: Float[Tensor, "B 3 3"],
    pbc: Bool[Tensor, "B 3"],
    describe: Describe,
) -> Structures:
    """Complete the cells and wrap the atoms.

    Raises
    ------
    ValueError
        A degenerate cell, a position that is not finite.
    """
    x, cell = positions.detach().double(), cell.detach().double()
    numbers = torch.arange(len(cell), device=x.device)
    graph = torch.repeat_interleave(numbers, batch_ptr.diff(), output_size=x.shape[0])
    lattice = complete_cell(cell, pbc)
    normals = torch.linalg.cross(lattice[:, [1, 2, 0]], lattice[:, [2, 0, 1]])
    volume = (lattice[:, 0] * normals[:, 0]).sum(-1)
    heights = volume.abs().unsqueeze(-1) / normals.norm(dim=-1)
    degenerate = ~(heights >= _MIN_PLANE_DISTANCE).all(-1)
    if bool(degenerate.any()):
        g = int(degenerate.nonzero()[0])
        raise degenerate_cell(cell[g], pbc[g], g, describe)
    frac = torch.einsum("nd,ncd->nc", x, (normals / volume[:, None, None])[graph])
    wrap = torch.where(pbc[graph], frac.floor(), 0.0)
    bad = ~torch.isfinite(x).all(-1) | ~(wrap.abs() <= _LARGEST_SHIFT).all(-1)
    if bool(bad.any()):
        n = int(bad.nonzero()[0])
        g = int(graph[n])
        raise bad_position(x[n], n - int(batch_ptr[g]), g, describe)
    return Structures(x, graph, lattice, heights, frac - wrap, wrap)


def find_pairs(
    positions: Float[Tensor, "N 3"],
    batch_ptr: Int[Tensor, "B_plus_1"],
    cell: Float[Tensor, "B 3 3"],
    pbc: Bool[Tensor, "B 3"],
    cutoff: float,
    half_list: bool,
    describe: Describe,
) -> tuple[Int[Tensor, "E 2"], Int[Tensor, "E 3"], Int[Tensor, "N"]]:
    """Pairs sorted by graph and by i, their shifts, and the number of neighbours of each atom."""
    s = check_structures(positions, batch_ptr, cell, pbc, describe)
    if len(s.x) == 0:
        empty = torch.zeros(0, 3, dtype=torch.int32, device=s.x.device)
        return empty[:, :2].long(), empty, empty[:, 0]
    wrapped = s.x - torch.einsum("nc,ncd->nd", s.wrap, s.lattice[s.graph])
    reach = cutoff / s.heights * (1 + _ROUNDING) + _ROUNDING
    grid, images = _sort_images(wrapped, s.frac, s.graph, s.lattice, s.heights, reach, pbc, cutoff)
    return _scan(wrapped, s.frac, s.wrap.int(), s.graph, s.lattice, reach, grid, images, cutoff, half_list)


def _sort_images(
    wrapped: Tensor,
    frac: Tensor,
    graph: Tensor,
    lattice: Tensor,
    heights: Tensor,
    reach: Tensor,
    pbc: Tensor,
    cutoff: float,
) -> tuple[_Grid, _Images]:
    index = graph.unsqueeze(-1).expand(-1, 3)
    low = torch.full_like(heights, torch.inf).scatter_reduce(0, index, frac, "amin")
    high = torch.full_like(heights, -torch.inf).scatter_reduce(0, index, frac, "amax")
    occupied = high >= low  # not true of graphs without atoms
    low, high = torch.where(occupied, low, 0.0), torch.where(occupied, high, 0.0)
    margin = torch.where(pbc, reach, 0.0)
    low, high = low - margin, high + margin

    periodic = pbc[graph]
    first = torch.where(periodic, (low[graph] - frac).ceil(), 0.0).long()
    number = torch.where(periodic, (high[graph] - frac).floor(), 0.0).long() - first + 1
    copies = number.prod(-1)
    owner = torch.repeat_interleave(torch.arange(len(frac), device=frac.device), copies)
    rank = torch.arange(len(owner), device=frac.device) - (copies.cumsum(0) - copies)[owner]
    n = number[owner]
    t = (
        torch.stack((rank // (n[:, 1] * n[:, 2]), rank // n[:, 2] % n[:, 1], rank % n[:, 2]), -1)
        + first[owner]
    )

    width = torch.tensor(_BIN_WIDTH, dtype=frac.dtype, device=frac.device) * cutoff
    bins = ((high - low) * heights / width).clamp(1, 1e6).long()
    limit = 2 * torch.zeros(len(bins), dtype=torch.int64, device=frac.device).index_add(0, graph, copies) + 8
    while bool((excess := bins.prod(-1) > limit).any()):
        longest = torch.nn.functional.one_hot(bins.argmax(-1), 3).bool() & excess.unsqueeze(-1)
        bins = torch.where(longest, (bins + 1) // 2, bins)
    total = bins.prod(-1)
    extent = high - low
    grid = _Grid(low, torch.where(extent > 0, bins / extent, 0.0), bins, total.cumsum(0) - total)

    g = graph[owner]
    b = grid.bins(frac[owner] + t, g)
    flat = grid.first[g] + (b[:, 0] * bins[g, 1] + b[:, 1]) * bins[g, 2] + b[:, 2]
    flat, order = torch.sort(flat, stable=True)
    starts = torch.searchsorted(flat, torch.arange(int(total.sum()) + 1, device=frac.device))
    owner, t = owner[order], t[order]
    x = wrapped[owner] + _translation(t, lattice[graph[owner]])
    return grid, _Images(x, t, owner, starts)


def _translation(t: Tensor, lattice: Tensor) -> Tensor:
    # Written out: its negative must be the translation of −t to the last bit, which a matrix product need not give.
    t = t.to(lattice.dtype).unsqueeze(-1)
    return t[:, 0] * lattice[:, 0] + t[:, 1] * lattice[:, 1] + t[:, 2] * lattice[:, 2]


def _ranges(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenated ranges, and for each element the range it belongs to."""
    which = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    within = torch.arange(len(which), device=lengths.device) - (lengths.cumsum(0) - lengths)[which]
    return starts[which] + within, which


def _scan(
    wrapped: Tensor,
    frac: Tensor,
    wrap: Tensor,
    graph: Tensor,
    lattice: Tensor,
    reach: Tensor,
    grid: _Grid,
    images: _Images,
    cutoff: float,
    half_list: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    low = grid.bins(frac - reach[graph], graph)
    high = grid.bins(frac + reach[graph], graph)
    size = high - low + 1
    # Runs of bins along the third axis; one for each atom and pair of bins along the other two.
    rank, i = _ranges(torch.zeros_like(size[:, 0]), size[:, 0] * size[:, 1])
    a, b = low[i, 0] + rank // size[i, 1], low[i, 1] + rank % size[i, 1]
    n = grid.number[graph[i]]
    row = grid.first[graph[i]] + (a * n[:, 1] + b) * n[:, 2]
    begin = images.starts[row + low[i, 2]]
    length = images.starts[row + high[i, 2] + 1] - begin

    pairs: list[Tensor] = []
    shifts: list[Tensor] = []
    piece = (length.cumsum(0) - 1).clamp(min=0) // _CANDIDATES_PER_PIECE
    for runs in torch.split(torch.arange(len(length), device=i.device), torch.bincount(piece).tolist()):
        k, run = _ranges(begin[runs], length[runs])
        pi = i[runs][run]
        near = ((images.x[k] - wrapped[pi]) ** 2).sum(-1) < cutoff**2 * (1 + _ROUNDING)
        k, pi = k[near], pi[near]
        pj, t = images.owner[k], images.t[k]
        # The sum in this order changes sign exactly when the pair is turned round: (i, j) is in if (j, i) is.
        d = (wrapped[pj] - wrapped[pi]) + _translation(t, lattice[graph[pi]])
        shift = t.int() - wrap[pj] + wrap[pi]
        keep = (d[:, 0] * d[:, 0] + d[:, 1] * d[:, 1] + d[:, 2] * d[:, 2] < cutoff * cutoff) & is_pair(
            pi, pj, shift, half_list
        )
        pairs.append(torch.stack((pi, pj), -1)[keep])
        shifts.append(shift[keep])
    edges = torch.cat(pairs)
    return edges, torch.cat(shifts), torch.bincount(edges[:, 0], minlength=len(wrapped)).int()


def is_pair(i: Tensor, j: Tensor, shift: Tensor, half_list: bool) -> Tensor:
    """Which of these are listed: no atom is its own neighbour, and a half list has one direction of each pair."""
    if not half_list:
        return (i != j) | (shift != 0).any(-1)
    s0, s1, s2 = shift.unbind(-1)
    positive = (s0 > 0) | ((s0 == 0) & ((s1 > 0) | ((s1 == 0) & (s2 > 0))))
    return torch.where(i == j, positive, i < j)


def pack_matrix(
    pairs: Int[Tensor, "E 2"], shifts: Int[Tensor, "E 3"], counts: Int[Tensor, "N"], min_width: int
) -> tuple[Int[Tensor, "N K"], Int[Tensor, "N"], Int[Tensor, "N K 3"]]:
    """Table form of a list of pairs; shifts are stored as [N, 3, K] and come back as a view [N, K, 3]."""
    atoms, device = counts.shape[0], counts.device
    longest = int(counts.max()) if atoms else 0
    width = -(-max(min_width, longest) // 8) * 8
    small = shifts.numel() == 0 or int(shifts.abs().max()) <= torch.iinfo(torch.int8).max
    matrix = torch.full((atoms, width), atoms, dtype=torch.int32, device=device)
    table = torch.zeros(atoms, 3, width, dtype=torch.int8 if small else torch.int32, device=device).transpose(
        1, 2
    )
    i = pairs[:, 0]
    column = torch.arange(len(i), device=device) - (counts.cumsum(0) - counts)[i]
    matrix[i, column] = pairs[:, 1].int()
    table[i, column] = shifts.to(table.dtype)
    return matrix, counts, table
