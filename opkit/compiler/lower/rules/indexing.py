"""Reads and writes at indices from other tensors: gather, embedding, index, scatter, index_add, index_put, histc.

A read is a load in one compute like any other. A write is a copy of the tensor, then a compute whose target is computed. Every
index is checked: one outside its dimension stops the program, as eager mode raises. Operators decide whether a negative index
counts from the end.

If several elements are written to one position, they are combined in row-major order; of plain stores, the last one counts. Sums
of narrow floats accumulate in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES, is_int
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import ZERO, Index, IndexLike, Value, index, product, value
from opkit.compiler.ir.ops import REDUCTIONS, neutral
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.rules.pointwise import Operand
from opkit.compiler.lower.rules.writes import may_write, write
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Shape, Tensor, broadcast, formal, lazy

TABLE = Table()


# ---- indices ---------------------------------------------------------------------------------------------------------


def checked_index(at: Scalar, extent: IndexLike, from_end: bool = False) -> Index:
    """Return an integer element as an index that is checked; with ``from_end``, a negative one counts from the end."""
    whole = f.cast(at, "i64")
    return value(expr.bound((whole if from_end else f.where(whole < 0, index(extent), whole)).expr, extent))


def read(x: Tensor, coordinates: Sequence[IndexLike]) -> Expr:
    """Return the element at coordinates.

    A checked index that the element does not depend on, for its dimension has one element or the tensor is constant, is added.
    """
    body = x.at(coordinates)
    seen = set(body.walk())
    leaves = [leaf for at in coordinates for leaf in index(at).leaves()]
    for check in [leaf.expr for leaf in leaves if isinstance(leaf, Value)]:
        if check not in seen:
            other = next(c for c in (expr.const(0, body.dtype), expr.const(1, body.dtype)) if c is not body)
            body = expr.where(expr.op("le", expr.const(0, "i64"), check), body, other)
    return body


def check_dtype(indices: Tensor, *allowed: str) -> None:
    """Leave indices of other dtypes to the operator: it refuses them, which its fake implementation does not."""
    if indices.dtype not in allowed:
        raise NoRule(f"indices of the dtype {indices.dtype}")


def with_dimension(x: Tensor) -> Tensor:
    """Return the tensor, with a dimension of one element if it has none."""
    return x if x.shape else x.reshaped([index(1)])


def replaced(at: Sequence[Index], dim: int, by: IndexLike) -> list[Index]:
    return [index(by) if k == dim else a for k, a in enumerate(at)]


def selection(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[Shape, list[Index]]:
    """Return the shape of ``x[indices]``, and the coordinates in ``x`` of its element.

    The dimensions that the index tensors broadcast to replace the indexed ones, or come first if those are not adjacent.
    """
    indexed = {k: t for k, t in enumerate(indices) if t is not None}
    if any(t.dtype in ("b1", "u8") for t in indexed.values()):
        raise NoRule("a mask as an index")
    for each in indexed.values():
        check_dtype(each, "i32", "i64")
    common = broadcast(*(t.shape for t in indexed.values()))
    rest = [n for k, n in enumerate(x.shape) if k not in indexed]
    begin = min(indexed) if max(indexed) - min(indexed) < len(indexed) else 0
    shape = (*rest[:begin], *common, *rest[begin:])
    axes = formal(shape)
    inner, outer = axes[begin : begin + len(common)], iter(axes[:begin] + axes[begin + len(common) :])
    read_at = {k: Scalar(t.expanded(common).at(inner)) for k, t in indexed.items()}
    return shape, [checked_index(read_at[k], n, True) if k in indexed else next(outer) for k, n in enumerate(x.shape)]


# ---- reads -----------------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("embedding"))
def embedding(b: Builder, weight: Tensor, indices: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    axes = formal(b.result().shape)
    rank = len(indices.shape)
    return b.elementwise(read(weight, [checked_index(Scalar(indices.at(axes[:rank])), weight.shape[0]), *axes[rank:]]))


@TABLE.rule(*overloads("index_select"))
def index_select(b: Builder, x: Tensor, dim: int, indices: Tensor) -> Tensor:
    check_dtype(indices, "i32", "i64")
    source, at = with_dimension(x), with_dimension(indices)
    dim %= len(source.shape)
    axes = formal(replaced(source.shape, dim, at.shape[0]))
    return b.elementwise(
        read(source, replaced(axes, dim, checked_index(Scalar(at.at([axes[dim]])), source.shape[dim])))
    )


@TABLE.rule(*overloads("gather"))
def gather(b: Builder, x: Tensor, dim: int, indices: Tensor, **kwargs: Any) -> Tensor:
    source, at = with_dimension(x), with_dimension(indices)
    if len(source.shape) != len(at.shape):
        raise NoRule("an empty index of another rank")
    dim %= len(source.shape)
    axes = formal(at.shape)
    return b.elementwise(read(source, replaced(axes, dim, checked_index(Scalar(at.at(axes)), source.shape[dim]))))


@TABLE.rule(*overloads("take"))
def take(b: Builder, x: Tensor, indices: Tensor) -> Tensor:
    flat = x.reshaped([product(x.shape)])
    at = checked_index(Scalar(indices.at(formal(indices.shape))), flat.shape[0], from_end=True)
    return b.elementwise(read(flat, [at]))


@TABLE.rule(*overloads("index", "Tensor"), *overloads("_unsafe_index", "Tensor"))
def index_(b: Builder, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    _, coordinates = selection(x, indices)
    return b.elementwise(read(x, coordinates))


_REDUCTIONS = {"sum": "sum", "add": "sum", "prod": "prod", "multiply": "prod", "amax": "max", "amin": "min"}
"""The reduction of a scatter with ``reduce``."""


# ---- the steps -------------------------------------------------------------------------------------------------------


def zeros(b: Builder) -> Tensor:
    """Return zeros of the result's shape."""
    kind = b.result()
    return lazy(expr.const(0, kind.dtype), kind.shape)


