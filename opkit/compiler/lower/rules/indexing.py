"""Elements at places that other tensors hold: what is read there is an element like any other, in one compute.

Every such place is checked: an index outside its dimension stops the program, as eager raises. Whether a negative one
counts from the end is the operator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES, is_float, is_int
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import ZERO, Index, IndexLike, Value, index, product, value
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.rules.pointwise import Operand
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Shape, Tensor, broadcast, formal, lazy

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


_OPS = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min"}


# ---- the steps -------------------------------------------------------------------------------------------------------


def zeros(b: Builder) -> Tensor:
    """Zeros of the result's shape."""
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
) -> Tensor:
    """Return a copy of ``x`` with ``body``, over ``axes``, stored at ``target`` or combined with what is there by ``op``.

    With ``start``, what is combined at a place begins with that number, not with what ``x`` has there.
    """
    kind = b.result()
    inner = DTYPES[kind.dtype].compute if op is not None else kind.dtype
    buffer = b.result_buffer() if inner == kind.dtype else b.new_buffer(inner, kind.shape)
    found = b.compute(buffer, kind.shape, element(x, kind.shape, inner).expr)
    if start is not None:
        b.compute(buffer, axes, f.number(start, inner).expr, target)
    b.compute(buffer, axes, f.cast(body, inner).expr, target, update=_combining(op, inner))
    return found if inner == kind.dtype else b.elementwise(element(found, kind.shape, kind.dtype).expr, kind)


def _combining(op: str | None, dtype: str) -> str | None:
    logic = {"add": "or", "mul": "and", "max": "or", "min": "and"}
    return logic[op] if op is not None and dtype == "b1" else op


def neutral(op: str, dtype: str) -> int | float:
    """Return what an element combined with it leaves as it is."""
    if op in ("add", "mul"):
        return int(op == "mul")
    if is_float(dtype):
        return float("-inf") if op == "max" else float("inf")
    bits = 8 * DTYPES[dtype].bytes - DTYPES[dtype].signed
    least = -(2**bits) if DTYPES[dtype].signed else 0
    if dtype == "b1":
        return int(op == "min")
    return least if op == "max" else 2**bits - 1


def _start(reduce: str, include_self: bool, dtype: str) -> Any:
    if reduce not in _OPS:
        raise NoRule(f"scattering with {reduce}")
    return None if include_self else neutral(_OPS[reduce], dtype)


# ---- an index for each element ---------------------------------------------------------------------------------------


def _scatter(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Operand, *how: Any) -> Tensor:
    """``how`` is as in ``scattered``."""
    at = with_dimension(indices)
    if not x.shape:
        raise NoRule("a scatter into a tensor of no dimensions")
    if any(n == 0 for n in at.shape):  # it may have another rank then
        return b.elementwise(x.at(formal(x.shape)))
    dim %= len(x.shape)
    axes = formal(at.shape)
    target = replaced(axes, dim, place(Scalar(at.at(axes)), x.shape[dim]))
    found = Scalar(with_dimension(source).at(axes)) if isinstance(source, Tensor) else f.number(source, x.dtype)
    return scattered(b, x, at.shape, target, found, *how)


@TABLE.rule(*overloads("scatter", "src", "value", "reduce", "value_reduce"))
def scatter(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Operand, *, reduce: str | None = None) -> Tensor:
    return _scatter(b, x, dim, indices, source, None if reduce is None else _OPS[reduce])


@TABLE.rule(*overloads("scatter_add"))
def scatter_add(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor) -> Tensor:
    return _scatter(b, x, dim, indices, source, "add")


@TABLE.rule(*overloads("scatter_reduce", "two"))
def scatter_reduce(
    b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    start = _start(reduce, include_self, x.dtype)
    return _scatter(b, x, dim, indices, source, _OPS[reduce], start)


# ---- an index for each slice -----------------------------------------------------------------------------------------


def _slices(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Operand, *how: Any, **placement: Any) -> Tensor:
    """``how`` is as in ``scattered``, ``placement`` as in ``place``."""
    at = with_dimension(indices)
    if not x.shape:
        raise NoRule("slices of a tensor of no dimensions")
    dim %= len(x.shape)
    shape = tuple(replaced(x.shape, dim, at.shape[0]))
    axes = formal(shape)
    target = replaced(axes, dim, place(Scalar(at.at([axes[dim]])), x.shape[dim], **placement))
    whole = source.reshaped(shape) if isinstance(source, Tensor) and not source.shape and shape == (1,) else source
    body = element(whole, shape) if isinstance(whole, Tensor) else f.number(whole, x.dtype)
    return scattered(b, x, shape, target, body, *how)


@TABLE.rule(*overloads("index_add"))
def index_add(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    if isinstance(alpha, Tensor):
        raise NoRule("a factor that is read from memory")
    scaled = source if alpha == 1 else b.temporary(_times(source, alpha).expr, source.shape)
    return _slices(b, x, dim, indices, scaled, "add")


def _times(x: Tensor, factor: Any) -> Scalar:
    return element(x, x.shape, DTYPES[x.dtype].compute) * factor


@TABLE.rule(*overloads("index_copy"))
def index_copy(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor) -> Tensor:
    return _slices(b, x, dim, indices, source)


@TABLE.rule(*overloads("index_fill", "int_Scalar", "int_Tensor"))
def index_fill(b: Builder, x: Tensor, dim: int, indices: Tensor, source: Operand) -> Tensor:
    return _slices(b, x, dim, indices, source, from_end=True)


@TABLE.rule(*overloads("index_reduce"))
def index_reduce(
    b: Builder, x: Tensor, dim: int, indices: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    start = _start(reduce, include_self, x.dtype)
    return _slices(b, x, dim, indices, source, _OPS[reduce], start)


@TABLE.rule(*overloads("embedding_dense_backward"))
def embedding_dense_backward(
    b: Builder, grad: Tensor, indices: Tensor, count: Any, padding: Any, scale_by_frequency: bool
) -> Tensor:
    if scale_by_frequency:
        raise NoRule("gradients scaled by how often an index occurs")
    axes = formal(grad.shape)
    at = Scalar(indices.at(axes[: len(indices.shape)]))
    target = [place(at, b.result().shape[0]), *axes[len(indices.shape) :]]
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
    """Return where a mask is set, values that do not depend on how many elements it has set before."""
    axes = formal(x.shape)
    end = dim + len(mask.shape)
    if len(source.shape) > len(x.shape) - end and any(n != 1 for n in source.shape):
        raise NoRule("a mask as an index, with a value for each of its elements")
    rest = axes[end:] if len(source.shape) <= len(x.shape) - end else []
    inner = DTYPES[x.dtype].compute if accumulate else x.dtype
    there = source.expanded(x.shape[end:]).at(rest) if rest else source.at([ZERO] * len(source.shape))
    new, old = f.cast(Scalar(there), inner), element(x, x.shape, inner)
    chosen = f.where(Scalar(mask.at(axes[dim:end])), _sum(old, new) if accumulate else new, old)
    return b.elementwise(f.cast(chosen, x.dtype).expr)


def _sum(x: Scalar, y: Scalar) -> Scalar:
    return x | y if x.dtype == "b1" else x + y
