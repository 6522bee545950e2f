"""Operators under torch.compile: dynamic shapes, which recompile little, and sizes that depend on data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import opkit

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# ---- dynamic shapes -------------------------------------------------------------------------------------------------

# batch 1, equal sizes, and two sizes that vary on their own
SHAPES = [
    (4, 8),
    (5, 8),
    (5, 7),
    (8, 8),
    (1, 8),
    (7, 7),
    (1, 7),
    (2, 9),
    (9, 2),
    (3, 3),
    (1, 3),
    (16, 5),
    (5, 16),
    (6, 6),
]
SHAPES += [(11, 4), (4, 11), (1, 12), (13, 2), (2, 13), (20, 20)]


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_twenty_shapes_recompile_at_most_three_times(
    name, kernel, train, dynamic, norm, with_kernel, spelled, among_neighbours
):
    op = with_kernel(name)[0] if kernel else norm
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(among_neighbours(spelled(op)), backend=counter, fullgraph=True, dynamic=dynamic)
    assert len(set(SHAPES)) == 20
    for shape in SHAPES:
        x, weight = torch.randn(shape, requires_grad=train), torch.randn(shape[-1], requires_grad=train)
        output, expected = compiled(x, weight), among_neighbours(norm.reference)(x, weight)
        torch.testing.assert_close(output, expected)
        if train:
            found = torch.autograd.grad(output.square().sum(), (x, weight))
            torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), (x, weight)))
    assert counter.frame_count <= 4


def test_shapes_of_unrelated_arguments_stay_unrelated(name):
    op = opkit.custom_op(name, lambda x, y: x[:, None] * y[None], schema="(Tensor x, Tensor y) -> Tensor")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, y: op(x, y) + 1, backend=counter, fullgraph=True)
    for n, m in SHAPES:
        x, y = torch.randn(n), torch.randn(m)
        torch.testing.assert_close(compiled(x, y), x[:, None] * y[None] + 1)
    assert counter.frame_count <= 4


def test_a_size_dependent_scalar_argument(name):
    @opkit.custom_op(name, mutates_args=())
    def op(x: Tensor, scale: float, count: int) -> Tensor:
        return x * scale + count

    op.register_kernel("cpu", lambda x, scale, count: x * scale + count)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: op(x, x.shape[0] * 0.5, x.shape[0]), backend=counter, fullgraph=True)
    for n in (4, 5, 9, 17):
        torch.testing.assert_close(compiled(torch.ones(n)), torch.ones(n) * (n * 0.5) + n)
    assert counter.frame_count <= 4


def test_gradients_beside_size_dependent_numbers(name):
    @opkit.custom_op(name, mutates_args=())
    def op(x: Tensor, counts: list[int], count: int) -> Tensor:
        return x * counts[0] + count

    op.register_kernel("cpu", lambda x, counts, count: x * counts[0] + count)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x: op(x, [x.shape[0], 1], x.shape[0]), backend=counter, fullgraph=True, dynamic=True
    )
    for n in (4, 5, 9, 17):
        x = torch.ones(n, requires_grad=True)
        compiled(x).sum().backward()
        assert torch.equal(x.grad, torch.full((n,), float(n)))
    assert counter.frame_count <= 4


# ---- data-dependent outputs -----------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", [False, True])
def test_data_dependent_sizes(name, kernel, spelled):
    op = opkit.custom_op(name, lambda x: x.nonzero().squeeze(1), schema="(Tensor x) -> Tensor")
    if kernel:
        op.register_kernel("cpu", lambda x: torch.from_numpy(np.nonzero(x.numpy())[0]))
    call = spelled(op)
    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: call(x) * 2, backend=counter, fullgraph=True)
        for values in ([0.0, 1, 2, 0], [0.0, 0, 0, 0], [1.0, 1, 1, 1]):
            x = torch.tensor(values)
            torch.testing.assert_close(compiled(x), x.nonzero().squeeze(1) * 2)
    assert counter.frame_count == 1


def test_an_opaque_data_dependent_size(name):
    op = opkit.custom_op(
        name, lambda x: torch.from_numpy(np.unique(x.numpy())), schema="(Tensor x) -> Tensor", opaque=True
    )
    op.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
        x = torch.tensor([3, 1, 3, 2])
        torch.testing.assert_close(compiled(x), torch.tensor([2, 3, 4]))
