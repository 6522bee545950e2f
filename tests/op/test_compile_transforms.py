"""Operators under torch.compile and torch.func."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("kernel", [False, True])
def test_functionalize(name, kernel, norm, with_kernel):
    op = with_kernel(name)[0] if kernel else norm
    x, weight = torch.randn(2, 4), torch.randn(4)

    def model(x):
        y = x.clone()
        y.add_(1)
        return op(y, weight)

    torch.testing.assert_close(torch.func.functionalize(model)(x), norm.reference(x + 1, weight))


@pytest.mark.parametrize("kernel", [False, True])
def test_torch_func_inside_compile(name, kernel, norm, with_kernel):
    op = with_kernel(name)[0] if kernel else norm
    x, weight = torch.randn(3, 4), torch.randn(4)
    transforms = {
        "grad": lambda f: torch.func.grad(lambda x: f(x, weight).square().sum())(x),
        "vmap": lambda f: torch.func.vmap(f, in_dims=(0, None))(x, weight),
        "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda row: f(row, weight).sum()))(x),
    }
    if not kernel:  # a kernel leaves torch, and jvp of a jvp-less call is the reference's
        transforms["jvp"] = lambda f: torch.func.jvp(lambda x: f(x, weight), (x,), (x,))
    every = lambda f: {name: transform(f) for name, transform in transforms.items()}  # noqa: E731
    compiled = torch.compile(lambda: every(lambda *args: op(*args)), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), every(norm.reference))
