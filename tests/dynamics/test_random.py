"""Counter-based random numbers."""

import numpy as np
import pytest
import torch
from scipy import stats

from nvalchemi._kernels import random as compiled
from nvalchemi.dynamics.random import Stream, box_muller, check_seed, counters, philox4x32, standard_normals

# Known answers of the Random123 distribution (kat_vectors, philox4x32 with 10 rounds).
KNOWN = [
    ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    words = philox4x32(torch.tensor([counter]), key[0] | key[1] << 32)
    assert " ".join(f"{w:08x}" for w in words[0].tolist()) == answer
    words = compiled.philox4x32(np.array([counter]), np.array(key))
    assert " ".join(f"{w:08x}" for w in words[0]) == answer


def test_portable_and_compiled_form_give_the_same_integers():
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 2**32, (1000, 4))
    seed = 0x1234567890ABCDE
    key = np.array([seed & 0xFFFFFFFF, seed >> 32])
    np.testing.assert_array_equal(
        philox4x32(torch.from_numpy(counter), seed).numpy(), compiled.philox4x32(counter, key)
    )


def _normals(ids, steps, sizes, seed=42, stream=Stream.LANGEVIN):
    ptr = torch.tensor([0, *np.cumsum(sizes)])
    out = torch.empty(int(ptr[-1]), 3, dtype=torch.float64)
    return standard_normals(torch.tensor(ids), torch.tensor(steps), ptr, seed, stream, out), ptr


def test_portable_and_compiled_normals_agree():
    ids, steps = [7, 2**40 + 3, 0], [3, 2**33, 0]
    made, ptr = _normals(ids, steps, [4, 0, 5], seed=2**50 + 1, stream=Stream.VELOCITIES)
    words = philox4x32(
        counters(torch.tensor(ids), torch.tensor(steps), ptr, Stream.VELOCITIES, int(ptr[-1])), 2**50 + 1
    )
    torch.testing.assert_close(made, box_muller(words), rtol=1e-13, atol=1e-15)


def test_noise_belongs_to_the_structure_not_to_its_place():
    together, _ = _normals([3, 8, 5], [10, 11, 12], [2, 3, 4])
    reordered, _ = _normals([5, 3], [12, 10], [4, 2])
    assert torch.equal(together[5:], reordered[:4])
    assert torch.equal(together[:2], reordered[4:])


def test_seed_stream_step_and_id_each_change_the_noise():
    base, _ = _normals([3], [10], [50])
    others = [
        _normals([3], [10], [50], seed=43)[0],
        _normals([3], [10], [50], stream=Stream.VELOCITIES)[0],
        _normals([3], [11], [50])[0],
        _normals([4], [10], [50])[0],
        _normals([3 + 2**32], [10], [50])[0],
        _normals([3], [10], [50], seed=42 + 2**32)[0],
    ]
    for other in others:
        # 150 pairs of independent normals: |r| > 0.3 has probability 2e-4.
        assert abs(np.corrcoef(base.flatten(), other.flatten())[0, 1]) < 0.3
        assert not bool((base == other).any())


def test_numbers_are_standard_normal_and_the_three_components_independent():
    x, _ = _normals(list(range(100)), [5] * 100, [1000] * 100)
    # p > 1e-3 with a fixed seed; a wrong variance by 1 % gives p < 1e-4 for 3e5 numbers.
    assert stats.kstest(x.flatten().numpy(), "norm").pvalue > 1e-3
    correlation = np.corrcoef(x.numpy().T)
    np.testing.assert_allclose(correlation, np.eye(3), atol=4 / 100000**0.5)


@pytest.mark.parametrize("seed", [-1, 2**63, True])
def test_bad_seed_is_an_error(seed):
    with pytest.raises(ValueError, match="random_seed"):
        check_seed(seed)
