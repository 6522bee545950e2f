"""Operators under torch.compile: torch.func, autocast, structured arguments and results."""

from __future__ import annotations

import dataclasses
import enum

import pytest
import torch
from torch import Tensor

import opkit

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


LOW = torch.bfloat16
POLICIES = {
    None: {(torch.float32, torch.float32): torch.float32, (LOW, torch.float32): LOW, (LOW, LOW): LOW},
    "low": {(torch.float32, torch.float32): LOW, (LOW, torch.float32): LOW, (LOW, LOW): LOW},
    "full": {
        (torch.float32, torch.float32): torch.float32,
        (LOW, torch.float32): torch.float32,
        (LOW, LOW): torch.float32,
    },
    "promote": {(torch.float32, torch.float32): torch.float32, (LOW, torch.float32): torch.float32, (LOW, LOW): LOW},
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_autocast_gives_the_same_dtypes_everywhere(name, policy, kernel, train):
    op = opkit.custom_op(
        name, lambda x, y: (x @ y.T.to(x.dtype)) * y.sum(), schema="(Tensor x, Tensor y) -> Tensor", autocast=policy
    )
    namespace, opname = name.split("::")
    seen = []
    if kernel:
        op.register_kernel("cpu", lambda x, y: seen.append((x.dtype, y.dtype)) or op.reference(x, y))
    compiled = torch.compile(lambda x, y: op(x, y), backend="aot_eager", fullgraph=True)
    for dtypes, expected in POLICIES[policy].items():
        x, y = (torch.randn(3, 3, dtype=dtype, requires_grad=train) for dtype in dtypes)
        with torch.autocast("cpu", LOW):
            results = [op(x, y), getattr(getattr(torch.ops, namespace), opname)(x, y), compiled(x, y)]
        assert [r.dtype for r in results] == [expected] * 3
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=2e-2, atol=2e-2)
        if train:
            grads = [torch.autograd.grad(r.sum(), (x, y)) for r in results]
            for grad in grads:
                assert [g.dtype for g in grad] == list(dtypes)
                torch.testing.assert_close(grad, grads[0], rtol=3e-2, atol=3e-2)


def test_float64_is_left_alone(name):
    op = opkit.custom_op(name, lambda x: x * 2, schema="(Tensor x) -> Tensor", autocast="low")
    compiled = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", LOW):
        assert (
            op(torch.ones(2, dtype=torch.float64)).dtype
            is compiled(torch.ones(2, dtype=torch.float64)).dtype
            is torch.float64
        )


class Mode(enum.Enum):
    DOUBLE = "double"
    NEGATE = "negate"


@dataclasses.dataclass
class Options:
    scale: float
    shift: int = 0


@pytest.mark.parametrize("kernel", [False, True])
def test_structured_arguments_and_results(name, kernel):
    @opkit.custom_op(name, mutates_args=())
    def op(
        pair: tuple[Tensor, Tensor], named: dict[str, Tensor], mode: Mode, options: Options, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        total = pair[0] * named["a"] + pair[1] * named["b"] * options.scale + options.shift
        total = total * 2 if mode is Mode.DOUBLE else -total
        return total, None if extra is None else total * extra

    if kernel:
        op.register_kernel("cpu", op.reference)

    def model(a, b, extra):
        first, nothing = op((a, b), {"a": a, "b": b}, Mode.DOUBLE, Options(2.0, shift=1))
        second, something = op((b, a), {"b": a, "a": b}, Mode.NEGATE, Options(0.5), extra)
        assert nothing is None
        return first + second + something

    def expected(a, b, extra):
        first = (a * a + b * b * 2 + 1) * 2
        second = -(b * b + a * a * 0.5)
        return first + second + second * extra

    values = [torch.randn(3, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for function in (model, compiled):
        output = function(*values)
        torch.testing.assert_close(output, expected(*values))
        torch.testing.assert_close(
            torch.autograd.grad(output.sum(), values), torch.autograd.grad(expected(*values).sum(), values)
        )


def test_returned_dictionaries_and_dataclasses(name):
    @opkit.custom_op(name, mutates_args=())
    def op(x: Tensor) -> dict[str, Tensor]:
        return {"sin": x.sin(), "cos": x.cos()}

    def model(x):
        found = op(x)
        return found["sin"] + found["cos"]

    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), x.sin() + x.cos())
