"""Operators under torch.compile: arguments that are written to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kernel", [False, True])
def test_in_place_operators(name, backend, kernel, spelled):
    @opkit.custom_op(name, mutates_args=("x",))
    def op(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    if kernel:

        @op.register_kernel("cpu")
        def _(x, y):
            np.add(x.numpy(), y.numpy(), out=x.numpy())

    call = spelled(op)

    def model(x, y):
        z = x * 2
        call(z, y)
        call(z[0], y[0])
        call(x, y)
        return z + x

    ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    y = torch.arange(6.0).reshape(2, 3)
    result = torch.compile(model, backend=backend, fullgraph=True)(ours, y)
    z = theirs * 2 + y
    z[0] += y[0]
    theirs += y
    torch.testing.assert_close(result, z + theirs)
    torch.testing.assert_close(ours, theirs)


def test_in_place_inlined_code_has_no_call(name, recorder):
    @opkit.custom_op(name)
    def op(x: Float[Tensor, "n"]) -> None:
        x.mul_(2)

    def model(x):
        y = x + 1
        op(y)
        return y

    torch.testing.assert_close(
        torch.compile(model, backend=recorder.backend, fullgraph=True)(torch.ones(3)), torch.full((3,), 4.0)
    )
    assert recorder.calls(op) == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_in_place_and_returning(name, backend):
    @opkit.custom_op(name, mutates_args=("state",))
    def op(state: Tensor, x: Tensor) -> Tensor:
        state.add_(x)
        return x * state

    compiled = torch.compile(lambda s, x: op(s, x) + 1, backend=backend, fullgraph=True)
    state, x = torch.ones(3), torch.full((3,), 2.0)
    torch.testing.assert_close(compiled(state, x), torch.full((3,), 7.0))
    torch.testing.assert_close(state, torch.full((3,), 3.0))


@pytest.mark.parametrize("kernel", [False, True])
def test_in_place_in_training(name, kernel):
    @opkit.custom_op(name, mutates_args=("x",))
    def op(x: Tensor, y: Tensor) -> None:
        x.mul_(y)

    if kernel:
        op.register_kernel("cpu", lambda x, y: x.mul_(y) is None or None)

    def model(x, y):
        z = x.sin()
        op(z, y)
        return z

    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    found = torch.autograd.grad(torch.compile(model, backend="aot_eager", fullgraph=True)(x, y).sum(), (x, y))
    torch.testing.assert_close(found, (x.cos() * y, x.sin()))


@pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="torch.Tag.out came with torch 2.13")
@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_out_variants(name, backend):
    @opkit.custom_op(name, mutates_args=("out",), tags=torch.Tag.out)
    def op(x: Tensor, *, out: Tensor) -> Tensor:
        out.copy_(x * 2)
        return out

    def model(x):
        out = torch.empty_like(x)
        op(x + 1, out=out)
        return out + 1

    def into(x, out):
        op(x, out=out)
        return out.sum()

    torch.testing.assert_close(
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(3)), torch.full((3,), 5.0)
    )
    out = torch.zeros(3)
    torch.testing.assert_close(
        torch.compile(into, backend=backend, fullgraph=True)(torch.ones(3), out), torch.tensor(6.0)
    )
    torch.testing.assert_close(out, torch.full((3,), 2.0))


@pytest.mark.sweep(1)
@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="torch.Tag.inplace came with torch 2.13")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_tagged_in_place(name, backend):
    @opkit.custom_op(name, mutates_args=("x",), tags=torch.Tag.inplace)
    def op(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    compiled = torch.compile(lambda x, y: op(x, y) * 2, backend=backend, fullgraph=True)
    x = torch.ones(3)
    torch.testing.assert_close(compiled(x, torch.ones(3)), torch.full((3,), 4.0))
    torch.testing.assert_close(x, torch.full((3,), 2.0))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_out_argument_declared_in_the_schema(name, backend):
    op = opkit.custom_op(
        name, lambda x, out: out.copy_(x * 3) is None or None, schema="(Tensor x, Tensor(a!) out) -> ()"
    )

    def model(x):
        out = torch.empty_like(x)
        op(x, out)
        return out + 1

    torch.testing.assert_close(
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(3)), torch.full((3,), 4.0)
    )


@pytest.mark.parametrize("returns_argument", [False, True])
def test_a_result_that_is_an_argument_is_refused_as_in_eager_mode(name, returns_argument):
    def even(x):
        return torch.nn.functional.pad(x, (0, 0, 0, 1)) if x.shape[0] % 2 else x

    op = opkit.custom_op(name, even, schema="(Tensor x) -> Tensor")
    if returns_argument:
        op.register_autograd(lambda ctx, grad: grad)
    compiled = torch.compile(lambda x: op(x).add_(1), backend="aot_eager", dynamic=False)
    assert compiled(torch.ones(3, 2)).shape == (4, 2)
    for x in (torch.ones(4, 2), torch.ones(4, 2, requires_grad=True)):
        for call in (op, compiled):
            with pytest.raises(Exception, match=r"may not alias|input was returned as-is"):
                call(x)
        torch.testing.assert_close(x.detach(), torch.ones(4, 2))
