"""Lennard-Jones energy, forces and stress from a neighbour matrix, on the CPU.

The inner loop runs over one row of the matrix, has no branch and gathers eight or more neighbours at a time when the
compiler can use vector registers. For that the shifts are read from a [N, 3, K] table of small integers, and rows are
processed in multiples of eight. Pairs beyond the cutoff, and padding, are masked; a distance that is not a number is
not, so that invalid positions show in the results.
"""

# pyright: basic, reportPrivateImportUsage=false

from functools import cache

import numba
import numpy as np
from numba import prange

from nvalchemi._kernels.threads import ThreadedKernel

# All of fastmath except the flags by which the compiler may assume that there are no NaN and infinities.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


@numba.njit(cache=True, error_model="numpy", fastmath=_FASTMATH, inline="always")
def _volume(h):
    return abs(
        h[0, 0] * (h[1, 1] * h[2, 2] - h[1, 2] * h[2, 1])
        - h[0, 1] * (h[1, 0] * h[2, 2] - h[1, 2] * h[2, 0])
        + h[0, 2] * (h[1, 0] * h[2, 1] - h[1, 1] * h[2, 0])
    )


@cache
def full_list_kernel(species: bool, switched: bool, stressed: bool) -> ThreadedKernel:
    """Kernel for a full list (each pair in both directions).

    Parameters
    ----------
    species : bool
        Parameters depend on the types of the two atoms.
    switched : bool
        Energy is switched off smoothly.
    stressed : bool
        Compute the stress.
    """

    def lennard_jones(x, cell, ptr, graph, matrix, counts, shifts, types, table, cut, forces, energy, stress):
        # Numbers in the dtype of the positions; a literal would turn float32 arithmetic into float64.
        zero, one, half = cut[3], cut[4], cut[5]
        ten, fifteen, six, thirty = cut[6], cut[7], cut[8], cut[9]
        cutoff2, onset, inverse_width = cut[0], cut[1], cut[2]
        per_atom = np.empty((x.shape[0], 7 if stressed else 1), x.dtype)
        for i in prange(x.shape[0]):
            center = np.int64(i)  # the index of a parallel loop is unsigned
            xi, yi, zi = x[i, 0], x[i, 1], x[i, 2]
            h = cell[graph[i]]
            four_epsilon, sigma2 = table[0, 0, 0], table[0, 0, 1]
            type_i = types[i] if species else 0
            fx, fy, fz, e = zero, zero, zero, zero
            xx, yy, zz, yz, xz, xy = zero, zero, zero, zero, zero, zero
            n = counts[i]
            for k in range(min((n + 7) & ~7, matrix.shape[1])):
                j = np.int64(matrix[i, k]) if k < n else center
                s0, s1, s2 = (
                    h.dtype.type(shifts[i, 0, k]),
                    h.dtype.type(shifts[i, 1, k]),
                    h.dtype.type(shifts[i, 2, k]),
                )
                dx = (x[j, 0] - xi) + (s0 * h[0, 0] + s1 * h[1, 0] + s2 * h[2, 0])
                dy = (x[j, 1] - yi) + (s0 * h[0, 1] + s1 * h[1, 1] + s2 * h[2, 1])
                dz = (x[j, 2] - zi) + (s0 * h[0, 2] + s1 * h[1, 2] + s2 * h[2, 2])
                r2 = dx * dx + dy * dy + dz * dz
                inside = k < n and not r2 >= cutoff2
                if species:
                    four_epsilon, sigma2 = table[type_i, types[j], 0], table[type_i, types[j], 1]
                inverse = one / r2
                s6 = sigma2 * inverse
                s6 = s6 * s6 * s6
                u = four_epsilon * (s6 * s6 - s6)
                g = six * four_epsilon * (s6 * s6 + s6 * s6 - s6) * inverse  # −(du/dr)/r
                if switched:
                    r = np.sqrt(r2)
                    t = min(max((r - onset) * inverse_width, zero), one)
                    value = one - t * t * t * (ten - t * (fifteen - six * t))
                    slope = thirty * t * t * (one - t) * (one - t) * inverse_width
                    g = g * value + u * slope / r
                    u = u * value
                u = u if inside else zero
                g = g if inside else zero
                e += u
                gx, gy, gz = g * dx, g * dy, g * dz
                fx -= gx
                fy -= gy
                fz -= gz
                if stressed:
                    xx -= gx * dx
                    yy -= gy * dy
                    zz -= gz * dz
                    yz -= gy * dz
                    xz -= gx * dz
                    xy -= gx * dy
            forces[i, 0], forces[i, 1], forces[i, 2] = fx, fy, fz
            per_atom[i, 0] = half * e
            if stressed:
                per_atom[i, 1], per_atom[i, 2], per_atom[i, 3] = half * xx, half * yy, half * zz
                per_atom[i, 4], per_atom[i, 5], per_atom[i, 6] = half * yz, half * xz, half * xy
        for b in prange(ptr.shape[0] - 1):
            total = np.zeros(7)
            for i in range(ptr[b], ptr[b + 1]):
                for c in range(per_atom.shape[1]):
                    total[c] += per_atom[i, c]
            energy[b, 0] = total[0]
            if stressed:
                _write_stress(total, _volume(cell[b]), stress[b])

    return ThreadedKernel(lennard_jones, fastmath=_FASTMATH)


