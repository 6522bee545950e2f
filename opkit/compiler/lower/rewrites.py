"""This module simplifies expressions with identities that hold for all values, also NaN, infinities and signed zeros."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.expr import Expr, const, make, rewrite
from opkit.compiler.ir.ops import OPS

Identity = Callable[[Expr], Expr | None]

NUMPY = {
    **{name: np.dtype(row.torch) for name, row in DTYPES.items() if row.kind in ("int", "bool") or name == "f16"},
    "f32": np.dtype("float32"),
    "f64": np.dtype("float64"),
}


def simplify(root: Expr) -> Expr:
    """Return an expression with every node simplified."""
    return rewrite(root, simplified)


def simplified(node: Expr) -> Expr:
    """Apply the first matching identity to a node whose arguments are simplified already."""
    folded = _folded(node)
    if folded is not None:
        return folded
    for identity in _IDENTITIES.get(node.op, ()):
        found = identity(node)
        if found is not None:
            return found
    return node


# ---- constants -------------------------------------------------------------------------------------------------------


def _folded(node: Expr) -> Expr | None:
    """Return the value of an op of constants if every processor computes the same number, else None."""
    meaning = OPS[node.op].numpy
    exact = node.op in _EXACT or (node.op != "pow" and not is_float(node.dtype))
    if meaning is None or not exact or not node.args or any(a.op != "const" for a in node.args):
        return None
    if any(a.dtype not in NUMPY for a in node.args):
        return None
    with np.errstate(all="ignore"):
        value = meaning(*(np.asarray(a.data).astype(NUMPY[a.dtype]) for a in node.args))
    return const(np.asarray(value).item(), node.dtype)


# IEEE 754 defines the results of these; other functions differ between libraries in the last bit.
_EXACT = frozenset(["add", "sub", "mul", "div", "neg", "abs", "min", "max", "floor", "trunc", "round", "sqrt", "fmod"])


# ---- identities ------------------------------------------------------------------------------------------------------


def _is(node: Expr, number: float) -> bool:
    """Return whether a node is this constant, with the same sign if it is 0."""
    return node.op == "const" and node.data == number and math.copysign(1, node.data) == math.copysign(1, number)


def _without(side: int, neutral: float, kinds: str = "bif") -> Identity:
    """x op neutral is x (``side`` 1), or neutral op x (``side`` 0), for types of these kinds."""

    def identity(node: Expr) -> Expr | None:
        applies = DTYPES[node.dtype].kind[0] in kinds and _is(node.args[side], neutral)
        return node.args[1 - side] if applies else None

    return identity


def _absorbed(side: int, number: float) -> Identity:
    """Return an integer or bool op whose result one argument decides."""

    def identity(node: Expr) -> Expr | None:
        return node.args[side] if not is_float(node.dtype) and _is(node.args[side], number) else None

    return identity


def _twice(node: Expr) -> Expr | None:
    """neg(neg(x)), not(not(x))"""
    return node.args[0].args[0] if node.args[0].op == node.op else None


def _same(node: Expr) -> Expr | None:
    """min(x, x), max(x, x), and(x, x), or(x, x)"""
    return node.args[0] if node.args[0] is node.args[1] else None


def _minus_negative(node: Expr) -> Expr | None:
    """x - (-y)"""
    x, y = node.args
    return make("add", node.dtype, (x, y.args[0])) if y.op == "neg" else None


def _known_choice(node: Expr) -> Expr | None:
    condition, yes, no = node.args
    if yes is no:
        return yes
    return (yes if condition.data else no) if condition.op == "const" else None


def _inverted_choice(node: Expr) -> Expr | None:
    condition, yes, no = node.args
    return make("where", node.dtype, (condition.args[0], no, yes)) if condition.op == "not" else None


def _same_type(node: Expr) -> Expr | None:
    return node.args[0] if node.args[0].dtype == node.dtype else None


def _cast_twice(node: Expr) -> Expr | None:
    """cast(cast(x)) where the first loses nothing: one cast, or none."""
    inner = node.args[0]
    if inner.op != "cast" or not _holds(inner.dtype, inner.args[0].dtype):
        return None
    if inner.args[0].dtype == node.dtype:
        return inner.args[0]
    return make("cast", node.dtype, inner.args, node.data)


def _cast_constant(node: Expr) -> Expr | None:
    inner = node.args[0]
    if inner.op != "const" or inner.dtype not in NUMPY or node.dtype not in NUMPY:
        return None
    if DTYPES[node.dtype].kind == "int" and not math.isfinite(inner.data):
        return None
    with np.errstate(all="ignore"):
        return const(np.asarray(inner.data).astype(NUMPY[inner.dtype]).astype(NUMPY[node.dtype]).item(), node.dtype)


def _holds(wide: str, narrow: str) -> bool:
    """Return whether every value of the narrow type is a value of the wide one.

    >>> _holds("f32", "bf16"), _holds("f16", "bf16"), _holds("f32", "i32")
    (True, False, False)
    """
    a, b = DTYPES[wide], DTYPES[narrow]
    if b.kind == "bool":
        return True
    digits: dict[str, int] = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}
    if a.kind == b.kind == "float":
        return a.bytes > b.bytes or wide == narrow
    if a.kind == "float" and b.kind == "int":
        return 8 * b.bytes <= digits[wide] and wide != "f16"
    return a.kind == b.kind == "int" and (a.signed or not b.signed) and (a.bytes > b.bytes or a == b)


_IDENTITIES: dict[str, tuple[Identity, ...]] = {
    # x + 0.0 is not x where x is -0.0; x + (-0.0) is.
    "add": (_without(1, 0, "bi"), _without(0, 0, "bi"), _without(1, -0.0, "f"), _without(0, -0.0, "f")),
    "sub": (_without(1, 0), _minus_negative),
    "mul": (_without(1, 1), _without(0, 1), _absorbed(0, 0), _absorbed(1, 0)),
    "div": (_without(1, 1),),
    "floordiv": (_without(1, 1),),
    "pow": (_without(1, 1),),
    "neg": (_twice,),
    "not": (_twice,),
    "min": (_same,),
    "max": (_same,),
    "and": (_same, _absorbed(0, 0), _absorbed(1, 0)),
    "or": (_same, _without(1, 0), _without(0, 0)),
    "where": (_known_choice, _inverted_choice),
    "cast": (_same_type, _cast_twice, _cast_constant),
}


def identities() -> dict[str, Any]:
    """Return the table of identities, for tests."""
    return dict(_IDENTITIES)
