"""Views, and copies that only move elements: maps of indices, never steps."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from typing import Any

from opkit.compiler.ir.graph import Node, TensorType
from opkit.compiler.ir.index import ZERO, Index, flat, index, is_nonnegative, product
from opkit.compiler.lower.builder import Builder
from opkit.compiler.lower.registry import NoRule, Rule, Table, overloads
from opkit.compiler.lower.tensors import Tensor, formal, is_dense

TABLE = Table()
Sizes = Sequence[Index | int]

_VIEWS: list[str] = []


def _view(*names: str) -> Any:
    """Register the rule of operators whose results lie in their argument's memory."""
    _VIEWS.extend(names)
    return TABLE.rule(*names)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@TABLE.rule("getitem", "_operator.getitem")
def getitem(b: Builder, values: Sequence[Any], number: int) -> Any:
    return values[number]


@_view(*overloads("alias"), *overloads("detach"), *overloads("lift"), *overloads("lift_fresh"))
@_view(*overloads("resolve_conj"), *overloads("resolve_neg"))
def alias(b: Builder, x: Tensor) -> Tensor:
    return x


@_view(*overloads("view"), *overloads("reshape"), *overloads("_unsafe_view"), *overloads("_reshape_alias"))
@_view(*overloads("flatten", "using_ints"), *overloads("unflatten", "int"), *overloads("squeeze", "default"))
@_view(*overloads("squeeze", "dim", "dims"), *overloads("unsqueeze"), *overloads("view_as"))
def view(b: Builder, x: Tensor, *rest: Any) -> Tensor:
    return x.reshaped(b.result().shape)  # the graph has the size that -1 stands for


@_view(*overloads("permute"))
def permute(b: Builder, x: Tensor, dims: Sequence[int]) -> Tensor:
    order = [d % len(x.shape) for d in dims]
    axes = formal([x.shape[d] for d in order])
    return x.mapped([x.shape[d] for d in order], [axes[order.index(k)] for k in range(len(order))])


@_view(*overloads("t"), *overloads("numpy_T"))
def t(b: Builder, x: Tensor) -> Tensor:
    return permute(b, x, list(reversed(range(len(x.shape)))))


@_view(*overloads("transpose", "int"), *overloads("swapaxes"))
def transpose(b: Builder, x: Tensor, first: int, second: int) -> Tensor:
    order = list(range(len(x.shape)))
    if order:
        order[first], order[second] = order[second], order[first]
    return permute(b, x, order)


@_view(*overloads("movedim", "int", "intlist"))
def movedim(b: Builder, x: Tensor, source: Any, destination: Any) -> Tensor:
    rank = len(x.shape)
    if not rank:
        return x
    sources = [d % rank for d in (source if isinstance(source, list | tuple) else [source])]
    places = [d % rank for d in (destination if isinstance(destination, list | tuple) else [destination])]
    rest = iter(d for d in range(rank) if d not in sources)
    return permute(b, x, [sources[places.index(k)] if k in places else next(rest) for k in range(rank)])


@_view(*overloads("expand"), *overloads("broadcast_to"))
def expand(b: Builder, x: Tensor, shape: Sizes, *, implicit: bool = False) -> Tensor:
    return x.expanded(b.result().shape)


# ---- parts -----------------------------------------------------------------------------------------------------------


