"""Writes to places that other tensors hold: a copy of what is written to, then a compute whose target is read.

Where several elements meet in one place they are combined in row-major order; of a plain store, the last stays. Sums of
narrow floats are kept in float32 until all are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.index import ZERO, Index
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.context import Builder, element
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.rules.indexing import place, replaced, selection, with_dimension
from opkit.compiler.lower.rules.pointwise import Operand
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Shape, Tensor, formal, lazy

TABLE = Table()

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
    buffer = b.like() if inner == kind.dtype else b.made(inner, kind.shape)
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
