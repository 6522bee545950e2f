"""Writes of a part of a tensor where it is, in place of a copy of the tensor with that part."""

from __future__ import annotations

from collections.abc import Sequence

from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Index
from opkit.compiler.lower.builder import Builder
from opkit.compiler.lower.tensors import Stored, Tensor, substitution


def may_write(b: Builder, x: Tensor) -> bool:
    """Return whether the node may write to ``x``, its argument: nothing reads the old elements any more."""
    allowed = any(b.values[ref.name] is x for ref in b.node.writes)
    return allowed and isinstance(x.source, Stored) and x.source.buffer.role == "input" and not x.source.copied


def write(
    b: Builder, x: Tensor, axes: Sequence[Index], target: Sequence[Index], body: Expr, update: str | None = None
) -> Tensor:
    """Write ``body``, over ``axes``, to the elements of ``x`` at ``target``, as in ``Compute``, and return ``x``."""
    assert isinstance(x.source, Stored)
    moved = substitution(x.shape, target)
    at = [each.substitute(moved) for each in x.source.coordinates]
    b.compute(x.source.buffer, axes, body, at, update=update)
    return x
