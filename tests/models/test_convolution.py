"""The compiled convolution against e3nn's tensor product and a sum."""

import copy

import pytest
import torch

from nvalchemi.models.convolution import Graph, TensorProductConvolution, is_convolution

o3 = pytest.importorskip("e3nn.o3")

FEATURES, FILTER = "6x0e + 5x1o + 3x2e + 2x3o", "1x0e + 1x1o + 1x2e + 1x3o"


def _tensor_product(features, mode="uvu"):
    """All paths between features and filter, each with its own block of the result."""
    features, filter_ = o3.Irreps(features), o3.Irreps(FILTER)
    out, paths = [], []
    for i, (mul, ir) in enumerate(features):
        for j, (_, other) in enumerate(filter_):
            for result in ir * other:
                if result.l <= 3:
                    paths.append((i, j, len(out), mode, True))
                    out.append((mul, result))
    return o3.TensorProduct(
        features, filter_, o3.Irreps(out), paths, shared_weights=False, internal_weights=False
    )


def _case(product, dtype=torch.float64):
    """Six atoms of which one has no edge and one only starts some; edges in no order."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()

    source = torch.tensor([0, 3, 2, 2, 0, 5, 1, 2, 2, 5])
    target = torch.tensor([3, 0, 2, 1, 0, 1, 0, 3, 0, 3])
    edges = source.shape[0]
    rows = (6, product.irreps_in1.dim), (edges, product.irreps_in2.dim), (edges, product.weight_numel)
    return [normal(*shape) for shape in rows], source, target


def _expected(product, inputs, source, target, scale):
    x, y, weights = inputs
    messages = product(x[source], y, weights)
    return scale * messages.new_zeros(x.shape[0], messages.shape[1]).index_add(0, target, messages)


@pytest.mark.parametrize("features", [FEATURES, "37x0e"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_equals_the_sum_of_tensor_products_and_so_do_gradients(features, dtype, tolerance):
    product = _tensor_product(features).to(dtype)
    inputs, source, target = _case(product, dtype)
    expected = _expected(product, inputs, source, target, 0.3)
    result = TensorProductConvolution(product)(*inputs, Graph(source, target, 6), 0.3)
    assert result.dtype is dtype
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=10 * tolerance)
    weighting = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    for one, other in zip(
        torch.autograd.grad((result * weighting).sum(), inputs),
        torch.autograd.grad((expected * weighting).sum(), inputs),
        strict=True,
    ):
        assert other.abs().max() > 0.1
        torch.testing.assert_close(one, other, rtol=tolerance, atol=10 * tolerance)


def test_threads_change_nothing():
    product = _tensor_product(FEATURES).double()
    inputs, source, target = _case(product)
    convolution, graph = TensorProductConvolution(product), Graph(source, target, 6)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            result = convolution(*inputs, graph, 1.0)
            results.append([result, *torch.autograd.grad(result.square().sum(), inputs)])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_second_derivatives_are_refused():
    product = _tensor_product("2x0e + 1x1o").double()
    inputs, source, target = _case(product)
    result = TensorProductConvolution(product)(*inputs, Graph(source, target, 6), 1.0)
    (gradient,) = torch.autograd.grad(result.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_other_tensor_products_are_told_apart():
    assert is_convolution(_tensor_product(FEATURES))
    assert not is_convolution(o3.FullyConnectedTensorProduct("2x0e", "1x0e", "2x0e"))
    mixed = o3.TensorProduct("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uvw", True)], shared_weights=False)
    assert not is_convolution(mixed)
    shared = o3.TensorProduct("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uvu", True)])
    assert not is_convolution(shared)
    twice = [(0, 0, 0, "uvu", True), (1, 0, 0, "uvu", True)]
    added = o3.TensorProduct(
        "2x0e + 2x0e", "1x0e", "2x0e", twice, shared_weights=False, internal_weights=False
    )
    assert not is_convolution(added)
    assert not is_convolution(torch.nn.Linear(1, 1))


def test_a_copy_computes_the_same():
    product = _tensor_product("2x0e + 1x1o").double()
    inputs, source, target = _case(product)
    convolution, graph = TensorProductConvolution(product), Graph(source, target, 6)
    assert torch.equal(copy.deepcopy(convolution)(*inputs, graph, 1.0), convolution(*inputs, graph, 1.0))
