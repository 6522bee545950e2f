"""Integer expressions as sums of variables and captured numbers, and the bands of keys that comparisons of them are."""

from __future__ import annotations

import functools

from opkit.compiler.ir.dtypes import is_int
from opkit.compiler.ir.expr import Expr

AXES = ("b", "h", "i", "j")  #: the variables of a function, in the order of the logits' dimensions
Affine = dict[str, int]
"""The factor of each variable and captured number; that of "" is the constant."""


@functools.lru_cache(1024)
def band_ends(node: Expr) -> tuple[Affine | None, Affine | None] | None:
    """Return what ``j - i`` is at least and at most where a comparison holds; None if it is no band."""
    left, right = node.args
    if left.op == "abs" and node.op in ("lt", "le"):
        inner, most = affine(left.args[0]), affine(right)
        if inner is None or most is None or set(most) & set(AXES):
            return None
        most = _sum(most, {"": -1} if node.op == "lt" else {})
        ends = _distance(inner)
        if ends is None:
            return None
        sign, rest = ends  # |sign * (j - i) + rest| <= most
        centre = _scaled(rest, -sign)
        return _sum(centre, _scaled(most, -1)), _sum(centre, most)
    whole = difference(node)
    ends = None if whole is None else _distance(whole)
    if ends is None:
        return None
    sign, rest = ends  # sign * (j - i) + rest <= 0
    if node.op in ("eq", "ne"):
        return _scaled(rest, -sign), _scaled(rest, -sign)
    rest = _sum(rest, {"": 1} if node.op == "lt" else {})
    return (None, _scaled(rest, -1)) if sign > 0 else (rest, None)


@functools.lru_cache(1024)
def difference(node: Expr) -> Affine | None:
    """Return the difference of a comparison's two sides as a sum of variables and numbers, or None."""
    a, b = map(affine, node.args)
    return None if a is None or b is None else _sum(a, _scaled(b, -1))


def _distance(a: Affine) -> tuple[int, Affine] | None:
    """Return ``sign`` and ``rest`` of an expression that is ``sign * (j - i) + rest``, the rest of numbers alone; else None."""
    sign, rest = a.get("j", 0), {name: factor for name, factor in a.items() if name not in ("i", "j")}
    if sign not in (1, -1) or a.get("i", 0) != -sign or set(rest) & set(AXES):
        return None
    return sign, rest


def affine(node: Expr) -> Affine | None:
    """Return an integer expression as a sum of variables and captured numbers, each times a constant; None if it is none."""
    if node.op == "const":
        return {"": node.data} if is_int(node.dtype) else None
    if node.op == "var":
        return {node.data: 1} if is_int(node.dtype) else None
    if node.op == "cast":
        return affine(node.args[0]) if is_int(node.dtype) and is_int(node.args[0].dtype) else None
    if node.op not in ("add", "sub", "mul", "neg"):
        return None
    parts = [affine(each) for each in node.args]
    if any(each is None for each in parts):
        return None
    known = [each for each in parts if each is not None]
    if node.op == "neg":
        return _scaled(known[0], -1)
    if node.op == "mul":
        for one, other in (known, known[::-1]):
            if not set(one) - {""}:
                return _scaled(other, one.get("", 0))
        return None
    return _sum(known[0], _scaled(known[1], -1 if node.op == "sub" else 1))


def _sum(a: Affine, b: Affine) -> Affine:
    total = {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
    return {name: factor for name, factor in total.items() if factor}


def _scaled(a: Affine, by: int) -> Affine:
    return {name: factor * by for name, factor in a.items() if factor * by}
