"""Operators with complex operands or results.

The rules of views are those of real tensors, for they are maps of indices only. Operators that move or add up elements apply the
real operator to each part. The others are formulas of ``complex_arithmetic``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from opkit.compiler.ir.dtypes import PARTS, is_complex
from opkit.compiler.ir.graph import TensorType
from opkit.compiler.ir.index import Index, index
from opkit.compiler.ir.program import Compute
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element, paired
from opkit.compiler.lower.registry import NoRule, Rule, Table, overloads
from opkit.compiler.lower.rules import complex_arithmetic as c
from opkit.compiler.lower.rules import creation, indexing, joining, reductions, views
from opkit.compiler.lower.rules.complex_arithmetic import Complex
from opkit.compiler.lower.rules.pointwise import TENSOR_OR_NUMBER, promoted
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Stored, Tensor, alternating, complex_of, lazy, memories

TABLE = Table({name: rule for name, rule in views.TABLE.items() if name not in overloads("as_strided")})
Operand = Tensor | Index | complex | float | int | bool
Formula = Callable[..., Complex]
Measure = Callable[..., Scalar]


# ---- elements --------------------------------------------------------------------------------------------------------


def part_type(dtype: str) -> str:
    """Return the type of the parts of a complex type.

    Raises:
        NoRule: it is a type that is left to torch.
    """
    if dtype not in PARTS:
        raise NoRule(f"numbers of {dtype}")
    return PARTS[dtype]


def operand(x: Operand, kind: TensorType, part: str) -> Complex:
    """Return a tensor's element or a number, with parts of a type; the imaginary part of a real one is 0."""
    if not isinstance(x, Tensor):
        return c.number(x, part)
    if not is_complex(x.dtype):
        return Complex(element(x, kind.shape, part), f.number(0, part))
    return Complex(*(element(each, kind.shape, part) for each in x.parts))


def stored(b: Builder, value: Complex, kind: TensorType) -> Tensor:
    """Return the complex tensor with ``value`` (over the formal axes of the result) as element."""
    return b.complex_elements([value.re.expr, value.im.expr], kind)


def computed(b: Builder, formula: Formula, *operands: Operand) -> Tensor:
    """Return the complex tensor of ``formula`` of the operands' elements."""
    kind = b.result()
    part = part_type(kind.dtype)
    return stored(b, formula(*(operand(x, kind, part) for x in operands)), kind)


def measured(b: Builder, formula: Measure, *operands: Operand) -> Tensor:
    """Return the real tensor of ``formula`` of the operands' elements, in their common type."""
    kind = b.result()
    part = part_type(promoted(operands))
    body = formula(*(operand(x, kind, part) for x in operands))
    return b.cast_elementwise(body, kind)


def _elementwise(formula: Formula) -> Rule:
    return lambda b, *operands: computed(b, formula, *operands)


def _measure(formula: Measure) -> Rule:
    return lambda b, *operands: measured(b, formula, *operands)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("add", *TENSOR_OR_NUMBER))
def add(b: Builder, x: Operand, y: Operand, alpha: Any = 1) -> Tensor:
    return computed(b, lambda x, y: x + y if alpha == 1 else x + y * alpha, x, y)


@TABLE.rule(*overloads("sub", *TENSOR_OR_NUMBER))
def sub(b: Builder, x: Operand, y: Operand, alpha: Any = 1) -> Tensor:
    return computed(b, lambda x, y: x - y if alpha == 1 else x - y * alpha, x, y)


@TABLE.rule(*overloads("rsub", *TENSOR_OR_NUMBER))
def rsub(b: Builder, x: Operand, y: Operand, alpha: Any = 1) -> Tensor:
    return sub(b, y, x, alpha)


@TABLE.rule(*overloads("div", *TENSOR_OR_NUMBER), *overloads("true_divide", *TENSOR_OR_NUMBER))
def div(b: Builder, x: Operand, y: Operand) -> Tensor:
    return computed(b, lambda x, y: x / y, x, y)


