"""Philox4x32-10 and normal deviates from it, compiled for the CPU.

The same integers as :func:`nvalchemi.dynamics.random.philox4x32` (Salmon, Moraes, Dror and Shaw, SC'11,
doi:10.1145/2063384.2063405).
"""

# numba infers the types of kernels; annotations would not help it.
# pyright: basic, reportPrivateImportUsage=false

import math

import numpy as np

from nvalchemi._kernels.compiler import compiled

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = np.uint64(0x9E3779B9)
_W1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


@compiled(inline="always")
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in range(10):
        p0 = _M0 * c0
        p1 = _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + _W0) & _LOW
        k1 = (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@compiled()
def philox4x32(counter, key):
    """Random words [n, 4] (as int64) of counters [n, 4] and one key [2]."""
    out = np.empty(counter.shape, dtype=np.int64)
    for i in range(counter.shape[0]):
        c0, c1, c2, c3 = _philox(
            np.uint64(counter[i, 0]), np.uint64(counter[i, 1]), np.uint64(counter[i, 2]), np.uint64(counter[i, 3]),
            np.uint64(key[0]), np.uint64(key[1]),
        )  # fmt: skip
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = c0, c1, c2, c3
    return out


@compiled()
def fill_normals(seed, system_id, system_step, ptr, stream, out):
    """Write three standard normal deviates per atom into ``out`` [N, 3]; counters as in ``dynamics.random``."""
    k0 = np.uint64(seed) & _LOW
    k1 = np.uint64(seed) >> _32
    turn = 2.0 * math.pi / 4294967296.0
    for graph in range(ptr.shape[0] - 1):
        step = np.uint64(system_step[graph]) & _LOW
        id_low = np.uint64(system_id[graph]) & _LOW
        tail = ((np.uint64(system_id[graph]) >> _32) << np.uint64(8) | np.uint64(stream)) & _LOW
        for atom in range(ptr[graph], ptr[graph + 1]):
            a, b, c, d = _philox(np.uint64(atom - ptr[graph]), step, id_low, tail, k0, k1)
            radius = math.sqrt(-2.0 * math.log((np.float64(a) + 0.5) / 4294967296.0))
            angle = (np.float64(b) + 0.5) * turn
            out[atom, 0] = radius * math.cos(angle)
            out[atom, 1] = radius * math.sin(angle)
            radius = math.sqrt(-2.0 * math.log((np.float64(c) + 0.5) / 4294967296.0))
            out[atom, 2] = radius * math.cos((np.float64(d) + 0.5) * turn)
