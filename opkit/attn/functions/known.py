"""Find what the opcodes of masks and biases can express in users' functions; the rest stays a function.

``i >= j`` is a band, ``ids[b, i] == ids[b, j]`` are segments, ``j < lengths[b]`` is a length, ``score + table[h, i, j]`` is a
tensor that is added: every kernel has these already, with lists of live tiles. Of ``and`` and ``or`` each operand is looked at
by itself, and the operands that are none of these become one function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.functions.affine import AXES, Affine, affine, band_ends, difference
from opkit.attn.functions.expression import coordinates, loads_of
from opkit.attn.functions.trace import Traced
from opkit.attn.masks import program
from opkit.attn.masks.program_builder import CallSizes, ProgramBuilder, number_in
from opkit.attn.tensor_cache import get_or_compute
from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import is_float, is_int
from opkit.compiler.ir.expr import Expr
from opkit.errors import ShapeError
from opkit.op import torch_private as private

_NAMES = {"b": "batches", "h": "heads", "i": "queries", "j": "keys"}


class LoweredScore(NamedTuple):
    """A score function in parts: the soft cap, what it hides as a mask's expression, and the program of biases."""

    softcap: float | None
    hidden: Expr | None
    program: list[int]


def lower_mask(traced: Traced, root: Expr, builder: ProgramBuilder, name: str) -> None:
    """Append the program of a mask's expression; ``name`` is the function's, for errors."""
    _MaskLowering(traced, builder, name).emit(root)


def lower_score(traced: Traced, sizes: CallSizes, tensors: list[Tensor], capped: bool, name: str) -> LoweredScore:
    """Return the parts of a score function, whose tensors are appended to ``tensors``.

    Args:
        traced: the function.
        sizes: of the call.
        tensors: those of the bias's program.
        capped: whether a soft cap or another bias comes before it, so that a soft cap of its own is no soft cap of the call.
        name: the function's, for errors.
    """
    root, hidden = without_hidden(traced.root)
    scores = [(term, negative) for term, negative in _terms(root) if _has_score(term)]
    (score, negated), *others = scores or [(root, True)]
    cap = None if capped else _softcap(score, traced)
    if negated or others or (score.op != "var" and cap is None):
        check_sizes(traced, root, sizes, name)
        return LoweredScore(None, hidden, [program.BIAS_FUNCTION, *traced.function(root, tensors).words()])
    words: list[int] = []
    rest: Expr = expr.var("score", root.dtype)
    for term, negative in _terms(root):
        table = None if negative else _table(term, traced, sizes, name)
        if table is not None:
            words += [program.BIAS_DENSE, number_in(tensors, table)]
        elif not _has_score(term):
            rest = expr.op("sub" if negative else "add", rest, term)
    if rest.op != "var":
        check_sizes(traced, rest, sizes, name)
        words += [program.BIAS_FUNCTION, *traced.function(rest, tensors).words()]
    return LoweredScore(cap, hidden, words)


def without_bands(traced: Traced, lower: int, upper: int) -> tuple[int, int, Expr | None]:
    """Return a band of ``j - i``, narrowed by what parts of a conjunction say, and the others' conjunction, None without any."""
    others = list[Expr]()
    for part in _operands(traced.root, "and"):
        compares = part.op in ("lt", "le", "eq") and is_int(part.args[0].dtype)
        ends = band_ends(part) if compares else None
        if ends is None:
            others.append(part)
        else:
            least, most = ends
            lower = lower if least is None else _nearer(torch.sym_max, lower, _value(traced, least))
            upper = upper if most is None else _nearer(torch.sym_min, upper, _value(traced, most))
    return lower, upper, functools.reduce(lambda a, b: expr.op("and", a, b), others) if others else None


def _nearer(choice: Callable[..., Any], end: int, other: int) -> int:
    """Return the nearer of two ends of a band; no symbolic one is compared."""
    return other if type(end) is int and abs(end) == program.UNLIMITED else choice(end, other)


def _value(traced: Traced, end: Affine) -> int:
    return sum((factor * (traced.integers[int(name[1:])] if name else 1) for name, factor in end.items()), 0)


# ---- masks -----------------------------------------------------------------------------------------------------------


_Leaf = tuple[Any, ...]  # an opcode, and its tensors and numbers


