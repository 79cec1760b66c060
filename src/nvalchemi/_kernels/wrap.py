"""Which atoms have left their cell, and the shifts of a neighbour list after they were moved back, for the CPU."""

# numba infers the types of kernels; annotations would not help it.
# pyright: basic, reportPrivateImportUsage=false

import math

import numpy as np

from nvalchemi._kernels.compiler import compiled

MAX_IMAGES = 2.0**31
"""Crossings are counted in int32 where a batch has image flags."""


@compiled()
def wrap_atoms(positions, list_reference, matrix_reference, cell, inverse, axes, graph, n, crossed):
    """Take n h off x, n = floor(x h⁻¹) along the axes marked [B, 3]; writes n, crossed; returns how many crossed.

    The same is taken off the two references [N, 3], unless they are empty.
    """
    count = 0
    for i in range(positions.shape[0]):
        g = graph[i]
        for c in range(3):
            if axes[g, c]:
                scaled = 0.0
                for d in range(3):
                    scaled += positions[i, d] * inverse[g, d, c]
                # Atoms of a structure that failed may be anywhere, or NaN, which compares false: they stay.
                if -MAX_IMAGES < scaled < 0.0 or 1.0 <= scaled < MAX_IMAGES:
                    n[i, c] = int(math.floor(scaled))
                    crossed[i] = True
        if crossed[i]:
            count += 1
            for d in range(3):
                move = n[i, 0] * cell[g, 0, d] + n[i, 1] * cell[g, 1, d] + n[i, 2] * cell[g, 2, d]
                positions[i, d] -= move
                if list_reference.shape[0] > 0:
                    list_reference[i, d] -= move
                if matrix_reference.shape[0] > 0:
                    matrix_reference[i, d] -= move
    return count


@compiled()
def shift_matrix(n, crossed, matrix, shifts):
    """S += n_j − n_i in a padded table: n [N, 3], crossed [N], matrix [N, K], shifts [N, K, 3]."""
    atoms, width = matrix.shape
    for i in range(atoms):
        if crossed[i]:
            for k in range(width):
                j = matrix[i, k]
                if j >= atoms:
                    break
                for c in range(3):
                    shifts[i, k, c] += n[j, c] - n[i, c]
        else:
            # Most atoms have not crossed, nor has what they see: this loop is what the time goes into.
            for k in range(width):
                j = np.uint32(matrix[i, k])
                if j >= atoms:
                    break
                if crossed[j]:
                    for c in range(3):
                        shifts[i, k, c] += n[j, c]


@compiled()
def _count_and_last(row, target):
    """How often ``target`` is in a row, and the last place where it is; without a branch, so in vector registers."""
    count, last = np.int32(0), np.int32(-1)
    for k in range(np.int32(row.shape[0])):
        is_there = row[k] == target
        count += np.int32(is_there)
        last = max(last, np.int32(k) if is_there else np.int32(-1))
    return count, last


@compiled()
def shift_full_matrix(n, crossed, matrix, shifts):
    """What :func:`shift_matrix` does, in a table that has each pair in both rows: only rows near atoms that crossed."""
    atoms, width = matrix.shape
    treated_for = np.full(atoms, -1, np.int64)
    for i in range(atoms):
        if not crossed[i]:
            continue
        for k in range(width):
            j = matrix[i, k]
            if j >= atoms:
                break
            for c in range(3):
                shifts[i, k, c] += n[j, c] - n[i, c]
            if (
                crossed[j] or treated_for[j] == i
            ):  # the row is treated in its turn, or was at another image of j
                continue
            treated_for[j] = i
            count, last = _count_and_last(matrix[j], matrix.dtype.type(i))
            for m in range(last, last + 1) if count == 1 else range(width):
                if matrix[j, m] == i:
                    for c in range(3):
                        shifts[j, m, c] += n[i, c]


@compiled()
def shift_list(n, crossed, pairs, shifts):
    """S += n_j − n_i in a list of pairs [E, 2] with shifts [E, 3]."""
    for e in range(pairs.shape[0]):
        i, j = pairs[e, 0], pairs[e, 1]
        if crossed[i] or crossed[j]:
            for c in range(3):
                shifts[e, c] += n[j, c] - n[i, c]
