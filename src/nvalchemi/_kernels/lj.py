"""Lennard-Jones energy, forces and stress from a neighbour matrix, on the CPU.

The inner loops run over one row of the matrix, have no branch and gather eight or more neighbours at a time when the
compiler can use vector registers. For that the shifts are read from a [N, 3, K] table of small integers, and rows are
processed in multiples of eight. Pairs beyond the cutoff, and padding, are masked; a distance that is not a number is
not, so that invalid positions show in the results.

Most rows of a large system need no shifts, and most others those along one axis; each kind has a loop of its own. With
d = x_j − x_i + t and a list that has each pair both ways, the virial

    W = −½ Σ_ij g d dᵀ = −Σ_i F_i (x_i − x_0)ᵀ − ½ Σ_ij g d tᵀ

costs nothing for pairs whose translation t is zero; x_0, the first atom of the graph, only keeps the numbers small.
"""

# pyright: basic, reportPrivateImportUsage=false

from functools import cache

import numpy as np
from numba import prange

from nvalchemi._kernels.compiler import compiled
from nvalchemi._kernels.threads import ThreadedKernel

# All of fastmath except the flags by which the compiler may assume that there are no NaN and infinities.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

_inline = compiled(error_model="numpy", fastmath=_FASTMATH)

NO_AXIS, SEVERAL_AXES = -1, 3
"""Shifts of a row: none differs from zero; more than one component does. Between them the number of the one axis."""


@_inline
def _pair(r2, counts, four_epsilon, sigma2, cut, switched):
    """Energy u and −(du/dr)/r of a pair; zero where it does not count."""
    # Numbers in the dtype of the positions; a literal would turn float32 arithmetic into float64.
    zero, one, six = cut[3], cut[4], cut[5]
    inverse = one / r2
    s6 = sigma2 * inverse
    s6 = s6 * s6 * s6
    u = four_epsilon * (s6 * s6 - s6)
    g = six * four_epsilon * (s6 * s6 + s6 * s6 - s6) * inverse
    if switched:
        onset, inverse_width, ten, fifteen, thirty = cut[1], cut[2], cut[6], cut[7], cut[8]
        r = np.sqrt(r2)
        t = min(max((r - onset) * inverse_width, zero), one)
        value = one - t * t * t * (ten - t * (fifteen - six * t))
        slope = thirty * t * t * (one - t) * (one - t) * inverse_width
        g = g * value + u * slope / r
        u = u * value
    return (u if counts else zero), (g if counts else zero)