def scattered(
    b: Builder,
    x: Tensor,
    axes: Shape,
    target: Sequence[Index],
    body: Scalar,
    op: str | None = None,
    start: Any = None,
    strides: Shape | None = None,
) -> Tensor:
    """Return a copy of ``x`` with ``body``, over ``axes``, stored at ``target``, or combined by ``op`` with the element there.

    With ``start``, elements at ``target`` have that value before anything is combined with them. ``strides`` are those of the
    copy, if not those of the operator's result. Where the graph allows it, ``x`` is written to and not a copy.
    """
    kind = b.result()
    inner = DTYPES[kind.dtype].compute if op is not None else kind.dtype
    if may_write(b, x) and start is None and op in (None, "add") and inner == kind.dtype != "b1":
        return write(b, x, axes, target, f.cast(body, inner).expr, op)
    if op in ("max", "min") and inner in _ORDERED and b.target.tiles is not None:
        return _scattered_extremes(b, x, axes, target, body, op, start)
    strides = strides or (kind.strides if inner == kind.dtype else None)
    buffer = b.new_buffer(inner, kind.shape, strides)
    copy = b.compute(buffer, kind.shape, element(x, kind.shape, inner).expr)
    if start is not None:
        b.compute(buffer, axes, f.number(start, inner).expr, target)
    if op is not None and inner == "b1":
        op = {"add": "or", "mul": "and", "max": "or", "min": "and"}[op]
    b.compute(buffer, axes, f.cast(body, inner).expr, target, update=op)
    return copy if inner == kind.dtype else b.cast_elementwise(element(copy, kind.shape), kind)


_ORDERED = {"f32": "i32", "f64": "i64"}
"""The integers whose order is that of floats: see ``_ordered``."""


def _scattered_extremes(
    b: Builder, x: Tensor, axes: Shape, target: Sequence[Index], body: Scalar, op: str, start: Any
) -> Tensor:
    """Return what ``scattered`` does for floats, by integers: GPUs update the maxima of floats atomically only without NaN."""
    kind = b.result()
    inner = DTYPES[kind.dtype].compute
    buffer = b.new_buffer(_ORDERED[inner], kind.shape)
    copy = b.compute(buffer, kind.shape, _ordered(element(x, kind.shape, inner), op).expr)
    if start is not None:
        b.compute(buffer, axes, _ordered(f.number(start, inner), op).expr, target)
    b.compute(buffer, axes, _ordered(f.cast(body, inner), op).expr, target, update=op)
    found = _reflected(element(copy, kind.shape))
    return b.cast_elementwise(Scalar(expr.make("bitcast", inner, (found.expr,))), kind)