class _MaskLowering:
    """Appends the program of a function to a builder."""

    def __init__(self, traced: Traced, builder: ProgramBuilder, name: str) -> None:
        self.traced = traced
        self.builder = builder
        self.sizes = builder.sizes
        self.name = name
        self.leaves: dict[Expr, _Leaf | None] = {}

    def emit(self, root: Expr) -> None:
        leaf = self._leaf(root)
        if leaf is not None:
            self._opcode(*leaf)
            if root.op == "ne":
                self.builder.emit(program.NOT)
        elif root.op == "not":
            self.emit(root.args[0])
            self.builder.emit(program.NOT)
        elif root.op in ("and", "or"):
            self._combination(root)
        else:
            self._function(root)

    def _combination(self, root: Expr) -> None:
        known: list[Expr] = []
        others: list[Expr] = []
        for part in _operands(root, root.op):
            (known if self._contains_leaf(part) else others).append(part)
        for number, part in enumerate(known):
            self.emit(part)
            if number:
                self.builder.emit(_COMBINE[root.op])
        if others:
            self._function(functools.reduce(lambda a, b: expr.op(root.op, a, b), others))
            if known:
                self.builder.emit(_COMBINE[root.op])

    def _contains_leaf(self, node: Expr) -> bool:
        if node.op in ("and", "or", "not"):
            return any(map(self._contains_leaf, node.args))
        return self._leaf(node) is not None

    def _function(self, root: Expr) -> None:
        check_sizes(self.traced, root, self.sizes, self.name)
        function = self.traced.function(root, self.builder.tensors)
        self.builder.emit(program.FUNCTION, *function.words())

    def _opcode(self, opcode: int, *operands: Any) -> None:
        if opcode == program.SEGMENTS:
            sides = zip(operands, ("queries", "keys"), strict=True)
            self.builder.emit(opcode, *[self.builder.integers(self.name, ids, ("batch", dim)) for ids, dim in sides])
        elif opcode == program.LENGTH:
            self.builder.lengths(self.name, operands[0], None)
        else:
            self.builder.emit(opcode, *[self.builder.tensor(x) if isinstance(x, Tensor) else x for x in operands])

    def _leaf(self, node: Expr) -> _Leaf | None:
        """Return the opcode of a comparison, of ``==`` for ``!=``, or of a bool tensor; None if no opcode says it."""
        if node not in self.leaves:
            self.leaves[node] = self._found(node)
        return self.leaves[node]

    def _found(self, node: Expr) -> _Leaf | None:
        if node.op == "load":
            table = _table(node, self.traced, self.sizes, self.name)
            return None if table is None else (program.DENSE, table)
        if node.op not in ("lt", "le", "eq", "ne") or not is_int(node.args[0].dtype):
            return None
        if self._always_holds(node):
            return program.BAND, -program.UNLIMITED, program.UNLIMITED
        return self._band(node) or self._segments(node) or self._length(node)

    def _always_holds(self, node: Expr) -> bool:
        """Return whether ``a <= b`` or ``a < b`` holds for all of a call's batches, heads, queries and keys."""
        whole = difference(node)
        if node.op not in ("lt", "le") or whole is None:
            return False
        extents = _extents(self.sizes)
        most = -1 if node.op == "lt" else 0
        numbers = {name: factor for name, factor in whole.items() if name not in AXES}
        greatest = _value(self.traced, numbers) + sum(
            max(0, factor * (extents[name] - 1)) for name, factor in whole.items() if name in AXES
        )
        return type(greatest) is int and greatest <= most

    def _band(self, node: Expr) -> _Leaf | None:
        ends = band_ends(node)
        if ends is None:
            return None
        numbers = [None if end is None else _value(self.traced, end) for end in ends]
        lower, upper = (
            default if number is None else number
            for number, default in zip(numbers, (-program.UNLIMITED, program.UNLIMITED), strict=True)
        )
        return program.BAND, lower, upper

    def _segments(self, node: Expr) -> _Leaf | None:
        sides = [_stripped(each) for each in node.args]
        if node.op not in ("eq", "ne") or any(each.op != "load" for each in sides):
            return None
        ids: dict[str, Tensor] = {}
        for each in sides:
            at = _axes_of(each, _tensor(self.traced, each))
            if at in (("i",), ("j",), ("b", "i"), ("b", "j")):
                ids[at[-1]] = _cut(self.traced, each, self.sizes, self.name)
        return (program.SEGMENTS, ids["i"], ids["j"]) if len(ids) == 2 else None

    def _length(self, node: Expr) -> _Leaf | None:
        left, right = node.args
        bound, own = _stripped(right), affine(left)
        if node.op not in ("lt", "le") or bound.op != "load" or own is None or own.get("j") != 1:
            return None
        rest = {name: factor for name, factor in own.items() if name != "j"}
        at = _axes_of(bound, _tensor(self.traced, bound))
        if at not in ((), ("b",)) or set(rest) & set(AXES) or not is_int(bound.dtype):
            return None
        lengths, more = _cut(self.traced, bound, self.sizes, self.name), (node.op == "le") - _value(self.traced, rest)
        if more:
            lengths = get_or_compute(("keys", more), (lengths,), lambda: lengths + more)
        return program.LENGTH, lengths


_COMBINE = {"and": program.AND, "or": program.OR}


def _operands(node: Expr, op: str) -> Iterator[Expr]:
    if node.op == op:
        for each in node.args:
            yield from _operands(each, op)
    else:
        yield node


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _stripped(node: Expr) -> Expr:
    """Return an integer expression without conversions to other integers."""
    while node.op == "cast" and is_int(node.dtype) and is_int(node.args[0].dtype):
        (node,) = node.args
    return node


