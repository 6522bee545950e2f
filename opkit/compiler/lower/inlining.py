"""Put the body of a step in place of the loads of its results, so that a value is recomputed and not stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from opkit.compiler.ir.expr import CHECKS, Expr, cast, const, indices, load, moved, op, position, rewrite, where
from opkit.compiler.ir.index import Axis, Index, Value, index, value
from opkit.compiler.ir.program import Compute

Parts = Sequence[Compute]
"""The steps that fill a buffer: one, or several that fill adjacent parts."""


def substituted(step: Compute, inlined: Mapping[str, Parts]) -> Compute:
    """Return the step with the bodies of others in place of what it loads from them."""
    return dataclasses.replace(step, body=_inline(step.body, inlined))


def invertible(parts: Parts, masked: bool) -> bool:
    """Return whether each element of a buffer can be computed from its coordinates alone; ``masked``: under a mask."""
    if any(part.reduction or part.update for part in parts):
        return False
    if masked or len(parts) > 1:  # then nothing but loads may depend on being at a right position
        nodes = [node for part in parts for node in part.body.walk()]
        leaves = [leaf for node in nodes for at in indices(node) for leaf in at.leaves()]
        if any(node.op in CHECKS for node in nodes) or any(isinstance(leaf, Value) for leaf in leaves):
            return False
    return all(_offset(at) == 0 for at in parts[0].target) if len(parts) == 1 else _dimension(parts) is not None


def _offset(at: Index) -> Index | None:
    """Return the summand of a coordinate that is one axis, or 0, plus something without axes and values; else None."""
    axes = at.axes()
    rest = at - index(0) if not axes else at - Index({(next(iter(axes)),): 1})
    plain = len(axes) <= 1 and not rest.axes() and not any(isinstance(leaf, Value) for leaf in rest.leaves())
    return rest if plain else None


def _dimension(parts: Parts) -> int | None:
    """Return the one dimension along which parts lie next to each other from 0 on, in order."""
    offsets = [[_offset(at) for at in part.target] for part in parts]
    if any(each is None for row in offsets for each in row):
        return None
    apart = [k for k, column in enumerate(zip(*offsets, strict=True)) if any(each != 0 for each in column)]
    if len(apart) != 1:
        return None
    end = index(0)
    for part, row in zip(parts, offsets, strict=True):
        if row[apart[0]] != end:
            return None
        end = end + _length(part, apart[0])
    return apart[0]


def _length(part: Compute, dimension: int) -> Index:
    """Return how long a part is along a dimension."""
    return next((axis.extent for axis in part.target[dimension].axes()), index(1))


def _inline(root: Expr, inlined: Mapping[str, Parts]) -> Expr:
    def change(node: Expr) -> Expr:
        node = with_values(node, lambda inner: _inline(inner, inlined))
        if node.op == "load" and node.data[0] in inlined:
            element = _element(inlined[node.data[0]], node.data[1])
            return where(node.args[0], masked(element, node.args[0]), const(0, node.dtype)) if node.args else element
        return lossless(node)

    return rewrite(root, change)


def _element(parts: Parts, coordinates: Sequence[Index]) -> Expr:
    """Return what the steps compute for an element of their buffer."""
    if len(parts) == 1:
        return _body(parts[0], coordinates)
    dimension = _dimension(parts)
    assert dimension is not None
    found: Expr | None = None
    for part in reversed(parts):
        mask = _within(part, dimension, coordinates[dimension])
        body = masked(_body(part, coordinates), mask)
        found = body if found is None else where(mask, body, found)
    assert found is not None
    return found


def _body(part: Compute, coordinates: Sequence[Index]) -> Expr:
    axes: dict[Axis, Index] = {}
    for at, coordinate in zip(part.target, coordinates, strict=True):
        offset = _offset(at)
        assert offset is not None
        axes |= dict.fromkeys(at.axes(), coordinate - offset)
    return part.body.substitute(axes)


def _within(part: Compute, dimension: int, at: Index) -> Expr:
    """Return whether a coordinate is in a part; the lower bound is checked too, for nothing else may be read."""
    begin = _offset(part.target[dimension])
    assert begin is not None
    inside = op("lt", position(at), position(begin + _length(part, dimension)))
    return inside if begin == 0 else op("and", op("le", position(begin), position(at)), inside)


def masked(body: Expr, mask: Expr) -> Expr:
    """Return an expression that reads memory only where the mask holds."""

    def change(node: Expr) -> Expr:
        node = with_values(node, lambda inner: masked(inner, mask))
        if node.op != "load":
            return node
        both = op("and", mask, node.args[0]) if node.args else mask
        return load(node.data[0], node.dtype, *node.data[1], mask=both)

    return rewrite(body, change)


def with_values(node: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Return a node with the expressions in its own indices replaced."""
    leaves = {leaf for at in indices(node) for leaf in at.leaves() if isinstance(leaf, Value)}
    return moved(node, {leaf: value(change(leaf.expr)) for leaf in leaves}) if leaves else node


def lossless(node: Expr) -> Expr:
    """Remove a conversion to a narrow float and back, if it only connects two steps."""
    if node.op != "cast":
        return node
    (inner,) = node.args
    if inner.op == "where" and inner.dtype in ("bf16", "f16") and not node.data:
        condition, *chosen = inner.args
        if any(each.op == "cast" for each in chosen):  # each choice by itself
            return where(condition, *(lossless(cast(each, node.dtype)) for each in chosen))
    if inner.op == "cast" and not inner.data and inner.dtype in ("bf16", "f16") and inner.args[0].dtype == node.dtype:
        return inner.args[0]
    return cast(inner, node.dtype, bool(node.data))