@_view(*overloads("slice", "Tensor"))
def slice_(b: Builder, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    begin = clamped(0 if start is None else start, x.shape[dim])
    return _along(x, dim, b.result().shape[dim], lambda at: at * step + begin)


@_view(*overloads("narrow"))
def narrow(b: Builder, x: Tensor, dim: int, start: Any, length: Any) -> Tensor:
    return slice_(b, x, dim, start)


@_view(*overloads("select", "int"))
def select(b: Builder, x: Tensor, dim: int, at: Any) -> Tensor:
    dim %= len(x.shape)
    axes = list(formal(b.result().shape))
    axes.insert(dim, from_end(at, x.shape[dim]))
    return x.mapped(b.result().shape, axes)


@_view(*overloads("split", "Tensor", "sizes"), *overloads("split_with_sizes"), *overloads("chunk"))
@_view(*overloads("unsafe_split", "Tensor"), *overloads("unsafe_chunk"), *overloads("tensor_split", "sections"))
def split(b: Builder, x: Tensor, sizes: Any, dim: int = 0) -> tuple[Tensor, ...]:
    assert isinstance(b.node.result, tuple)
    pieces: list[Tensor] = []
    begin = ZERO
    for k in range(len(b.node.result)):
        length = b.result(k).shape[dim]
        pieces.append(_along(x, dim, length, lambda at, begin=begin: at + begin))
        begin = begin + length
    return tuple(pieces)


@_view(*overloads("unbind", "int"))
def unbind(b: Builder, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    assert isinstance(b.node.result, tuple)
    return unbound(x, dim, len(b.node.result))


def unbound(x: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
    """Return the first ``count`` slices of a tensor along a dimension."""
    dim %= len(x.shape)
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    axes = formal(shape)
    return tuple(x.mapped(shape, [*axes[:dim], k, *axes[dim:]]) for k in range(count))


@_view(*overloads("unfold"))
def unfold(b: Builder, x: Tensor, dim: int, size: int, step: int) -> Tensor:
    if not x.shape:
        return x.reshaped(b.result().shape)
    axes = formal(b.result().shape)
    dim %= len(x.shape)
    return x.mapped(b.result().shape, [a * step + axes[-1] if k == dim else a for k, a in enumerate(axes[:-1])])


@_view(*overloads("diagonal"))
def diagonal(b: Builder, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rank = len(x.shape)
    dim1, dim2 = dim1 % rank, dim2 % rank
    *rest, along = formal(b.result().shape)
    at = iter(rest)
    moved = {dim1: along + max(-offset, 0), dim2: along + max(offset, 0)}
    return x.mapped(b.result().shape, [moved[k] if k in moved else next(at) for k in range(rank)])


@_view(*overloads("as_strided"))
def as_strided(b: Builder, x: Tensor, shape: Sizes, strides: Sizes, offset: Any = None) -> Tensor:
    """Return a view of the memory that eager mode has, in which each element of the base tensor has one position."""
    nodes = {node.name: node for node in b.graph.nodes}
    viewed = nodes[b.node.args[0].name]
    base = base_of(viewed, nodes, _VIEWS)
    kind, value, view_type = base.result, b.values[base.name], viewed.result
    if base.target in ("input", "constant") or not isinstance(kind, TensorType) or not isinstance(value, Tensor):
        raise NoRule("as_strided of an input of the graph")
    if not is_dense(kind.shape, kind.strides) or kind.dtype != x.dtype:
        raise NoRule("as_strided of memory with gaps, or of another type")
    assert isinstance(view_type, TensorType)
    place = flat(formal(shape), strides) + index(view_type.offset if offset is None else offset)
    at = [ZERO if n == 1 else place // s % n for n, s in zip(kind.shape, kind.strides, strict=True)]
    own = value.strided()
    if own is None or any(n != 1 and s != t for n, s, t in zip(kind.shape, own.strides, kind.strides, strict=True)):
        value = b.materialised(value, kind.strides)
    return value.mapped(b.result().shape, at)


def base_of(node: Node, nodes: Mapping[str, Node], views: Container[str]) -> Node:
    """Return the node whose memory a node's result is in, after steps over the operators in ``views``."""
    while node.target in views or (node.target == "getitem" and nodes[node.args[0].name].target in views):
        node = nodes[node.args[0].name]
    return node


def _along(x: Tensor, dim: int, length: Index, move: Any) -> Tensor:
    """Return a part of a dimension; ``move`` maps a position in the part to one in the dimension."""
    dim %= len(x.shape)
    shape = tuple(length if k == dim else n for k, n in enumerate(x.shape))
    return x.mapped(shape, [move(a) if k == dim else a for k, a in enumerate(formal(shape))])


def from_end(at: Any, extent: Index) -> Index:
    """Return a position from the start; a negative one counts from the end."""
    if isinstance(at, Tensor):
        raise NoRule("a position that is read from memory")
    at = index(at)
    if at.constant is not None:
        return at + extent if at.constant < 0 else at
    if not is_nonnegative(at):
        raise NoRule(f"the position {at}, which may be negative")
    return at


def clamped(at: Any, extent: Index) -> Index:
    """Return the begin of a slice, limited to the dimension."""
    begin = from_end(at, extent)
    if is_nonnegative(extent - begin):
        return begin if is_nonnegative(begin) else ZERO
    if is_nonnegative(begin - extent):
        return extent
    if is_nonnegative(-begin):
        return ZERO
    raise NoRule(f"a slice from {begin}, which may be outside of a dimension of {extent}")


# ---- copies that move elements -----------------------------------------------------------------------------------------


@TABLE.rule(*overloads("flip"))
def flip(b: Builder, x: Tensor, dims: Sequence[int]) -> Tensor:
    flipped = {d % max(len(x.shape), 1) for d in dims}
    axes = [x.shape[k] - 1 - a if k in flipped else a for k, a in enumerate(formal(x.shape))]
    return x.mapped(x.shape, axes, copied=True)


@TABLE.rule(*overloads("roll"))
def roll(b: Builder, x: Tensor, shifts: Any, dims: Sequence[int] = ()) -> Tensor:
    shifts = shifts if isinstance(shifts, list | tuple) else [shifts]
    if any(n == 0 for n in x.shape) or not x.shape:
        return x.mapped(x.shape, formal(x.shape), copied=True)
    flat_x = x if dims else x.reshaped([product(x.shape)])
    axes = list(formal(flat_x.shape))
    for shift, dim in zip(shifts, dims or [0], strict=True):
        extent = flat_x.shape[dim]
        begin = -shift % extent.constant if isinstance(shift, int) and extent.constant else (extent - shift) % extent
        axes[dim] = (axes[dim] + begin) % extent
    return flat_x.mapped(flat_x.shape, axes, copied=True).reshaped(x.shape)


@TABLE.rule(*overloads("repeat"), *overloads("tile"))
def repeat(b: Builder, x: Tensor, repeats: Sizes) -> Tensor:
    shape = b.result().shape
    axes = formal(shape)[len(shape) - len(x.shape) :]
    if any(n == 0 for n in shape):
        return x.mapped(shape, [ZERO] * len(x.shape), copied=True)
    return x.mapped(shape, [ZERO if n == 1 else a % n for a, n in zip(axes, x.shape, strict=True)], copied=True)


# ---- copies of views, as the bodies of control flow operators have them ------------------------------------------------

_COPIED = (
    *("_reshape_alias", "alias", "detach", "diagonal", "expand", "permute", "select", "slice", "split"),
    *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
)


def _copied(view: Rule, b: Builder, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
    """Return copies of the results of the rule of a view."""
    result = view(b, *args, **kwargs)
    copies = [
        x.mapped(x.shape, formal(x.shape), copied=True) for x in (result if isinstance(result, tuple) else [result])
    ]
    return tuple(copies) if isinstance(result, tuple) else copies[0]


for _name in _VIEWS:
    _, _operator, _overload = _name.split(".")
    if _operator in _COPIED:
        TABLE.rule(f"aten.{_operator}_copy.{_overload}")(functools.partial(_copied, TABLE[_name]))

ALIASING = frozenset(_VIEWS)
