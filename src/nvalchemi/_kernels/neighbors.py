"""Neighbour search on the CPU for a whole batch: image atoms sorted into bins, one scan per atom.

Each graph is treated as if it were alone:

1. Lattice vectors of non-periodic axes are replaced by unit vectors normal to the others; atoms are wrapped along the
   periodic axes (``x_wrapped = x − s · cell``).
2. *Image atoms*: every copy ``x_wrapped + t · cell`` closer (along the lattice planes) than the cutoff to the box
   around the wrapped atoms, the atoms themselves (t = 0) included. No further notion of periodicity is needed.
3. The image atoms are sorted into bins, about half a cutoff wide and a quarter along the third axis; bins along the
   third axis are contiguous in memory, so the candidates of an atom are a few runs of consecutive image atoms.
4. The shift of a pair in terms of the given positions is ``S = t − s_j + s_i``.

Whether a pair is inside the cutoff is decided on ``(x_j − x_i) + t · cell``, which changes sign exactly when the pair
is turned round: a full list always has both directions of a pair.
"""

# pyright: basic, reportPrivateImportUsage=false

import math

import numpy as np
from numba import prange

from nvalchemi._kernels.compiler import compiled
from nvalchemi._kernels.threads import ThreadedKernel

OK, DEGENERATE, NOT_FINITE, TOO_FAR, SHIFTS_TOO_LARGE, TOO_NARROW = 0, 1, 2, 3, 4, 5

MIN_PLANE_DISTANCE = 1e-3
"""Lattice planes of a periodic axis closer than this (Å) make a cell degenerate: no crystal comes near, round-off
does."""

_LARGEST_SHIFT = 2**30
_INT8_MAX = 127
_ROUNDING = 1e-9  # widens ranges that only preselect, so that rounding cannot lose a pair
_ATOMS_PER_BLOCK = 64  # unit of work of a thread

_inline = compiled(error_model="numpy")


@_inline
def _cross(a, b, out):
    out[0] = a[1] * b[2] - a[2] * b[1]
    out[1] = a[2] * b[0] - a[0] * b[2]
    out[2] = a[0] * b[1] - a[1] * b[0]


@_inline
def _normalize(a):
    norm = math.sqrt(a[0] * a[0] + a[1] * a[1] + a[2] * a[2])
    for c in range(3):
        a[c] /= norm


@_inline
def _complete_cell(cell, pbc, lattice, reciprocal, heights):
    """Fill in ``lattice`` (rows), ``reciprocal`` (rows, so that frac = reciprocal @ x) and distances of lattice planes.

    Returns whether the periodic vectors are usable.
    """
    periodic = 0
    for c in range(3):
        if pbc[c]:
            periodic += 1
        for d in range(3):
            lattice[c, d] = cell[c, d] if pbc[c] else 0.0
            if not math.isfinite(lattice[c, d]):
                return False
    if periodic == 0:
        for c in range(3):
            lattice[c, c] = 1.0
    elif periodic == 1:
        p = 0 if pbc[0] else (1 if pbc[1] else 2)
        v = lattice[p]
        smallest = 0
        for c in range(1, 3):
            if abs(v[c]) < abs(v[smallest]):
                smallest = c
        axis = np.zeros(3)
        axis[smallest] = 1.0
        q, r = (p + 1) % 3, (p + 2) % 3
        _cross(v, axis, lattice[q])
        _normalize(lattice[q])
        _cross(v, lattice[q], lattice[r])
        _normalize(lattice[r])
    elif periodic == 2:
        q = 0 if not pbc[0] else (1 if not pbc[1] else 2)
        _cross(lattice[(q + 1) % 3], lattice[(q + 2) % 3], lattice[q])
        _normalize(lattice[q])
    for c in range(3):
        _cross(lattice[(c + 1) % 3], lattice[(c + 2) % 3], reciprocal[c])
    det = 0.0
    for d in range(3):
        det += lattice[0, d] * reciprocal[0, d]
    for c in range(3):
        area = math.sqrt(reciprocal[c, 0] ** 2 + reciprocal[c, 1] ** 2 + reciprocal[c, 2] ** 2)
        heights[c] = abs(det) / area
        if not heights[c] >= MIN_PLANE_DISTANCE:
            return False
        for d in range(3):
            reciprocal[c, d] /= det
    return True