def _axes_of(load: Expr, tensor: Tensor) -> tuple[str, ...] | None:
    """Return the variables by which a load indexes a tensor, or None if a coordinate is another expression.

    Of a dimension with one element, whose coordinate is 0, it is the variable that has its place.
    """
    at = [_stripped(each) for each in coordinates(load)]
    found: list[str] = []
    for dim, each in enumerate(at):
        if each.op == "var" and each.data in AXES:
            found.append(each.data)
        elif _is_broadcast(each, tensor, dim) and (len(at) == 4 or dim == 0):
            found.append(AXES[dim])
        else:
            return None
    return tuple(found)


def _is_broadcast(at: Expr, tensor: Tensor, dim: int) -> bool:
    return at.op == "const" and private.or_false(tensor.shape[dim] == 1)


def _table(node: Expr, traced: Traced, sizes: CallSizes, name: str) -> Tensor | None:
    """Return a captured tensor that broadcasts to the logits, as a load indexes it; None if it indexes in another way."""
    inner = node.args[0] if node.op == "cast" and is_float(node.dtype) and is_float(node.args[0].dtype) else node
    if inner.op != "load" or is_int(inner.dtype):
        return None
    at = _axes_of(inner, _tensor(traced, inner))
    if at is None or list(at) != sorted(set(at), key=AXES.index):
        return None
    tensor = _cut(traced, inner, sizes, name)
    return tensor[tuple(slice(None) if axis in at else None for axis in AXES)] if len(at) < 4 else tensor


def _cut(traced: Traced, load: Expr, sizes: CallSizes, name: str) -> Tensor:
    """Return the captured tensor of a load that is indexed by variables, cut to the sizes of the call."""
    tensor, places = _tensor(traced, load), coordinates(load)
    extents = _extents(sizes)
    for dim, axis in enumerate(_axes_of(load, tensor) or ()):
        if places[dim].op == "const":
            continue
        _check_extent(tensor, dim, axis, extents[axis], name)
        if not private.is_known_true(tensor.shape[dim] == extents[axis]):
            tensor = tensor.narrow(dim, 0, extents[axis])
    return tensor


def _tensor(traced: Traced, load: Expr) -> Tensor:
    return traced.tensors[int(load.data[0][1:])]


def check_sizes(traced: Traced, root: Expr, sizes: CallSizes, name: str) -> None:
    """Raise for a captured tensor that is smaller than the range of a variable that indexes it."""
    extents = _extents(sizes)
    for node in loads_of(root):
        for dim, at in enumerate(map(_stripped, coordinates(node))):
            if at.op == "var" and at.data in AXES:
                _check_extent(_tensor(traced, node), dim, at.data, extents[at.data], name)


def _extents(sizes: CallSizes) -> dict[Any, int]:
    return dict(zip(AXES, sizes.grid, strict=True))


def _check_extent(tensor: Tensor, dim: int, axis: str, extent: int, name: str) -> None:
    if not private.or_true(tensor.shape[dim] >= extent):
        raise ShapeError(
            f"opkit.attention: {name} indexes dimension {dim} of a tensor of shape {tuple(tensor.shape)} by the numbers of "
            f"{_NAMES[axis]}, of which there are {extent}."
        )


# ---- scores ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(1024)
def without_hidden(root: Expr) -> tuple[Expr, Expr | None]:
    """Return a score without a choice of minus infinity around it, and the condition under which it is not hidden."""
    visible: list[Expr] = []
    while root.op == "where" and not _has_score(root.args[0]):
        condition, yes, no = root.args
        if _is_minus_infinity(no):
            visible.append(condition)
            root = yes
        elif _is_minus_infinity(yes):
            visible.append(expr.op("not", condition))
            root = no
        else:
            break
    return root, functools.reduce(lambda a, b: expr.op("and", a, b), visible) if visible else None


def _is_minus_infinity(node: Expr) -> bool:
    return node.op == "const" and node.data == -math.inf


@functools.lru_cache(1024)
def _has_score(node: Expr) -> bool:
    return any(each.op == "var" and each.data == "score" for each in node.walk())


def _terms(node: Expr, negative: bool = False) -> Iterator[tuple[Expr, bool]]:
    """Yield the terms of a sum, and whether each is subtracted."""
    if node.op in ("add", "sub") and is_float(node.dtype):
        left, right = node.args
        yield from _terms(left, negative)
        yield from _terms(right, negative != (node.op == "sub"))
    else:
        yield node, negative


def _softcap(node: Expr, traced: Traced) -> float | None:
    """Return the cap of ``cap * tanh(score / cap)``, or None if the term is something else."""
    if node.op != "mul":
        return None
    for bounded, cap in (node.args, node.args[::-1]):
        inner = bounded.args[0] if bounded.op == "tanh" else None
        if inner is not None and inner.op == "div" and inner.args[0].op == "var" and inner.args[1] is cap:
            if cap.op == "const" and cap.data > 0:
                return cap.data
            if cap.op == "var" and cap.data.startswith("x") and traced.floats[int(cap.data[1:])] > 0:
                return traced.floats[int(cap.data[1:])]
    return None