def _ordered(x: Scalar, op: str) -> Scalar:
    """Return an integer for a float, in the same order; NaN is the largest one for maxima, and the smallest for minima."""
    bits = Scalar(expr.make("bitcast", _ORDERED[x.dtype], (x.expr,)))
    return f.where(f.is_nan(x), _extreme(bits, op), _reflected(bits))


def _reflected(bits: Scalar) -> Scalar:
    """Reverse the order of the negative ones, as which the bits of negative floats are read."""
    return f.where(bits < 0, bits ^ _extreme(bits, "max"), bits)


def _extreme(bits: Scalar, op: str) -> Scalar:
    return f.number(neutral("min" if op == "max" else "max", bits.dtype), bits)


def _reduction(reduce: str, include_self: bool, dtype: str) -> tuple[str, Any]:
    """Return the op that combines values, and the value to start with instead of the tensor's own."""
    if reduce not in _REDUCTIONS:
        raise NoRule(f"scattering with {reduce}")
    reduction = _REDUCTIONS[reduce]
    return REDUCTIONS[reduction][0], None if include_self else neutral(reduction, dtype)


# ---- an index for each element ---------------------------------------------------------------------------------------


def _scatter(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Operand, *how: Any) -> Tensor:
    """Return a scatter with an index for each element; ``how`` is as in ``scattered``."""
    at = with_dimension(indices)
    if not x.shape:
        raise NoRule("a scatter into a tensor of no dimensions")
    if any(n == 0 for n in at.shape):  # it may have another rank then
        return b.elementwise(x.at(formal(x.shape)))
    dim %= len(x.shape)
    axes = formal(at.shape)
    target = replaced(axes, dim, checked_index(Scalar(at.at(axes)), x.shape[dim]))
    body = Scalar(with_dimension(source).at(axes)) if isinstance(source, Tensor) else f.number(source, x.dtype)
    return scattered(b, x, at.shape, target, body, *how)


@TABLE.rule(*overloads("scatter", "src", "value", "reduce", "value_reduce"))
def scatter(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Operand, *, reduce: str | None = None) -> Tensor:
    op = None if reduce is None else REDUCTIONS[_REDUCTIONS[reduce]][0]
    return _scatter(b, x, dim, indices, source, op)


@TABLE.rule(*overloads("scatter_add"))
def scatter_add(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor) -> Tensor:
    return _scatter(b, x, dim, indices, source, "add")