@_inline
def _plan_graph(x, cell, pbc, cutoff, wrapped, wrap, frac, lattice, bounds, grid):
    """Wrap the atoms of one graph and size its image atoms and bins.

    Parameters
    ----------
    bounds : array [3, 5]
        Per axis, out: lowest fraction of a bin, bins per unit of fraction, reach of the cutoff in fractions, and the
        lowest and highest fraction an image atom of use may have.
    grid : array [4]
        Out: bins along each axis, number of image atoms.

    Returns
    -------
    tuple of (int, int, int)
        Status, atom it concerns, bound on the absolute value of the shifts.
    """
    reciprocal = np.empty((3, 3))
    heights = np.empty(3)
    if not _complete_cell(cell, pbc, lattice, reciprocal, heights):
        return DEGENERATE, 0, 0
    n = x.shape[0]
    if n == 0:
        grid[0] = grid[1] = grid[2] = 1
        grid[3] = 0
        return OK, 0, 0
    largest_shift = 0
    low, high = np.empty(3), np.empty(3)
    wrap_low, wrap_high = np.empty(3), np.empty(3)
    for i in range(n):
        for d in range(3):
            wrapped[i, d] = x[i, d]
            if not math.isfinite(wrapped[i, d]):
                return NOT_FINITE, i, 0
        for c in range(3):
            f = reciprocal[c, 0] * x[i, 0] + reciprocal[c, 1] * x[i, 1] + reciprocal[c, 2] * x[i, 2]
            s = math.floor(f) if pbc[c] else 0.0
            if abs(s) > _LARGEST_SHIFT:
                return TOO_FAR, i, 0
            frac[i, c] = f - s
            wrap[i, c] = int(s)
            if s != 0.0:
                for d in range(3):
                    wrapped[i, d] -= s * lattice[c, d]
            low[c] = frac[i, c] if i == 0 else min(low[c], frac[i, c])
            high[c] = frac[i, c] if i == 0 else max(high[c], frac[i, c])
            wrap_low[c] = s if i == 0 else min(wrap_low[c], s)
            wrap_high[c] = s if i == 0 else max(wrap_high[c], s)
    width = np.array([0.5, 0.5, 0.25])
    for c in range(3):
        reach = cutoff / heights[c] * (1.0 + _ROUNDING) + _ROUNDING
        bounds[c, 2] = reach
        margin = reach if pbc[c] else 0.0
        bounds[c, 3] = low[c] - margin
        bounds[c, 4] = high[c] + margin
        extent = bounds[c, 4] - bounds[c, 3]
        # The width in Å, bounded before it becomes an integer: molecules may be spread over any distance.
        grid[c] = int(max(1.0, min(extent * heights[c] / (width[c] * cutoff), 1e6)))
        bounds[c, 0] = bounds[c, 3]
        images = math.ceil(margin) + math.ceil(high[c] - low[c]) if pbc[c] else 0
        largest_shift = max(largest_shift, int(wrap_high[c] - wrap_low[c]) + images)
    count = 0
    for i in range(n):
        images = 1
        for c in range(3):
            if pbc[c]:
                first, last = _image_range(frac[i, c], bounds[c, 3], bounds[c, 4])
                images *= last - first + 1
        count += images
    grid[3] = count
    while grid[0] * grid[1] * grid[2] > 2 * count + 8:
        c = 0
        for d in range(1, 3):
            if grid[d] > grid[c]:
                c = d
        grid[c] = (grid[c] + 1) // 2
    for c in range(3):
        extent = bounds[c, 4] - bounds[c, 3]
        bounds[c, 1] = grid[c] / extent if extent > 0.0 else 0.0
    return OK, 0, largest_shift


@_inline
def _image_range(f, low, high):
    """First and last image t with low <= f + t <= high."""
    return int(math.ceil(low - f)), int(math.floor(high - f))


@_inline
def _bin(f, bounds, bins):
    return max(0, min(bins - 1, int((f - bounds[0]) * bounds[1])))


