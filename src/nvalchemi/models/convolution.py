"""Equivariant convolutions without messages in memory, for published models that are built on e3nn."""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Graph:
    """Edges in the order of the atom they end at (for sums of messages) and in that of their source (for gradients).

    Parameters
    ----------
    source, target : Tensor, int64 [E]
        Where a message comes from and where it is summed, on the CPU.
    num_atoms : int
        Number of atoms, N.
    """

    def __init__(self, source: Tensor, target: Tensor, num_atoms: int) -> None:
        self.source, self.target = source.numpy(), target.numpy()
        self.by_target = _grouped(self.target, num_atoms)
        self.by_source = _grouped(self.source, num_atoms)


def _grouped(atom: "NDArray[np.int64]", num_atoms: int) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
    """Edges ordered by atom, and where those of each atom begin and end, [N + 1]."""
    bounds = np.zeros(num_atoms + 1, np.int64)
    np.cumsum(np.bincount(atom, minlength=num_atoms), out=bounds[1:])
    return np.argsort(atom, kind="stable"), bounds


class TensorProductConvolution:
    """Sum over edges of e3nn's weighted tensor product: compiled, multi-threaded, for the CPU.

    Computes ``scale · Σ_{e → n} tensor_product(x[source(e)], y[e], weights[e])`` for each atom n, with gradients by
    ``x``, ``y`` and the weights; these cannot be differentiated again. Equal to the product to round-off; time and
    memory are a fraction, because neither the features of the sources nor the messages are stored for each edge.

    Parameters
    ----------
    tensor_product : e3nn.o3.TensorProduct
        One that :func:`is_convolution` accepts.
    """

    def __init__(self, tensor_product: Any) -> None:
        from e3nn.o3 import wigner_3j

        first, second, out = tensor_product.irreps_in1, tensor_product.irreps_in2, tensor_product.irreps_out
        # e3nn keeps most couplings in single precision, also in a product that was made double later.
        kept = {name.rpartition(".")[2]: buffer for name, buffer in tensor_product.named_buffers()}
        paths: list[tuple[int, ...]] = []
        index: list[tuple[int, int]] = []
        value: list[float] = []
        weight = 0
        for path in tensor_product.instructions:
            (channels, a), (_, b), (_, c) = first[path.i_in1], second[path.i_in2], out[path.i_out]
            x, y, o = (
                irreps.slices()[i].start
                for irreps, i in ((first, path.i_in1), (second, path.i_in2), (out, path.i_out))
            )
            begin = len(index)
            coupling = kept.get(f"_w3j_{a.l}_{b.l}_{c.l}")
            if coupling is None:
                coupling = wigner_3j(a.l, b.l, c.l, dtype=torch.float64)
            coupling = coupling.to("cpu", torch.float64) * path.path_weight
            for i, j, k in coupling.nonzero().tolist():
                index.append((k * a.dim + i, y + j))
                value.append(float(coupling[i, j, k]))
            paths.append((x, a.dim, o, c.dim, weight, begin, len(index), channels))
            weight += channels
        self._paths, self._index = np.array(paths, np.uint64), np.array(index, np.uint64)
        self._value = np.array(value)
        self._blocks = _blocks(first), _blocks(out)
        self._width: int = out.dim

    def __call__(self, x: Tensor, y: Tensor, weights: Tensor, graph: Graph, scale: float) -> Tensor:
        """Convolve.

        Parameters
        ----------
        x : Tensor, shape [N, in1.dim]
            Features of atoms.
        y : Tensor, shape [E, in2.dim]
            Filter of each edge.
        weights : Tensor, shape [E, weight_numel]
            Weights of each edge.
        graph : Graph
            Where edges begin and end.
        scale : float
            Factor of the sum.

        Returns
        -------
        Tensor, shape [N, out.dim]
            Features of atoms.
        """
        return cast(Tensor, _Convolve.apply(x, y, weights, graph, self, scale))

    def tables(self, dtype: "np.dtype[Any]", scale: float) -> tuple[Any, ...]:
        """What the compiled functions read, with numbers in the dtype of the features."""
        return self._paths, self._index, self._value.astype(dtype), *self._blocks, dtype.type(scale)

    @property
    def width(self) -> int:
        """Components of a row of the result."""
        return self._width


def is_convolution(tensor_product: Any) -> bool:
    """Whether :class:`TensorProductConvolution` computes this tensor product.

    It does when channels are not mixed and weights come from outside.

    Parameters
    ----------
    tensor_product : object
        Anything; only an ``e3nn.o3.TensorProduct`` can be one.
    """
    from e3nn.o3 import TensorProduct

    if type(tensor_product) is not TensorProduct:
        return False
    paths: Any = tensor_product.instructions
    second: Any = tensor_product.irreps_in2
    outputs: Any = tensor_product.irreps_out
    return (
        len(paths) > 0
        and not tensor_product.internal_weights
        and not tensor_product.shared_weights
        and all(path.connection_mode == "uvu" and path.has_weight for path in paths)
        and all(channels == 1 for channels, _ in second)
        and sorted(path.i_out for path in paths) == list(range(len(outputs)))
    )


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weights: Tensor, graph: Any, product: Any, scale: Any
    ) -> Tensor:
        from nvalchemi._kernels.convolution import forward

        x, y, weights = x.contiguous(), y.contiguous(), weights.contiguous()
        ctx.save_for_backward(x, y, weights)
        out = x.new_empty(x.shape[0], product.width)
        ctx.graph, ctx.tables = graph, product.tables(out.numpy().dtype, scale)
        arrays = (x.numpy(), y.numpy(), weights.numpy())
        forward(*arrays, graph.source, *graph.by_target, *ctx.tables, out.numpy())
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        from nvalchemi._kernels.convolution import backward

        results = [torch.empty_like(saved) for saved in ctx.saved_tensors]
        arrays = [tensor.numpy() for tensor in (*ctx.saved_tensors, grads[0].contiguous())]
        gradients = [result.numpy() for result in results]
        backward(*arrays, ctx.graph.target, *ctx.graph.by_source, *ctx.tables, *gradients)
        return (*results, None, None, None)


def _blocks(irreps: Any) -> "NDArray[np.uint64]":
    """Start, channels and components of each block of a row of features."""
    rows = [(place.start, mul, ir.dim) for place, (mul, ir) in zip(irreps.slices(), irreps, strict=True)]
    return np.array(rows, np.uint64)