@TABLE.rule(*overloads("scatter_reduce", "two"))
def scatter_reduce(
    b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    return _scatter(b, x, dim, indices, source, *_reduction(reduce, include_self, x.dtype))


# ---- an index for each slice -----------------------------------------------------------------------------------------


def _slices(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Operand, *how: Any, **options: Any) -> Tensor:
    """Return a scatter with an index for each slice; ``how`` is as in ``scattered``, ``options`` as in ``checked_index``."""
    at = with_dimension(indices)
    if not x.shape:
        raise NoRule("slices of a tensor of no dimensions")
    dim %= len(x.shape)
    shape = tuple(replaced(x.shape, dim, at.shape[0]))
    axes = formal(shape)
    target = replaced(axes, dim, checked_index(Scalar(at.at([axes[dim]])), x.shape[dim], **options))
    whole = source.reshaped(shape) if isinstance(source, Tensor) and not source.shape and shape == (1,) else source
    body = element(whole, shape) if isinstance(whole, Tensor) else f.number(whole, x.dtype)
    return scattered(b, x, shape, target, body, *how)


@TABLE.rule(*overloads("index_add"))
def index_add(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    if isinstance(alpha, Tensor):
        raise NoRule("a factor that is read from memory")
    if alpha != 1:
        scaled = element(source, source.shape, DTYPES[source.dtype].compute) * alpha
        source = b.temporary(scaled.expr, source.shape)
    check_dtype(indices, "i32", "i64")
    return _slices(b, x, dim, indices, source, "add")


@TABLE.rule(*overloads("index_copy"))
def index_copy(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor) -> Tensor:
    check_dtype(indices, "i64")
    return _slices(b, x, dim, indices, source)


@TABLE.rule(*overloads("index_fill", "int_Scalar", "int_Tensor"))
def index_fill(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Operand) -> Tensor:
    check_dtype(indices, "i64")
    return _slices(b, x, dim, indices, source, from_end=True)


@TABLE.rule(*overloads("index_reduce"))
def index_reduce(
    b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    check_dtype(indices, "i32", "i64")
    return _slices(b, x, dim, indices, source, *_reduction(reduce, include_self, x.dtype))


@TABLE.rule(*overloads("embedding_dense_backward"))
def embedding_dense_backward(
    b: Builder, grad: Tensor, indices: Tensor, count: Any, padding: Any, scale_by_frequency: bool
) -> Tensor:
    if scale_by_frequency:
        raise NoRule("gradients scaled by how often an index occurs")
    axes = formal(grad.shape)
    at = Scalar(indices.at(axes[: len(indices.shape)]))
    target = [checked_index(at, b.result().shape[0]), *axes[len(indices.shape) :]]
    body = f.where(f.equal(at, padding), 0, element(grad, grad.shape))
    return scattered(b, zeros(b), grad.shape, target, body, "add")


# ---- tensors of indices ----------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("index_put"), *overloads("_unsafe_index_put"))
def index_put(
    b: Builder, x: Tensor, indices: Sequence[Tensor | None], source: Tensor, accumulate: bool = False
) -> Tensor:
    masks = [(k, t) for k, t in enumerate(indices) if t is not None and t.dtype == "b1"]
    if masks and sum(t is not None for t in indices) == 1:
        return _masked_put(b, x, *masks[0], source, accumulate)
    shape, target = selection(x, indices)
    return scattered(b, x, shape, target, element(source, shape), "add" if accumulate else None)


def _masked_put(b: Builder, x: Tensor, dim: int, mask: Tensor, source: Tensor, accumulate: bool) -> Tensor:
    """Return ``x`` with ``source`` where a mask is set; all elements of the mask have the same values of ``source``."""
    axes = formal(x.shape)
    end = dim + len(mask.shape)
    if len(source.shape) > len(x.shape) - end and any(n != 1 for n in source.shape):
        raise NoRule("a mask as an index, with a value for each of its elements")
    rest = axes[end:] if len(source.shape) <= len(x.shape) - end else []
    inner = DTYPES[x.dtype].compute if accumulate else x.dtype
    inserted = source.expanded(x.shape[end:]).at(rest) if rest else source.at([ZERO] * len(source.shape))
    new, old = f.cast(Scalar(inserted), inner), element(x, x.shape, inner)
    if accumulate:
        new = old | new if inner == "b1" else old + new
    return b.cast_elementwise(f.where(Scalar(mask.at(axes[dim:end])), new, old))


# ---- counts ----------------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("histc"))
def histc(b: Builder, x: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    """Count the elements in bins, with ATen's formula of a bin; the last one has the upper end of the range too."""
    if DTYPES[x.dtype].compute != x.dtype:
        raise NoRule("narrow numbers, whose bins are computed in their type")
    if not math.isfinite(min) or not math.isfinite(max) or not min < max or not bins > 0:
        raise NoRule("a range that the data decide, or none")
    kind = b.result()
    inner = "i64" if is_int(x.dtype) else x.dtype
    if inner == "i64" and (min != int(min) or max != int(max)):
        raise NoRule("a range of fractions for integers")
    at, low, high = element(x, x.shape, inner), f.number(min, inner), f.number(max, inner)
    inside = (at >= low) & (at <= high)
    scaled, width = (at - low) * bins, high - low
    found = f.apply("floordiv", scaled, width) if inner == "i64" else f.cast(scaled / width, "i64")
    target = f.minimum(f.where(inside, found, 0), bins - 1)
    one = f.where(inside, f.number(1, kind.dtype), 0)
    return scattered(b, zeros(b), x.shape, [checked_index(target, kind.shape[0])], one, "add")