@_inline
def _sort_images(pbc, wrapped, wrap, frac, lattice, bounds, grid, starts, position, owner, shift, image):
    """Counting sort of the image atoms of one graph into bins: ``starts`` [bins + 1] are the first image of each bin.

    ``position`` is [3, M]; ``owner`` [M] is the atom inside the graph; ``image`` [M, 3] is t, ``shift`` [M, 3] is
    ``t − s_owner``.
    """
    starts[:] = 0
    for place in range(2):
        for i in range(frac.shape[0]):
            first = np.zeros(3, np.int64)
            last = np.zeros(3, np.int64)
            for c in range(3):
                if pbc[c]:
                    first[c], last[c] = _image_range(frac[i, c], bounds[c, 3], bounds[c, 4])
            for ta in range(first[0], last[0] + 1):
                bin_a = _bin(frac[i, 0] + ta, bounds[0], grid[0])
                for tb in range(first[1], last[1] + 1):
                    bin_ab = bin_a * grid[1] + _bin(frac[i, 1] + tb, bounds[1], grid[1])
                    for tc in range(first[2], last[2] + 1):
                        b = bin_ab * grid[2] + _bin(frac[i, 2] + tc, bounds[2], grid[2])
                        if place == 0:
                            starts[b + 1] += 1
                            continue
                        k = starts[b]
                        starts[b] += 1
                        owner[k] = i
                        image[k, 0], image[k, 1], image[k, 2] = ta, tb, tc
                        for c in range(3):
                            shift[k, c] = image[k, c] - wrap[i, c]
                            position[c, k] = wrapped[i, c] + (
                                ta * lattice[0, c] + tb * lattice[1, c] + tc * lattice[2, c]
                            )
        if place == 0:
            for b in range(1, starts.shape[0]):
                starts[b] += starts[b - 1]
        else:  # filling moved each start to the start of the next bin
            for b in range(starts.shape[0] - 1, 0, -1):
                starts[b] = starts[b - 1]
            starts[0] = 0


@_inline
def _scan(xi, yi, zi, fi, cutoff2, bounds, grid, starts, position, hits):
    """Collect the image atoms within the cutoff of a point, in the order of bins. Returns ``(number, hits)``."""
    a0, a1 = _bin(fi[0] - bounds[0, 2], bounds[0], grid[0]), _bin(fi[0] + bounds[0, 2], bounds[0], grid[0])
    b0, b1 = _bin(fi[1] - bounds[1, 2], bounds[1], grid[1]), _bin(fi[1] + bounds[1, 2], bounds[1], grid[1])
    c0, c1 = _bin(fi[2] - bounds[2, 2], bounds[2], grid[2]), _bin(fi[2] + bounds[2, 2], bounds[2], grid[2])
    preselect = cutoff2 * (1.0 + _ROUNDING)
    n = 0
    for a in range(a0, a1 + 1):
        for b in range(b0, b1 + 1):
            row = (a * grid[1] + b) * grid[2]
            start, stop = starts[row + c0], starts[row + c1 + 1]
            if n + stop - start > hits.shape[0]:
                grown = np.empty(2 * (n + stop - start), np.int32)
                for k in range(
                    n
                ):  # a slice would compile numba's text formatting for its error, which takes seconds
                    grown[k] = hits[k]
                hits = grown
            for k in range(start, stop):
                dx, dy, dz = position[0, k] - xi, position[1, k] - yi, position[2, k] - zi
                hits[n] = k  # without a branch, as the outcome is hard to predict
                n += dx * dx + dy * dy + dz * dz < preselect
    return n, hits


@_inline
def _is_pair(i, j, s0, s1, s2, half):
    if i == j:
        if half:
            return s0 > 0 or (s0 == 0 and (s1 > 0 or (s1 == 0 and s2 > 0)))
        return s0 != 0 or s1 != 0 or s2 != 0
    return not half or i < j


@_inline
def _is_inside(xi, xj, t, lattice, cutoff2):
    r2 = 0.0
    for c in range(3):
        d = (xj[c] - xi[c]) + (t[0] * lattice[0, c] + t[1] * lattice[1, c] + t[2] * lattice[2, c])
        r2 += d * d
    return r2 < cutoff2


@_inline
def _fill_row(
    i, first, found, hits, wrapped, wrap, lattice, cutoff2, half, position, owner, shift, image, row, shifts
):
    """Write those hits that are pairs of atom i into its row, as far as it is long enough. Returns their number."""
    sure = cutoff2 * (1.0 - _ROUNDING)
    xi, yi, zi = wrapped[i, 0], wrapped[i, 1], wrapped[i, 2]
    n = 0
    for h in range(found):
        k = hits[h]
        j = first + owner[k]
        s0, s1, s2 = shift[k, 0] + wrap[i, 0], shift[k, 1] + wrap[i, 1], shift[k, 2] + wrap[i, 2]
        if not _is_pair(i, j, s0, s1, s2, half):
            continue
        dx, dy, dz = position[0, k] - xi, position[1, k] - yi, position[2, k] - zi
        if dx * dx + dy * dy + dz * dz >= sure and not _is_inside(
            wrapped[i], wrapped[j], image[k], lattice, cutoff2
        ):
            continue
        if n < row.shape[0]:
            row[n] = j
            shifts[0, n], shifts[1, n], shifts[2, n] = s0, s1, s2
        n += 1
    return n


