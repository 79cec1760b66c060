"""Random numbers that belong to a structure, not to its place in a batch.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC'11, doi:10.1145/2063384.2063405) turns a counter of four
32-bit words and a key of two into four random words. There is no state: what is drawn depends on

============ =======================================================
word         content
============ =======================================================
counter 0    number of the atom within its structure
counter 1    step of that structure (``system_step``)
counter 2    low 32 bits of ``system_id``
counter 3    high 24 bits of ``system_id``, then 8 bits of the stream
key          the seed, 64 bits
============ =======================================================

so the noise of a structure is the same alone, in any batch, in any order, after a refill and after a restart.
"""

import math
from enum import IntEnum

import torch

from nvalchemi import _kernels
from nvalchemi.typing import Float, Int, Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


class Stream(IntEnum):
    """Independent sequences for the same seed, structure and step."""

    LANGEVIN = 0
    VELOCITIES = 1


def check_seed(seed: int) -> int:
    """The seed, if it is an integer of 64 bits or less; ``ValueError`` otherwise."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"random_seed must be an int from 0 to 2**63 − 1, got {seed!r}")
    return seed


def philox4x32(counter: Int[Tensor, "n 4"], seed: int) -> Int[Tensor, "n 4"]:
    """Four random 32-bit words per counter, as int64: the portable form, right on every device.

    Parameters
    ----------
    counter : Tensor, int64 [n, 4]
        Words from 0 to 2³² − 1.
    seed : int
        Key; the low 32 bits are its first word.

    Examples
    --------
    >>> [f"{word:08x}" for word in philox4x32(torch.zeros(1, 4, dtype=torch.int64), 0)[0].tolist()]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = seed & _LOW, seed >> 32
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return torch.stack([c0, c1, c2, c3], dim=-1)


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of 32-bit numbers, without leaving the range of int64."""
    low = (word & 0xFFFF) * factor
    rest = (low >> 16) + (word >> 16) * factor
    return rest >> 16, ((rest & 0xFFFF) << 16) | (low & 0xFFFF)


def standard_normals(
    system_id: Int[Tensor, " B"],
    system_step: Int[Tensor, " B"],
    ptr: Int[Tensor, " B+1"],
    seed: int,
    stream: Stream,
    out: Float[Tensor, "N 3"],
) -> Float[Tensor, "N 3"]:
    """Three standard normal deviates for each atom.

    They depend on the seed, the stream, the structure's id and step, and the number of the atom in its
    structure. Box–Muller on 32-bit uniforms in float64, so the largest deviate possible is 6.8.

    Parameters
    ----------
    system_id, system_step : Tensor, int64 [B]
        Identity of each structure, and its step.
    ptr : Tensor, int64 [B + 1]
        First atom of each structure and, last, the number of atoms.
    seed : int
        From 0 to 2⁶³ − 1.
    stream : Stream
        Purpose of the numbers.
    out : Tensor, float64 [N, 3]
        Memory to write to.

    Returns
    -------
    Tensor
        ``out``.
    """
    if _kernels.serve(out):
        from nvalchemi._kernels.random import fill_normals

        fill_normals(seed, system_id.numpy(), system_step.numpy(), ptr.numpy(), int(stream), out.numpy())
        return out
    return out.copy_(
        box_muller(philox4x32(counters(system_id, system_step, ptr, stream, out.shape[0]), seed))
    )


def counters(
    system_id: Tensor, system_step: Tensor, ptr: Tensor, stream: Stream, num_atoms: int
) -> Int[Tensor, "N 4"]:
    """Counter of each atom, laid out as this module's docstring says."""
    # With its size known the device need not be asked for it.
    graph = torch.repeat_interleave(ptr.diff(), output_size=num_atoms)
    atom = torch.arange(num_atoms, device=ptr.device) - ptr[graph]
    tail = (((system_id >> 32) << 8) | int(stream)) & _LOW
    return torch.stack([atom, (system_step & _LOW)[graph], (system_id & _LOW)[graph], tail[graph]], dim=-1)


def box_muller(words: Int[Tensor, "N 4"]) -> Float[Tensor, "N 3"]:
    """Three standard normal deviates from four random words."""
    uniform = (words.double() + 0.5) / 2**32
    radius = (-2.0 * uniform[:, 0::2].log()).sqrt()
    angle = (2.0 * math.pi) * uniform[:, 1::2]
    x, y = radius * angle.cos(), radius * angle.sin()
    return torch.stack([x[:, 0], y[:, 0], x[:, 1]], dim=-1)
