"""States of the random number generators that training draws from."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators (all CUDA devices once CUDA is in use).

    Examples
    --------
    >>> state = random_state()
    >>> first = torch.rand(())
    >>> set_random_state(state)
    >>> bool(torch.rand(()) == first)
    True
    """
    # NumPy's global generator is the one that code of users draws from.
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    cuda: list[Tensor] = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to states that :func:`random_state` gave."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