@_inline
def _expected_neighbors(atoms, lattice, bounds, pbc, cutoff, images):
    """Neighbours per atom of a structure that fills its box evenly, and a fifth more; at most the number of images."""
    normal = np.empty(3)
    _cross(lattice[1], lattice[2], normal)
    volume = abs(lattice[0, 0] * normal[0] + lattice[0, 1] * normal[1] + lattice[0, 2] * normal[2])
    for c in range(3):
        if not pbc[c]:
            volume *= bounds[c, 4] - bounds[c, 3]
    expected = (
        4.0 / 3.0 * math.pi * cutoff**3 * 1.2 * atoms + 8.0 * volume
    )  # times the volume, which may be 0
    most = max(images - 1, 0)
    return most if expected >= most * volume else int(expected / volume)


@_inline
def _round_up(width):
    return (width + 7) // 8 * 8


def _search(x, ptr, cell, pbc, cutoff, half, wanted, counts, matrix, shifts):
    """Find all neighbours.

    Parameters
    ----------
    x, ptr, cell, pbc
        Positions [N, 3], first atom of each graph [B + 1], cells [B, 3, 3], periodicity [B, 3].
    cutoff, half
        Distance; list each pair once.
    wanted : array [B]
        Graphs to search; the rows of the others are left as they are.
    counts : array [N]
        Out: neighbours of each atom.
    matrix, shifts : array [N, K], array [N, 3, K]
        Out: neighbours and shifts, with unused columns set to N and 0, where K is large enough.

    Returns
    -------
    tuple of (int, int, int, array, array)
        Status, graph and atom it concerns, and the tables: those given, or wider ones without padding.
        ``TOO_NARROW`` when wider ones are needed and not all graphs were wanted.
    """
    graphs, atoms = ptr.shape[0] - 1, x.shape[0]
    wrapped, frac = np.empty((atoms, 3)), np.empty((atoms, 3))
    wrap = np.empty((atoms, 3), np.int32)
    lattice, bounds = np.empty((graphs, 3, 3)), np.empty((graphs, 3, 5))
    grid, outcome = np.zeros((graphs, 4), np.int64), np.zeros((graphs, 3), np.int64)
    for g in prange(graphs):
        if not wanted[g]:
            continue
        lo, hi = ptr[g], ptr[g + 1]
        outcome[g, 0], outcome[g, 1], outcome[g, 2] = _plan_graph(
            x[lo:hi], cell[g], pbc[g], cutoff, wrapped[lo:hi], wrap[lo:hi], frac[lo:hi], lattice[g], bounds[g], grid[g],
        )  # fmt: skip
    width = 0
    image_ptr, bin_ptr = np.zeros(graphs + 1, np.int64), np.zeros(graphs + 1, np.int64)
    for g in range(graphs):
        if not wanted[g]:
            image_ptr[g + 1], bin_ptr[g + 1] = image_ptr[g], bin_ptr[g]
            continue
        if outcome[g, 0] != OK:
            return outcome[g, 0], g, outcome[g, 1], matrix, shifts
        if outcome[g, 2] > _INT8_MAX and shifts.itemsize == 1:
            return SHIFTS_TOO_LARGE, g, 0, matrix, shifts
        image_ptr[g + 1] = image_ptr[g] + grid[g, 3]
        bin_ptr[g + 1] = bin_ptr[g] + grid[g, 0] * grid[g, 1] * grid[g, 2] + 1
        expected = _expected_neighbors(ptr[g + 1] - ptr[g], lattice[g], bounds[g], pbc[g], cutoff, grid[g, 3])
        width = max(width, expected)
    images = image_ptr[graphs]
    starts = np.empty(bin_ptr[graphs], np.int64)
    position, owner = np.empty((3, images)), np.empty(images, np.int32)
    shift, image = np.empty((images, 3), np.int32), np.empty((images, 3), np.int32)
    for g in prange(graphs):
        if not wanted[g]:
            continue
        lo, hi, im, jm = ptr[g], ptr[g + 1], image_ptr[g], image_ptr[g + 1]
        _sort_images(
            pbc[g], wrapped[lo:hi], wrap[lo:hi], frac[lo:hi], lattice[g], bounds[g], grid[g],
            starts[bin_ptr[g] : bin_ptr[g + 1]], position[:, im:jm], owner[im:jm], shift[im:jm], image[im:jm],
        )  # fmt: skip
    given = matrix.shape[1] > 0
    if not given:
        width = _round_up(width)
        matrix, shifts = np.empty((atoms, width), matrix.dtype), np.empty((atoms, 3, width), shifts.dtype)
    blocks = (atoms + _ATOMS_PER_BLOCK - 1) // _ATOMS_PER_BLOCK
    while True:
        for block in prange(blocks):
            hits = np.empty(256, np.int32)
            begin, end = block * _ATOMS_PER_BLOCK, min(atoms, (block + 1) * _ATOMS_PER_BLOCK)
            g = np.searchsorted(ptr, begin, side="right") - 1
            for i in range(begin, end):
                while i >= ptr[g + 1]:
                    g += 1
                if not wanted[g]:
                    continue
                im, jm = image_ptr[g], image_ptr[g + 1]
                found, hits = _scan(
                    wrapped[i, 0], wrapped[i, 1], wrapped[i, 2], frac[i], cutoff * cutoff, bounds[g], grid[g],
                    starts[bin_ptr[g] : bin_ptr[g + 1]], position[:, im:jm], hits,
                )  # fmt: skip
                n = _fill_row(
                    i, ptr[g], found, hits, wrapped, wrap, lattice[g], cutoff * cutoff, half,
                    position[:, im:jm], owner[im:jm], shift[im:jm], image[im:jm], matrix[i], shifts[i],
                )  # fmt: skip
                counts[i] = n
                if given:
                    for k in range(n, matrix.shape[1]):
                        matrix[i, k] = atoms
                        shifts[i, 0, k] = shifts[i, 1, k] = shifts[i, 2, k] = 0
        longest = 0
        for i in range(atoms):
            longest = max(longest, counts[i])
        if longest <= matrix.shape[1]:
            return OK, 0, 0, matrix, shifts
        if not wanted.all():
            return TOO_NARROW, 0, 0, matrix, shifts
        given, width = False, _round_up(longest)
        matrix, shifts = np.empty((atoms, width), matrix.dtype), np.empty((atoms, 3, width), shifts.dtype)


