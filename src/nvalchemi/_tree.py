"""Nested state as JSON and tensors: what a checkpoint can hold without running code when it is read."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TAG = "$"


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split nested dictionaries, lists and tuples into JSON and tensors.

    Tensors are copied to the CPU, so the result is a snapshot. Tuples, keys that are no strings,
    :class:`collections.Counter`, dtypes and devices are kept as such.

    Raises
    ------
    TypeError
        A value of another kind; the message says where it is.

    Examples
    --------
    >>> tree = {"betas": (0.9, 0.99), "state": {0: torch.zeros(2)}}
    >>> unflatten(*flatten(tree))
    {'betas': (0.9, 0.99), 'state': {0: tensor([0., 0.])}}
    """
    tensors: dict[str, Tensor] = {}
    return _encode(tree, "state", tensors), tensors


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float | np.integer | np.floating):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Tensor):
        # Different places can have the same path: {"a.b": …} and {"a": {"b": …}}, or the keys 1 and "1".
        name = path if path not in tensors else f"{path}#{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {_TAG: "tensor", "name": name}
    if isinstance(value, Mapping):
        items = [(key, _encode(item, f"{path}.{key}", tensors)) for key, item in value.items()]
        if isinstance(value, Counter):
            return {_TAG: "counter", "items": [list(item) for item in items]}
        if all(isinstance(key, str) and key != _TAG for key, _ in items):
            return dict(items)
        if all(isinstance(key, int | str) for key, _ in items):
            return {_TAG: "dict", "items": [list(item) for item in items]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    if isinstance(value, torch.dtype | torch.device):
        return {_TAG: type(value).__name__, "name": str(value).removeprefix("torch.")}
    raise TypeError(
        f"{path} is a {type(value).__name__}: a checkpoint holds numbers, strings, tensors, and lists, tuples and "
        "dictionaries of them"
    )


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put together again what :func:`flatten` split."""
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree.get(_TAG):
        case None:
            return {key: unflatten(item, tensors) for key, item in tree.items()}
        case "tensor":
            return tensors[tree["name"]]
        case "tuple":
            return tuple(unflatten(item, tensors) for item in tree["items"])
        case "dict":
            return {key: unflatten(item, tensors) for key, item in tree["items"]}
        case "counter":
            return Counter({key: unflatten(item, tensors) for key, item in tree["items"]})
        case "dtype":
            dtype = vars(torch).get(tree["name"])
            if isinstance(dtype, torch.dtype):
                return dtype
        case "device":
            return torch.device(tree["name"])
    raise ValueError(f"unknown entry {tree!r}")
