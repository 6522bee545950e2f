"""Gradients of calls with DTensors: their placements, and the collectives that the backward needs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree

import opkit
from tests.sharding.test_dtensor import placed

R = Replicate()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def total(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(0)


def swiglu(x: Tensor) -> Tensor:
    return F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def two(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x * weight, weight * 2


def largest(x: Tensor) -> Tensor:
    return x.amax(0)


def backward(op, *tensors, used=slice(None)):
    """Return the placements of the gradients, and the number of collectives of the backward."""
    for tensor in tensors:
        tensor.requires_grad_()
    outputs = pytree.tree_leaves(op(*tensors))[used]
    counted = CommDebugMode()
    with counted:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return [tensor.grad.placements[0] for tensor in tensors], counted.get_total_counts()


@pytest.mark.parametrize(
    ("function", "tensors", "gradients"),
    [
        (rms_norm, [((8, 6), Shard(0)), ((6,), R)], [Shard(0), Partial()]),
        (rms_norm, [((9, 6), Shard(0)), ((6,), R)], [Shard(0), Partial()]),
        (rms_norm, [((8, 6), R), ((6,), R)], [R, R]),
        (linear, [((8, 6), Shard(0)), ((12, 6), R)], [Shard(0), Partial()]),
        (linear, [((8, 6), R), ((12, 6), Shard(0))], [Partial(), Shard(0)]),
        (linear, [((8, 12), Shard(1)), ((12, 12), Shard(1))], [Shard(1), Shard(1)]),
        (linear, [((8, 6), Partial()), ((12, 6), R)], [R, Partial()]),
        (total, [((8, 6), Shard(0)), ((6,), R)], [Shard(0), Partial()]),
        (swiglu, [((8, 6), Shard(0))], [Shard(0)]),
    ],
)
@pytest.mark.parametrize("kernel", [False, True])
def test_pieces_have_gradients_without_communication(mesh, name, function, tensors, gradients, kernel):
    op = opkit.custom_op(name, function, mutates_args=())
    if kernel:
        op.register_kernel("cpu", lambda *args: function(*args))
    assert backward(op, *[placed(mesh, size, p) for size, p in tensors]) == (gradients, 0)


def test_results_that_are_not_used(mesh, name):
    op = opkit.custom_op(name, two, mutates_args=())
    x, weight = placed(mesh, (8, 6), Shard(0)), placed(mesh, (6,), R)
    assert backward(op, x, weight, used=slice(1)) == ([Shard(0), Partial()], 0)


def test_an_extremum_needs_the_whole_result(mesh, name):
    op = opkit.custom_op(name, largest, mutates_args=())
    assert backward(op, placed(mesh, (8, 6), Shard(0))) == ([Shard(0)], 2)


def test_second_derivatives(mesh, name):
    op = opkit.custom_op(name, rms_norm, mutates_args=())
    x, weight = placed(mesh, (8, 6), R).requires_grad_(), placed(mesh, (6,), R).requires_grad_()
    plain = [x.to_local().detach().requires_grad_(), weight.to_local().detach().requires_grad_()]
    found = []
    for function, tensors in ((op, (x, weight)), (rms_norm, plain)):
        (first,) = torch.autograd.grad(function(*tensors).sum(), tensors[0], create_graph=True)
        first.square().sum().backward()
        found.append([tensor.grad for tensor in tensors])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.to_local(), want)


def test_compiled_gradients(mesh, name):
    op = opkit.custom_op(name, rms_norm, mutates_args=())
    x, weight = placed(mesh, (8, 6), Shard(0)), placed(mesh, (6,), R)
    compiled = torch.compile(lambda x, weight: op(x, weight), backend="aot_eager", fullgraph=True)
    assert backward(compiled, x, weight) == ([Shard(0), Partial()], 0)
    plain = [x.to_local().detach().requires_grad_(), weight.to_local().detach().requires_grad_()]
    rms_norm(*plain).backward(torch.ones(2, 6))
    torch.testing.assert_close(x.grad.to_local(), plain[0].grad)
    torch.testing.assert_close(weight.grad.to_local(), plain[1].grad)