@TABLE.rule(*overloads("addcmul"))
def addcmul(b: Builder, x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return computed(b, lambda x, y, z: x + y * z if value == 1 else x + y * z * value, x, y, z)


@TABLE.rule(*overloads("addcdiv"))
def addcdiv(b: Builder, x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return computed(b, lambda x, y, z: x + y / z if value == 1 else x + y * value / z, x, y, z)


@TABLE.rule(*overloads("lerp", *TENSOR_OR_NUMBER))
def lerp(b: Builder, start: Tensor, end: Tensor, weight: Operand) -> Tensor:
    def formula(a: Complex, z: Complex, w: Complex) -> Complex:
        return c.where(c.absolute(w) < 0.5, a + w * (z - a), z - (z - a) * (1 - w))

    return computed(b, formula, start, end, weight)


@TABLE.rule(*overloads("pow", "Tensor_Scalar"))
def power(b: Builder, x: Tensor, exponent: Any) -> Tensor:
    if not isinstance(exponent, int | float) or exponent % 0.5 or abs(exponent) > _MAX_EXPONENT:
        raise NoRule("a power that is no small multiple of a half")
    return computed(b, lambda x: c.power(x, exponent), x)


_MAX_EXPONENT = 16  # beyond, a logarithm is faster

_FORMULAS: dict[str, Formula] = {
    **{name: getattr(c, name) for name in ("exp", "log", "reciprocal", "sigmoid", "square")},
    **{name: getattr(c, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "neg": lambda x: -x,
    "positive": lambda x: x,
    "sqrt": c.square_root,
    "rsqrt": lambda x: c.power(x, -0.5),
    "sgn": c.sign,
    "log2": lambda x: c.scaled(c.log(x), 1 / math.log(2)),
    "log10": lambda x: c.scaled(c.log(x), 1 / math.log(10)),
    "_conj": c.conjugate,
    "conj": c.conjugate,
    "conj_physical": c.conjugate,
    "_conj_physical": c.conjugate,
    "_neg_view": lambda x: -x,
}

_MEASURES: dict[str, Measure] = {
    "abs": c.absolute,
    "angle": c.angle,
    "isnan": c.is_nan,
    "isinf": c.is_infinite,
    "isfinite": c.is_finite,
    "logical_not": lambda x: ~c.truth(x),
    "logical_and": lambda x, y: c.truth(x) & c.truth(y),
    "logical_or": lambda x, y: c.truth(x) | c.truth(y),
    "logical_xor": lambda x, y: c.truth(x) ^ c.truth(y),
}

for _name, _formula in _FORMULAS.items():
    TABLE.rule(*overloads(_name))(_elementwise(_formula))
for _name, _measured in _MEASURES.items():
    TABLE.rule(*overloads(_name))(_measure(_measured))
TABLE.rule(*overloads("tanh_backward"))(_elementwise(lambda grad, y: grad * c.conjugate(1 - y * y)))
TABLE.rule(*overloads("sigmoid_backward"))(_elementwise(lambda grad, y: grad * c.conjugate((1 - y) * y)))
TABLE.rule(*overloads("mul", *TENSOR_OR_NUMBER))(_elementwise(lambda x, y: x * y))
TABLE.rule(*overloads("eq", *TENSOR_OR_NUMBER))(_measure(c.equal))
TABLE.rule(*overloads("ne", *TENSOR_OR_NUMBER))(_measure(c.unequal))


# ---- choices and conversions -----------------------------------------------------------------------------------------


@TABLE.rule(*overloads("where", "self", "ScalarSelf", "ScalarOther", "Scalar"))
def where(b: Builder, condition: Tensor, yes: Operand, no: Operand) -> Tensor:
    chosen = f.truth(element(condition, b.result().shape))
    return computed(b, lambda yes, no: c.where(chosen, yes, no), yes, no)


@TABLE.rule(*overloads("masked_fill", *TENSOR_OR_NUMBER))
def masked_fill(b: Builder, x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    return where(b, mask, value, x)


@TABLE.rule("prims.convert_element_type.default", *overloads("_to_copy"), *overloads("to", "dtype"))
def convert(b: Builder, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """Convert each part to a complex type, the real part to a real type, and whether it is not 0 to bool."""
    kind = b.result()
    if is_complex(kind.dtype):
        return computed(b, lambda x: x, x)
    body = operand(x, kind, part_type(x.dtype))
    converted = c.truth(body) if kind.dtype == "b1" else f.cast(body.re, kind.dtype, asked=True)
    return b.elementwise(converted.expr, kind)


# ---- from real tensors and back --------------------------------------------------------------------------------------


@TABLE.rule(*overloads("complex"))
def complex_(b: Builder, re: Tensor, im: Tensor) -> Tensor:
    kind = b.result()
    part = part_type(kind.dtype)
    return stored(b, Complex(element(re, kind.shape, part), element(im, kind.shape, part)), kind)


@TABLE.rule(*overloads("polar"))
def polar(b: Builder, size: Tensor, angle: Tensor) -> Tensor:
    kind = b.result()
    part = part_type(kind.dtype)
    return stored(b, c.polar(element(size, kind.shape, part), element(angle, kind.shape, part)), kind)


@TABLE.rule(*overloads("real"))
def real(b: Builder, x: Tensor) -> Tensor:
    return x.parts[0]


@TABLE.rule(*overloads("imag"))
def imag(b: Builder, x: Tensor) -> Tensor:
    return x.parts[1]


@TABLE.rule(*overloads("view_as_complex"))
def view_as_complex(b: Builder, x: Tensor) -> Tensor:
    part_type(b.result().dtype)
    first, second = views.unbound(x, -1, 2)
    return complex_of(first, second)


@TABLE.rule(*overloads("view_as_real"))
def view_as_real(b: Builder, x: Tensor) -> Tensor:
    first, second = (each.reshaped([*x.shape, index(1)]) for each in x.parts)
    return alternating(first, second, (*x.shape, index(2)))


# ---- real operators on each part ----------------------------------------------------------------------------------------


def by_parts(rule: Rule, values: int, b: Builder, *args: Any, **kwargs: Any) -> Tensor:
    """Apply the rule of a real operator to both parts; its first ``values`` arguments are complex tensors."""
    node, kind = b.node, b.result()
    parts: list[Tensor] = []
    for k, name in enumerate(("re", "im")):
        real = dataclasses.replace(kind, dtype=part_type(kind.dtype))
        b.node = dataclasses.replace(node, name=f"{node.name}.{name}", result=real)
        own = [_part(each, k, real.dtype) if n < values else each for n, each in enumerate(args)]
        parts.append(rule(b, *own, **kwargs))
    b.node = node
    return paired(b, *parts)


def _part(x: Any, k: int, dtype: str) -> Any:
    """Return a part of a tensor, or of each in a list."""
    if not isinstance(x, Tensor):
        return [_part(each, k, dtype) for each in x]
    if is_complex(x.dtype):
        return x.parts[k]
    return lazy(f.number(0, dtype).expr, x.shape) if k else x


for _table, _values, _names in (
    (reductions.TABLE, 1, [*overloads("sum", "default", "dim_IntList"), *overloads("cumsum")]),
    (joining.TABLE, 1, [*overloads("cat"), *overloads("concat"), *overloads("stack"), *overloads("slice_backward")]),
    (joining.TABLE, 1, [*overloads("select_backward"), *overloads("diagonal_backward")]),
    (joining.TABLE, 2, [*overloads("slice_scatter"), *overloads("select_scatter"), *overloads("diagonal_scatter")]),
    (
        indexing.TABLE,
        1,
        [*overloads("embedding"), *overloads("index_select"), *overloads("gather"), *overloads("take")],
    ),
    (indexing.TABLE, 1, [*overloads("index", "Tensor"), *overloads("_unsafe_index", "Tensor")]),
    (creation.TABLE, 1, [*overloads("clone"), *overloads("contiguous"), *overloads("tril"), *overloads("triu")]),
    (creation.TABLE, 2, [*overloads("copy")]),
):
    TABLE.update({name: functools.partial(by_parts, _table[name], _values) for name in _names})


# ---- reductions ------------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("mean", "default", "dim"))
def mean(b: Builder, x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: str | None = None) -> Tensor:
    kind = b.result()
    part = part_type(kind.dtype)
    reduced = reductions.dims_of(x, dims)
    sums = [b.reduce("sum", element(_part(x, k, part), x.shape, part), x.shape, reduced, part, keepdim) for k in (0, 1)]
    total = Complex(*(element(each, kind.shape) for each in sums))
    return stored(b, total / reductions.count(x.shape, reduced), kind)


def _of_truths(rule: Rule, b: Builder, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """Apply the rule of a real operator to whether elements are not 0."""
    truth = c.truth(Complex(*(element(each, x.shape) for each in x.parts)))
    return rule(b, b.temporary(truth.expr, x.shape), *rest, **kwargs)


TABLE.rule(*overloads("any", "default", "dim", "dims"))(functools.partial(_of_truths, reductions.any_))
TABLE.rule(*overloads("all", "default", "dim", "dims"))(functools.partial(_of_truths, reductions.all_))


@TABLE.rule(*overloads("linalg_vector_norm"))
def vector_norm(b: Builder, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """Return the norm of the absolute values."""
    kind = dataclasses.replace(b.result(), shape=x.shape)
    size = c.absolute(operand(x, kind, part_type(x.dtype)))
    return reductions.vector_norm(b, b.temporary(size.expr, x.shape), *rest, **kwargs)


# ---- constants and writes --------------------------------------------------------------------------------------------


def _filled(b: Builder, value: Operand) -> Tensor:
    if not is_complex(b.result().dtype):  # like a complex tensor, but for the dtype
        return creation.filled(b, value)
    return computed(b, lambda x: x, value)


@TABLE.rule(*overloads("full"), *overloads("full_like"), *overloads("new_full"))
def full(b: Builder, like: Any, *rest: Any, **kwargs: Any) -> Tensor:
    return _filled(b, rest[-1] if rest else kwargs["fill_value"])


@TABLE.rule(*overloads("fill", "Scalar", "Tensor"))
def fill(b: Builder, x: Tensor, value: Operand) -> Tensor:
    return _filled(b, value)


@TABLE.rule(*overloads("scalar_tensor"))
def scalar_tensor(b: Builder, value: Operand, **kwargs: Any) -> Tensor:
    return _filled(b, value)


def _constant(value: float) -> Rule:
    return lambda b, *rest, **kwargs: _filled(b, value)


for _name in ("ones", "ones_like", "new_ones"):
    TABLE.rule(*overloads(_name))(_constant(1))
for _name in ("zeros", "zeros_like", "new_zeros", "empty_like", "new_empty", "zero", "empty_strided"):
    TABLE.rule(*overloads(_name))(_constant(0))
for _name in ("new_empty_strided", "_efficientzerotensor", "empty_permuted"):
    TABLE.rule(*overloads(_name))(_constant(0))
TABLE.rule(*overloads("empty", "memory_format"))(_constant(0))


@TABLE.rule(*overloads("constant_pad_nd"))
def constant_pad_nd(b: Builder, x: Tensor, pad: Any, value: Any = 0) -> Tensor:
    if value != 0:
        raise NoRule("padding with a number that is not 0")
    return by_parts(joining.constant_pad_nd, 1, b, x, pad)


@TABLE.rule(*overloads("copy_"))
def copy_(b: Builder, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Write to both parts of ``x``; a source in the same memory at other positions is read completely before."""
    if not is_complex(x.dtype):
        return creation.copy_(b, x, convert(b, source))
    for part, each in zip(x.parts, _read_first(b, x, source), strict=True):
        assert isinstance(part.source, Stored)
        at, name = part.source.coordinates, part.source.buffer.name
        b.steps.append(Compute(name, x.shape, at, element(each, x.shape, part.dtype).expr, origin=b.origin))
    return x


def _read_first(b: Builder, x: Tensor, source: Tensor) -> Sequence[Tensor]:
    """Return the parts of ``source``, copied if they lie in the memory of ``x`` at other positions."""
    part = part_type(x.dtype)
    memory = next(each.source.buffer.memory for each in x.leaves if isinstance(each.source, Stored))
    parts = [_part(source, k, part) for k in (0, 1)]
    overlap = any(memory in memories(each) and each.source != p.source for each, p in zip(parts, x.parts, strict=True))
    return [b.materialised(each) for each in parts] if overlap else parts
