"""Cell shifts of a neighbour list after atoms were moved by lattice vectors, compiled for the CPU."""

# numba infers the types of kernels; annotations would not help it.
# pyright: basic, reportPrivateImportUsage=false

import numba


@numba.njit(cache=True)
def shift_matrix(n, crossed, matrix, shifts):
    """S += n_j − n_i in a padded table: n [N, 3], crossed [N], matrix [N, K], shifts [N, K, 3]."""
    atoms = matrix.shape[0]
    for i in range(atoms):
        for k in range(matrix.shape[1]):
            j = matrix[i, k]
            if j >= atoms:
                break
            if crossed[i] or crossed[j]:
                for c in range(3):
                    shifts[i, k, c] += n[j, c] - n[i, c]


@numba.njit(cache=True)
def shift_list(n, crossed, pairs, shifts):
    """S += n_j − n_i in a list of pairs [E, 2] with shifts [E, 3]."""
    for e in range(pairs.shape[0]):
        i, j = pairs[e, 0], pairs[e, 1]
        if crossed[i] or crossed[j]:
            for c in range(3):
                shifts[e, c] += n[j, c] - n[i, c]
