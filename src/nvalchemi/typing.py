"""Tensor types with shapes.

``Float[Tensor, "N 3"]`` says what a function takes; jaxtyping and beartype check the shapes while the tests run
and users pay nothing: without jaxtyping installed the annotations reduce to :class:`torch.Tensor`.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING or importlib.util.find_spec("jaxtyping") is not None:
    from jaxtyping import Bool, Float, Int, Shaped
else:

    class _Unshaped:
        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            return item[0]

    Bool = Float = Int = Shaped = _Unshaped

__all__ = ["Bool", "Float", "Int", "Shaped", "Tensor"]
