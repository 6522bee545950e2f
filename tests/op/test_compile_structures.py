"""Operators under torch.compile: structured arguments and results."""

from __future__ import annotations

import dataclasses
import enum

import pytest
import torch
from torch import Tensor

import opkit

pytestmark = pytest.mark.usefixtures("fresh_compiler")


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
