"""Arithmetic of Python floats that may change from call to call: kernels compute it where they use it."""

from __future__ import annotations

import functools
from typing import Any

from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import Table, overloads
from opkit.compiler.lower.scalar import Number
from opkit.compiler.lower.tensors import Stored, Tensor

TABLE = Table()


@TABLE.rule(*overloads("_local_scalar_dense"))
def item(b: Builder, x: Tensor) -> Number:
    """Return the number in a tensor, which is copied unless it is the caller's: the graph may write to it later."""
    one = x.reshaped([])
    if not isinstance(one.source, Stored) or one.source.buffer.role != "number":
        one = b.compute(b.new_buffer("f64", []), [], element(one, (), "f64").expr)
    return Number(one.at([]))


def _computed(op: str, b: Builder, *operands: Any) -> Number:
    result = f.apply(op, *(f.number(x, _F64) for x in operands))
    assert isinstance(result, Number)
    return result


_F64 = Number(f.number(0, "f64").expr)  # what operands take their type from

for _op in ("add", "sub", "mul", "div", "pow", "min", "max", "neg", "abs", "sqrt"):
    TABLE.rule(f"float.{_op}")(functools.partial(_computed, _op))


@TABLE.rule("float.float")
def converted(b: Builder, x: Any) -> Number:
    """Return a size as a float."""
    return Number(f.number(x, _F64).expr)