def _repack(matrix, shifts, counts, to_matrix, to_shifts):
    """Copy tables into tables of another width, and pad those."""
    atoms = matrix.shape[0]
    for i in prange(atoms):
        n = counts[i]
        for k in range(to_matrix.shape[1]):
            to_matrix[i, k] = matrix[i, k] if k < n else atoms
        for c in range(3):
            for k in range(to_matrix.shape[1]):
                to_shifts[i, c, k] = shifts[i, c, k] if k < n else 0


def _unpack(matrix, shifts, offsets, pairs, pair_shifts):
    """List of pairs [E, 2] and their shifts [E, 3] from the tables; the pairs of atom i begin at ``offsets[i]``."""
    for i in prange(offsets.shape[0] - 1):
        for k in range(offsets[i + 1] - offsets[i]):
            e = offsets[i] + k
            pairs[e, 0], pairs[e, 1] = i, matrix[i, k]
            pair_shifts[e, 0], pair_shifts[e, 1], pair_shifts[e, 2] = (
                shifts[i, 0, k],
                shifts[i, 1, k],
                shifts[i, 2, k],
            )


search = ThreadedKernel(_search, min_length=50)
repack = ThreadedKernel(_repack, min_length=500)
unpack = ThreadedKernel(_unpack)


def _displacement_exceeds(x, reference, limit2):
    exceeding = 0
    for block in prange((x.shape[0] + 1023) // 1024):
        for i in range(block * 1024, min(x.shape[0], (block + 1) * 1024)):
            dx, dy, dz = x[i, 0] - reference[i, 0], x[i, 1] - reference[i, 1], x[i, 2] - reference[i, 2]
            exceeding += not (dx * dx + dy * dy + dz * dz <= limit2)  # also true of NaN
    return exceeding > 0


displacement_exceeds = ThreadedKernel(_displacement_exceeds, min_length=20_000)
