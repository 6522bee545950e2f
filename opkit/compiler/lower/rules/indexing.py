"""Elements at places that other tensors hold: what is read there is an element like any other, in one compute.

Every such place is checked: an index outside its dimension stops the program, as eager raises. Whether a negative one
counts from the end is the operator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import is_int
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Index, IndexLike, Value, index, product, value
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.context import Builder
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Shape, Tensor, broadcast, formal

TABLE = Table()


# ---- places ----------------------------------------------------------------------------------------------------------


def place(at: Scalar, extent: IndexLike, from_end: bool = False) -> Index:
    """Return an integer that is read, as a checked position; ``from_end``: negative ones are allowed, and count from there."""
    whole = f.cast(at, "i64")
    return value(expr.bound((whole if from_end else f.where(whole < 0, index(extent), whole)).expr, extent))


def read(x: Tensor, coordinates: Sequence[IndexLike]) -> Expr:
    """Return the element at coordinates, with the checks of those that the element does not depend on."""
    body = x.at(coordinates)
    seen = set(body.walk())
    for check in _checks(coordinates):
        if check not in seen:
            other = next(c for c in (expr.const(0, body.dtype), expr.const(1, body.dtype)) if c is not body)
            body = expr.where(expr.op("le", expr.const(0, "i64"), check), body, other)
    return body


def _checks(coordinates: Sequence[IndexLike]) -> list[Expr]:
    """Return the checked positions; one in a dimension of a single element, or of a constant, is lost from the element's."""
    leaves = [leaf for at in coordinates for leaf in index(at).leaves()]
    return [leaf.expr for leaf in leaves if isinstance(leaf, Value)]


def with_dimension(x: Tensor) -> Tensor:
    """Return a tensor of no dimensions as one of one element, as the operators along a dimension take it."""
    return x if x.shape else x.reshaped([index(1)])


def replaced(at: Sequence[Index], dim: int, by: IndexLike) -> list[Index]:
    return [index(by) if k == dim else a for k, a in enumerate(at)]


def selection(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[Shape, list[Index]]:
    """Return the shape of ``x[indices]``, and where in ``x`` its element is.

    The dimensions that the index tensors broadcast to stand where the indices do, or in front if others are in between.
    """
    indexed = {k: t for k, t in enumerate(indices) if t is not None}
    if any(not is_int(t.dtype) or t.dtype == "u8" for t in indexed.values()):
        raise NoRule("a mask as an index")
    common = broadcast(*(t.shape for t in indexed.values()))
    rest = [n for k, n in enumerate(x.shape) if k not in indexed]
    begin = min(indexed) if max(indexed) - min(indexed) < len(indexed) else 0
    shape = (*rest[:begin], *common, *rest[begin:])
    axes = formal(shape)
    inner, outer = axes[begin : begin + len(common)], iter(axes[:begin] + axes[begin + len(common) :])
    read_at = {k: Scalar(t.expanded(common).at(inner)) for k, t in indexed.items()}
    return shape, [place(read_at[k], n, True) if k in indexed else next(outer) for k, n in enumerate(x.shape)]


# ---- reads -----------------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("embedding"))
def embedding(b: Builder, weight: Tensor, indices: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    axes = formal(b.result().shape)
    rank = len(indices.shape)
    return b.elementwise(read(weight, [place(Scalar(indices.at(axes[:rank])), weight.shape[0]), *axes[rank:]]))


@TABLE.rule(*overloads("index_select"))
def index_select(b: Builder, x: Tensor, dim: int, indices: Tensor) -> Tensor:
    source, at = with_dimension(x), with_dimension(indices)
    dim %= len(source.shape)
    axes = formal(replaced(source.shape, dim, at.shape[0]))
    return b.elementwise(read(source, replaced(axes, dim, place(Scalar(at.at([axes[dim]])), source.shape[dim]))))


@TABLE.rule(*overloads("gather"))
def gather(b: Builder, x: Tensor, dim: int, indices: Tensor, **kwargs: Any) -> Tensor:
    source, at = with_dimension(x), with_dimension(indices)
    if len(source.shape) != len(at.shape):
        raise NoRule("an empty index of another rank")
    dim %= len(source.shape)
    axes = formal(at.shape)
    return b.elementwise(read(source, replaced(axes, dim, place(Scalar(at.at(axes)), source.shape[dim]))))


@TABLE.rule(*overloads("take"))
def take(b: Builder, x: Tensor, indices: Tensor) -> Tensor:
    flat = x.reshaped([product(x.shape)])
    at = place(Scalar(indices.at(formal(indices.shape))), flat.shape[0], from_end=True)
    return b.elementwise(read(flat, [at]))


@TABLE.rule(*overloads("index", "Tensor"), *overloads("_unsafe_index", "Tensor"))
def index_(b: Builder, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    _, coordinates = selection(x, indices)
    return b.elementwise(read(x, coordinates))