@_inline
def _neighbor(matrix, i, k, n):
    """Index of a neighbour; of the atom itself beyond the last. Unsigned: no test for indices from the end."""
    return np.uint64(np.uint32(matrix[i, k]) if k < n else np.uint32(i))


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

    def lennard_jones(
        x, cell, ptr, graph, matrix, counts, shifts, axes, types, table, cut, forces, energy, stress
    ):
        cutoff2, zero = cut[0], cut[3]
        flat, three = x.reshape(-1), np.uint64(3)
        per_atom = np.empty((x.shape[0], 7 if stressed else 1))
        for i in prange(x.shape[0]):
            xi, yi, zi = x[i, 0], x[i, 1], x[i, 2]
            h, n, axis = cell[graph[i]], counts[i], axes[i]
            four_epsilon, sigma2 = table[0, 0, 0], table[0, 0, 1]
            type_i = types[i] if species else 0
            fx, fy, fz, e = zero, zero, zero, zero
            xx, yy, zz, yz, xz, xy = zero, zero, zero, zero, zero, zero  # Σ g d tᵀ
            columns = min((n + 7) & ~7, matrix.shape[1])
            if axis == NO_AXIS:
                for k in range(columns):
                    j = _neighbor(matrix, i, k, n)
                    at = three * j
                    dx, dy, dz = flat[at] - xi, flat[at + np.uint64(1)] - yi, flat[at + np.uint64(2)] - zi
                    r2 = dx * dx + dy * dy + dz * dz
                    if species:
                        four_epsilon, sigma2 = table[type_i, types[j], 0], table[type_i, types[j], 1]
                    u, g = _pair(r2, k < n and not r2 >= cutoff2, four_epsilon, sigma2, cut, switched)
                    e += u
                    fx -= g * dx
                    fy -= g * dy
                    fz -= g * dz
            elif axis != SEVERAL_AXES:
                tx, ty, tz = h[axis, 0], h[axis, 1], h[axis, 2]
                sx, sy, sz = zero, zero, zero
                for k in range(columns):
                    j = _neighbor(matrix, i, k, n)
                    at = three * j
                    s = h.dtype.type(shifts[i, axis, k])
                    dx = (flat[at] - xi) + s * tx
                    dy = (flat[at + np.uint64(1)] - yi) + s * ty
                    dz = (flat[at + np.uint64(2)] - zi) + s * tz
                    r2 = dx * dx + dy * dy + dz * dz
                    if species:
                        four_epsilon, sigma2 = table[type_i, types[j], 0], table[type_i, types[j], 1]
                    u, g = _pair(r2, k < n and not r2 >= cutoff2, four_epsilon, sigma2, cut, switched)
                    e += u
                    gx, gy, gz = g * dx, g * dy, g * dz
                    fx -= gx
                    fy -= gy
                    fz -= gz
                    if stressed:
                        sx += s * gx
                        sy += s * gy
                        sz += s * gz
                xx, yy, zz, yz, xz, xy = sx * tx, sy * ty, sz * tz, sy * tz, sx * tz, sx * ty
            else:
                for k in range(columns):
                    j = _neighbor(matrix, i, k, n)
                    at = three * j
                    a, b, c = (
                        h.dtype.type(shifts[i, 0, k]),
                        h.dtype.type(shifts[i, 1, k]),
                        h.dtype.type(shifts[i, 2, k]),
                    )
                    tx = a * h[0, 0] + b * h[1, 0] + c * h[2, 0]
                    ty = a * h[0, 1] + b * h[1, 1] + c * h[2, 1]
                    tz = a * h[0, 2] + b * h[1, 2] + c * h[2, 2]
                    dx = (flat[at] - xi) + tx
                    dy = (flat[at + np.uint64(1)] - yi) + ty
                    dz = (flat[at + np.uint64(2)] - zi) + tz
                    r2 = dx * dx + dy * dy + dz * dz
                    if species:
                        four_epsilon, sigma2 = table[type_i, types[j], 0], table[type_i, types[j], 1]
                    u, g = _pair(r2, k < n and not r2 >= cutoff2, four_epsilon, sigma2, cut, switched)
                    e += u
                    gx, gy, gz = g * dx, g * dy, g * dz
                    fx -= gx
                    fy -= gy
                    fz -= gz
                    if stressed:
                        xx += gx * tx
                        yy += gy * ty
                        zz += gz * tz
                        yz += gy * tz
                        xz += gx * tz
                        xy += gx * ty
            forces[i, 0], forces[i, 1], forces[i, 2] = fx, fy, fz
            per_atom[i, 0] = 0.5 * e
            if stressed:
                origin = x[ptr[graph[i]]]
                rx, ry, rz = (
                    np.float64(xi) - origin[0],
                    np.float64(yi) - origin[1],
                    np.float64(zi) - origin[2],
                )
                per_atom[i, 1], per_atom[i, 2] = -fx * rx - 0.5 * xx, -fy * ry - 0.5 * yy
                per_atom[i, 3], per_atom[i, 4] = -fz * rz - 0.5 * zz, -fy * rz - 0.5 * yz
                per_atom[i, 5], per_atom[i, 6] = -fx * rz - 0.5 * xz, -fx * ry - 0.5 * xy
        for b in prange(ptr.shape[0] - 1):
            total = np.zeros(7)
            for i in range(ptr[b], ptr[b + 1]):
                for c in range(per_atom.shape[1]):
                    total[c] += per_atom[i, c]
            energy[b, 0] = total[0]
            if stressed:
                _write_stress(total, cell[b], stress[b])

    return ThreadedKernel(lennard_jones, min_length=300, fastmath=_FASTMATH)


@cache
def half_list_kernel(species: bool, switched: bool, stressed: bool) -> ThreadedKernel:
    """Kernel for a half list (each pair once); parameters as in :func:`full_list_kernel`. Parallel over graphs."""

    def lennard_jones_half(
        x, cell, ptr, graph, matrix, counts, shifts, axes, types, table, cut, forces, energy, stress
    ):
        cutoff2, zero = cut[0], cut[3]
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
                    u, g = _pair(r2, True, table[ti, tj, 0], table[ti, tj, 1], cut, switched)
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
                _write_stress(total, h, stress[b])

    return ThreadedKernel(lennard_jones_half, fastmath=_FASTMATH)


@_inline
def _write_stress(total, h, stress):
    volume = abs(
        h[0, 0] * (h[1, 1] * h[2, 2] - h[1, 2] * h[2, 1])
        - h[0, 1] * (h[1, 0] * h[2, 2] - h[1, 2] * h[2, 0])
        + h[0, 2] * (h[1, 0] * h[2, 1] - h[1, 1] * h[2, 0])
    )
    stress[0, 0], stress[1, 1], stress[2, 2] = total[1] / volume, total[2] / volume, total[3] / volume
    stress[1, 2] = stress[2, 1] = total[4] / volume
    stress[0, 2] = stress[2, 0] = total[5] / volume
    stress[0, 1] = stress[1, 0] = total[6] / volume


def _shifted_axes(shifts, axes):
    """Which components of the shifts [N, 3, K] differ from zero anywhere in a row: codes [N]."""
    for i in prange(shifts.shape[0]):
        axis = NO_AXIS
        for c in range(3):
            bits = shifts.dtype.type(0)
            for k in range(shifts.shape[2]):
                bits |= shifts[i, c, k]
            if bits != 0:
                axis = c if axis == NO_AXIS else SEVERAL_AXES
        axes[i] = axis


shifted_axes = ThreadedKernel(_shifted_axes, min_length=5_000)


def constants(dtype, cutoff: float, switch_width: float):
    """Array ``cut`` of the kernels: squared cutoff, onset and inverse width of the switch, and literals in a dtype."""
    inverse_width = 1.0 / switch_width if switch_width > 0 else 0.0
    return np.array([cutoff**2, cutoff - switch_width, inverse_width, 0, 1, 6, 10, 15, 30], dtype=dtype)
