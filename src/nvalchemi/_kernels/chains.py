"""Nosé–Hoover chains, compiled for the CPU.

The same flows as ``NoseHooverChains`` in :mod:`nvalchemi.dynamics.integrators.nose_hoover`, whose names it has.
"""

# numba infers the types of kernels; annotations would not help it.
# pyright: basic, reportPrivateImportUsage=false

import math

from nvalchemi._kernels.compiler import compiled


@compiled()
def propagate(eta, v, kinetic, dof, kT, time, dt, weights, active, scale):
    """Advance ``eta``, ``v`` [B, C, M] of active graphs in place; factors of the velocities into ``scale`` [B, C]."""
    last = v.shape[2] - 1
    for graph in range(v.shape[0]):
        if not active[graph]:
            continue
        for c in range(v.shape[1]):
            n = dof[graph, c]
            excess = 2.0 * kinetic[graph, c] / (n * kT[graph, 0]) if n > 0 else 1.0
            rate = time[graph, 0] ** -2
            log_scale = 0.0
            for weight in weights:
                step = weight * dt[graph, 0]
                for i in range(last + 1):
                    _kick(v[graph, c], last - i, last, n, excess, rate, step)
                log_scale -= step * v[graph, c, 0]
                excess *= math.exp(-2.0 * step * v[graph, c, 0])
                for k in range(last + 1):
                    eta[graph, c, k] += step * v[graph, c, k]
                for k in range(last + 1):
                    _kick(v[graph, c], k, last, n, excess, rate, step)
            scale[graph, c] = math.exp(log_scale)


@compiled(inline="always")
def _kick(v, k, last, n, excess, rate, step):
    """Half of ``step`` for the velocity of link ``k``."""
    if k == 0:
        pull = rate * excess
    elif k == 1:
        pull = n * v[0] * v[0]
    else:
        pull = v[k - 1] * v[k - 1]
    half = 0.5 * step * (pull - rate)
    if k == last:
        v[k] += half
    else:
        friction = math.exp(-0.25 * step * v[k + 1])
        v[k] = (v[k] * friction + half) * friction
