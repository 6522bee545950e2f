"""New tensors, copies, random numbers, and writes to inputs. Constants and formulas of positions are never stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import is_float
from opkit.compiler.ir.index import Index, contiguous, flat
from opkit.compiler.ir.program import Compute, Extern
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.rules.pointwise import operand
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Stored, Tensor, formal, lazy, memories, whole

TABLE = Table()


# ---- constants -------------------------------------------------------------------------------------------------------


def filled(b: Builder, value: Any) -> Tensor:
    """Return the node's result with one value everywhere."""
    return filled_like(b, value, 0)


def filled_like(b: Builder, value: Any, number: int) -> Tensor:
    """Return one of the node's results with one value everywhere."""
    kind = b.result(number)
    return b.elementwise(operand(value, kind, kind.dtype).expr, kind)


@TABLE.rule(*overloads("full"), *overloads("full_like"), *overloads("new_full"))
def full(b: Builder, like: Any, *rest: Any, **kwargs: Any) -> Tensor:
    return filled(b, rest[-1] if rest else kwargs["fill_value"])


@TABLE.rule(*overloads("fill", "Scalar", "Tensor"))
def fill(b: Builder, x: Tensor, value: Any) -> Tensor:
    return filled(b, value)


@TABLE.rule(*overloads("scalar_tensor"))
def scalar_tensor(b: Builder, value: Any, **kwargs: Any) -> Tensor:
    return filled(b, value)


@TABLE.rule(
    *overloads("zeros"), *overloads("zeros_like"), *overloads("new_zeros"), *overloads("empty", "memory_format")
)
@TABLE.rule(*overloads("empty_like"), *overloads("new_empty"), *overloads("zero"), *overloads("empty_strided"))
@TABLE.rule(*overloads("new_empty_strided"), *overloads("_efficientzerotensor"), *overloads("empty_permuted"))
def zeros(b: Builder, *rest: Any, **kwargs: Any) -> Tensor:
    return filled(b, 0)


@TABLE.rule(*overloads("ones"), *overloads("ones_like"), *overloads("new_ones"))
def ones(b: Builder, *rest: Any, **kwargs: Any) -> Tensor:
    return filled(b, 1)


# ---- positions -------------------------------------------------------------------------------------------------------


def _along(b: Builder, start: Any, step: Any) -> Tensor:
    """Return start + step * k; floats are computed in double precision, as in ATen."""
    kind = b.result()
    inner = "f64" if is_float(kind.dtype) else "i64"
    at = Scalar(expr.position(formal(kind.shape)[0], inner))
    return b.cast_elementwise(f.number(start, inner) + at * f.number(step, inner), kind)


@TABLE.rule(*overloads("arange"))
def arange(b: Builder, end: Any, **kwargs: Any) -> Tensor:
    return _along(b, 0, 1)


@TABLE.rule(*overloads("arange", "start", "start_step"))
def arange_from(b: Builder, start: Any, end: Any, step: Any = 1, **kwargs: Any) -> Tensor:
    return _along(b, start, step)


@TABLE.rule("prims.iota.default")
def iota(b: Builder, length: Any, *, start: Any, step: Any, **kwargs: Any) -> Tensor:
    return _along(b, start, step)


@TABLE.rule(*overloads("eye", "default", "m"))
def eye(b: Builder, *rest: Any, **kwargs: Any) -> Tensor:
    kind = b.result()
    row, column = (Scalar(expr.position(a)) for a in formal(kind.shape))
    return b.cast_elementwise(f.equal(row, column), kind)


@TABLE.rule(*overloads("tril"))
def tril(b: Builder, x: Tensor, diagonal: Any = 0) -> Tensor:
    return _triangle(b, x, lambda number: number <= f.number(diagonal, "i64"))


@TABLE.rule(*overloads("triu"))
def triu(b: Builder, x: Tensor, diagonal: Any = 0) -> Tensor:
    return _triangle(b, x, lambda number: number >= f.number(diagonal, "i64"))


def _triangle(b: Builder, x: Tensor, inside: Callable[[Scalar], Scalar]) -> Tensor:
    """Return a tensor with zeros where ``inside`` of the number of the diagonal is false."""
    axes = formal(x.shape)
    mask = inside(Scalar(expr.position(axes[-1] - axes[-2])))
    return b.elementwise(f.where(mask, element(x, x.shape), 0).expr)


# ---- copies ----------------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("clone"), *overloads("contiguous"), *overloads("lift_fresh_copy"))
def clone(b: Builder, x: Tensor, **kwargs: Any) -> Tensor:
    return b.elementwise(x.at(formal(x.shape)))


@TABLE.rule(*overloads("copy"))
def copy(b: Builder, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return b.elementwise(element(source, x.shape, x.dtype).expr)


@TABLE.rule(*overloads("copy_"))
def copy_(b: Builder, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Write to the memory of ``x``; a source in the same memory at other positions is read completely before."""
    if not isinstance(x.source, Stored):
        raise NoRule("a copy to a tensor that is not in memory")
    if source == x:  # it was written to in place
        return x
    if x.source.buffer.memory in memories(source) and source.source != x.source:
        source = b.materialised(source)
    body = element(source, x.shape, x.dtype).expr
    b.steps.append(Compute(x.source.buffer.name, x.shape, x.source.coordinates, body, origin=b.origin))
    return x


# ---- random numbers ----------------------------------------------------------------------------------------------------------


def seed(b: Builder) -> Scalar:
    """Return a number that the runtime draws from torch's generator at each call, one for each operator."""
    buffer = b.new_buffer("i64", ())
    b.steps.append(Extern("opkit.seed", (), {}, (buffer.name,), origin=b.origin))
    return Scalar(whole(buffer).at(()))


def uniform(b: Builder, shape: Sequence[Index], dtype: str = "f32") -> Scalar:
    """Return a number in [0, 1) for each element, which its row-major position and a new seed decide."""
    count = flat(formal(shape), contiguous(shape))
    return Scalar(expr.random(seed(b).expr, count, dtype))


@TABLE.rule(*overloads("native_dropout"))
def native_dropout(b: Builder, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    kind, mask_kind = b.result(0), b.result(1)
    if train is False:
        mask = lazy(expr.const(True, "b1"), x.shape)
        return b.elementwise(x.at(formal(x.shape)), kind), mask
    mask = b.elementwise((uniform(b, x.shape) < f.number(1 - p, "f32")).expr, mask_kind)
    return dropped(b, x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask


@TABLE.rule(*overloads("native_dropout_backward"))
def dropped(b: Builder, x: Tensor, mask: Tensor, scale: float) -> Tensor:
    kind = b.result(0)
    inner = "f64" if kind.dtype == "f64" else "f32"
    scaled = element(x, kind.shape, inner) * element(mask, kind.shape, inner) * scale
    return b.cast_elementwise(scaled, kind)
