"""Interval arithmetic in Python: whether a condition holds for all queries and keys in some ranges, or for none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opkit.attn.functions.trace import Traced
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr

_Interval = tuple[int, int]
_INDEX: _Interval = (0, 2**31 - 1)


def truth(traced: Traced, ranges: Mapping[str, range]) -> bool | None:
    """Return the value of a condition that is the same for all batches, heads, queries and keys in the ranges; else None.

    It depends on no tensor's values, so that all processes decide alike.
    """
    known: dict[str, _Interval] = {axis: (own.start, max(own.start, own.stop - 1)) for axis, own in ranges.items()}
    known |= {f"n{place}": (number, number) for place, number in enumerate(traced.integers)}
    found: dict[Expr, _Interval | None] = {}
    for node in traced.root.walk():
        found[node] = _within(_interval(node, found, known), node.dtype)
    least, most = found[traced.root] or (0, 1)
    return bool(least) if least == most else None


def _interval(node: Expr, found: Mapping[Expr, _Interval | None], known: Mapping[str, _Interval]) -> _Interval | None:
    if node.op == "const":
        return (int(node.data), int(node.data)) if DTYPES[node.dtype].kind in ("int", "bool") else None
    if node.op == "var":
        return known.get(node.data, _INDEX)
    rule = (_OF_BOOLS.get(node.op) if node.dtype == "b1" else None) or _RULES.get(node.op)
    args = [found[each] for each in node.args]
    given = [each for each in args if each is not None]
    return None if rule is None or len(given) < len(args) else rule(*given)


def _within(value: _Interval | None, dtype: str) -> _Interval | None:
    """Return an interval of numbers of a type: all of them for one that is not known, or that would wrap around."""
    row = DTYPES[dtype]
    if row.kind not in ("int", "bool"):
        return None
    bits = 1 if row.kind == "bool" else 8 * row.bytes
    whole = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if row.signed else (0, 2**bits - 1)
    return value if value is not None and whole[0] <= value[0] and value[1] <= whole[1] else whole


def _remainder(a: _Interval, b: _Interval) -> _Interval | None:
    if b[0] != b[1] or b[0] <= 0:
        return None
    same = a[0] // b[0] == a[1] // b[0]
    return (a[0] % b[0], a[1] % b[0]) if same else (0, b[0] - 1)


def _product(a: _Interval, b: _Interval) -> _Interval:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _equal(a: _Interval, b: _Interval) -> _Interval:
    return int(a[0] == a[1] == b[0] == b[1]), int(a[0] <= b[1] and b[0] <= a[1])


def _not(a: _Interval) -> _Interval:
    return 1 - a[1], 1 - a[0]


def _where(condition: _Interval, yes: _Interval, no: _Interval) -> _Interval:
    if condition[0] == condition[1]:
        return yes if condition[0] else no
    return min(yes[0], no[0]), max(yes[1], no[1])


_RULES: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a: (-a[1], -a[0]),
    "mul": _product,
    "abs": lambda a: (max(0, a[0], -a[1]), max(a[1], -a[0])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "floordiv": lambda a, b: (a[0] // b[0], a[1] // b[0]) if b[0] == b[1] and b[0] > 0 else None,
    "rem": _remainder,
    "cast": lambda a: a,
    "lt": lambda a, b: (int(a[1] < b[0]), int(a[0] < b[1])),
    "le": lambda a, b: (int(a[1] <= b[0]), int(a[0] <= b[1])),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "where": _where,
}
_OF_BOOLS: dict[str, Callable[..., Any]] = {
    "and": _RULES["min"], "or": _RULES["max"], "xor": _RULES["ne"], "not": _not,
}  # fmt: skip
