"""Equivariant convolution: messages from neighbours, each a tensor product with a weight per edge and channel.

For an atom n with neighbours s along edges e (one term for each path p, channels u not mixed)::

    out[n, p, u, k] = Σ_e w[e, p, u] · Σ_i C[e, p, k, i] · x[s(e), u, i],    C[e, p, k, i] = Σ_j c[p, i, j, k] · y[e, j]

``C`` is small and common to all channels, so that an edge costs one pass over channels for each path, and no message
is ever stored: forward sums over the edges that end at an atom, backward over those that start there. Inside, channels
lie next to each other (for vector registers); in ``x`` and ``out`` the components ``i``, ``k`` do, as in e3nn.
"""

# pyright: basic, reportPrivateImportUsage=false

import numpy as np
from numba import prange

from nvalchemi._kernels.compiler import compiled
from nvalchemi._kernels.threads import ThreadedKernel

_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

# Offsets are unsigned: an index that may be negative would be tested for it, and loops not vectorised.
_ONE, _FIVE = np.uint64(1), np.uint64(5)

_inline = compiled(error_model="numpy", fastmath=_FASTMATH)


@_inline
def _channels_last(source, blocks, target):
    """Each block [channels, components] of a row transposed."""
    for b in range(blocks.shape[0]):
        start, channels, size = blocks[b, 0], blocks[b, 1], blocks[b, 2]
        for m in range(size):
            for u in range(channels):
                target[start + m * channels + u] = source[start + u * size + m]


@_inline
def _channels_first(source, blocks, scale, target):
    """Back, and scaled."""
    for b in range(blocks.shape[0]):
        start, channels, size = blocks[b, 0], blocks[b, 1], blocks[b, 2]
        for u in range(channels):
            for m in range(size):
                target[start + u * size + m] = scale * source[start + m * channels + u]


@_inline
def _couple(y, index, value, first, last, c):
    """``C[k, i]`` of one path; as many entries of ``c`` as it has were set to zero."""
    for z in range(first, last):
        c[index[z, 0]] += value[z] * y[index[z, 1]]


@_inline
def _combine(c, row, step, size, x, start, channels, t):
    """``t[u] = Σ_i c[row + i step] x[i, u]`` for ``size`` components i."""
    if size == 1:
        c0 = c[row]
        for u in range(channels):
            t[u] = c0 * x[start + u]
    elif size == 3:
        c0, c1, c2 = c[row], c[row + step], c[row + step + step]
        b = start + channels
        d = b + channels
        for u in range(channels):
            t[u] = c0 * x[start + u] + c1 * x[b + u] + c2 * x[d + u]
    else:
        c0, c1, c2 = c[row], c[row + step], c[row + step + step]
        row += step + step + step
        c3, c4 = c[row], c[row + step]
        b = start + channels
        d = b + channels
        f = d + channels
        g = f + channels
        for u in range(channels):
            t[u] = c0 * x[start + u] + c1 * x[b + u] + c2 * x[d + u] + c3 * x[f + u] + c4 * x[g + u]
        for _ in range(_FIVE, size):
            row += step
            g += channels
            ci = c[row + step]
            for u in range(channels):
                t[u] += ci * x[g + u]


def _forward(x, y, w, source, order, ptr, paths, index, value, x_blocks, out_blocks, scale, out):
    atoms = np.empty_like(x)
    for n in prange(x.shape[0]):
        _channels_last(x[n], x_blocks, atoms[n])
    widest, couplings = paths[:, 7].max(), (paths[:, 1] * paths[:, 3]).max()
    for n in prange(x.shape[0]):
        sums = np.zeros(out.shape[1], out.dtype)
        t = np.empty(widest, x.dtype)
        c = np.empty(couplings, x.dtype)
        for place in range(ptr[n], ptr[n + 1]):
            e = order[place]
            xs, ye, we = atoms[source[e]], y[e], w[e]
            for p in range(paths.shape[0]):
                x0, d1, o0, d3, w0, channels = (
                    paths[p, 0],
                    paths[p, 1],
                    paths[p, 2],
                    paths[p, 3],
                    paths[p, 4],
                    paths[p, 7],
                )
                c[: d1 * d3] = 0
                _couple(ye, index, value, paths[p, 5], paths[p, 6], c)
                for k in range(d3):
                    _combine(c, k * d1, _ONE, d1, xs, x0, channels, t)
                    o = o0 + k * channels
                    for u in range(channels):
                        sums[o + u] += we[w0 + u] * t[u]
        _channels_first(sums, out_blocks, scale, out[n])


def _backward(x, y, w, g, target, order, ptr, paths, index, value, x_blocks, out_blocks, scale, gx, gy, gw):
    grads = np.empty_like(g)
    for n in prange(g.shape[0]):
        _channels_last(g[n], out_blocks, grads[n])
    widest, couplings = paths[:, 7].max(), (paths[:, 1] * paths[:, 3]).max()
    for n in prange(x.shape[0]):
        xs = np.empty(x.shape[1], x.dtype)
        _channels_last(x[n], x_blocks, xs)
        sums = np.zeros(x.shape[1], x.dtype)
        t = np.empty(widest, x.dtype)
        c = np.empty(couplings, x.dtype)
        gc = np.empty(couplings, x.dtype)
        zero = x.dtype.type(0)
        for place in range(ptr[n], ptr[n + 1]):
            e = order[place]
            ge, ye, we, gye, gwe = grads[target[e]], y[e], w[e], gy[e], gw[e]
            gye[:] = 0
            for p in range(paths.shape[0]):
                x0, d1, o0, d3, w0, channels = (
                    paths[p, 0],
                    paths[p, 1],
                    paths[p, 2],
                    paths[p, 3],
                    paths[p, 4],
                    paths[p, 7],
                )
                c[: d1 * d3] = 0
                _couple(ye, index, value, paths[p, 5], paths[p, 6], c)
                gwe[w0 : w0 + channels] = 0
                for i in range(d1):
                    _combine(c, i, d1, d3, ge, o0, channels, t)
                    a = x0 + i * channels
                    for u in range(channels):
                        sums[a + u] += we[w0 + u] * t[u]
                        gwe[w0 + u] += xs[a + u] * t[u]
                    for u in range(channels):
                        t[u] = we[w0 + u] * xs[a + u]
                    for k in range(d3):
                        o = o0 + k * channels
                        s = zero
                        for u in range(channels):
                            s += t[u] * ge[o + u]
                        gc[k * d1 + i] = s
                for z in range(paths[p, 5], paths[p, 6]):
                    gye[index[z, 1]] += scale * value[z] * gc[index[z, 0]]
                for u in range(channels):
                    gwe[w0 + u] *= scale
        _channels_first(sums, x_blocks, scale, gx[n])


# Both take x [N, …], y and w [E, …]; the atom at the other end of each edge; edges by atom (order, bounds); then
#
# paths    [P, 8] of each path: start in x, components of x, start in out, components of out, start in w, first and
#          last entry of its table of c, channels
# index    [Z, 2] of each c that is not zero: place in C (k · components of x + i), place in y
# value    [Z]
# blocks   [B, 3] of x and of out: start, channels, components of each block of a row
forward = ThreadedKernel(_forward, fastmath=_FASTMATH)
backward = ThreadedKernel(_backward, fastmath=_FASTMATH)