@cache
def half_list_kernel(species: bool, switched: bool, stressed: bool) -> ThreadedKernel:
    """Kernel for a half list (each pair once); parameters as in :func:`full_list_kernel`. Parallel over graphs."""

    def lennard_jones_half(
        x, cell, ptr, graph, matrix, counts, shifts, types, table, cut, forces, energy, stress
    ):
        zero, one = cut[3], cut[4]
        ten, fifteen, six, thirty = cut[6], cut[7], cut[8], cut[9]
        cutoff2, onset, inverse_width = cut[0], cut[1], cut[2]
        for b in prange(ptr.shape[0] - 1):
            h = cell[b]
            total = np.zeros(7)
            forces[ptr[b] : ptr[b + 1]] = zero
            for i in range(ptr[b], ptr[b + 1]):
                fx, fy, fz = zero, zero, zero
                for k in range(counts[i]):
                    j = matrix[i, k]
                    s0, s1, s2 = (
                        h.dtype.type(shifts[i, 0, k]),
                        h.dtype.type(shifts[i, 1, k]),
                        h.dtype.type(shifts[i, 2, k]),
                    )
                    dx = (x[j, 0] - x[i, 0]) + (s0 * h[0, 0] + s1 * h[1, 0] + s2 * h[2, 0])
                    dy = (x[j, 1] - x[i, 1]) + (s0 * h[0, 1] + s1 * h[1, 1] + s2 * h[2, 1])
                    dz = (x[j, 2] - x[i, 2]) + (s0 * h[0, 2] + s1 * h[1, 2] + s2 * h[2, 2])
                    r2 = dx * dx + dy * dy + dz * dz
                    if r2 >= cutoff2:
                        continue
                    ti, tj = (types[i], types[j]) if species else (0, 0)
                    four_epsilon, sigma2 = table[ti, tj, 0], table[ti, tj, 1]
                    inverse = one / r2
                    s6 = sigma2 * inverse
                    s6 = s6 * s6 * s6
                    u = four_epsilon * (s6 * s6 - s6)
                    g = six * four_epsilon * (s6 * s6 + s6 * s6 - s6) * inverse
                    if switched:
                        r = np.sqrt(r2)
                        t = min(max((r - onset) * inverse_width, zero), one)
                        value = one - t * t * t * (ten - t * (fifteen - six * t))
                        g = g * value + u * thirty * t * t * (one - t) * (one - t) * inverse_width / r
                        u = u * value
                    gx, gy, gz = g * dx, g * dy, g * dz
                    fx -= gx
                    fy -= gy
                    fz -= gz
                    forces[j, 0] += gx
                    forces[j, 1] += gy
                    forces[j, 2] += gz
                    total[0] += u
                    if stressed:
                        total[1] -= gx * dx
                        total[2] -= gy * dy
                        total[3] -= gz * dz
                        total[4] -= gy * dz
                        total[5] -= gx * dz
                        total[6] -= gx * dy
                forces[i, 0] += fx
                forces[i, 1] += fy
                forces[i, 2] += fz
            energy[b, 0] = total[0]
            if stressed:
                _write_stress(total, _volume(h), stress[b])

    return ThreadedKernel(lennard_jones_half, fastmath=_FASTMATH)


@numba.njit(cache=True, error_model="numpy", fastmath=_FASTMATH)
def _write_stress(total, volume, stress):
    stress[0, 0], stress[1, 1], stress[2, 2] = total[1] / volume, total[2] / volume, total[3] / volume
    stress[1, 2] = stress[2, 1] = total[4] / volume
    stress[0, 2] = stress[2, 0] = total[5] / volume
    stress[0, 1] = stress[1, 0] = total[6] / volume


def constants(dtype, cutoff: float, switch_width: float):
    """Array ``cut`` of the kernels: squared cutoff, onset and inverse width of the switch, and literals in a dtype."""
    inverse_width = 1.0 / switch_width if switch_width > 0 else 0.0
    return np.array([cutoff**2, cutoff - switch_width, inverse_width, 0, 1, 0.5, 10, 15, 6, 30], dtype=dtype)
