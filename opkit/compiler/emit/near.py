"""This module writes kernels in two forms: with functions for arguments near zero, and a fallback for larger arguments.

sin, cos and tan of arguments of any size take twice as long as of usual sizes, and a branch in a loop would prevent
vectorisation. So a kernel that calls them is written twice. The first form records in ``far_f32`` and ``far_f64`` whether an
argument was too large, and returns that; the second one then recomputes everything.
"""

from __future__ import annotations

from collections.abc import Iterable

from opkit.compiler.emit.expressions import convert
from opkit.compiler.emit.functions.near import LIMITS
from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Value
from opkit.compiler.ir.kernel import Kernel, Let, Loop, Scratch, Statement, Store, Update, walk

FLAGS = {"f32": "int32_t", "f64": "int64_t"}
"""The type of the flag, as wide as that of the arguments, so that a vector of one is compared into a vector of the other."""


def types(kernel: Kernel, exclusive: bool) -> frozenset[str]:
    """Return the types of which the kernel has functions with such a form; none where it cannot be run twice.

    It can unless it reads what it writes. Nor may a number that comes of too large an argument decide where it reads.
    """
    statements = list(walk(kernel.body))
    nodes = {node for s in statements for root in _roots(s) for node in root.walk()}
    called = of(nodes)
    return called if called and exclusive and _repeats(statements, nodes) else frozenset()


def of(nodes: Iterable[Expr]) -> frozenset[str]:
    """Return the types of the functions among these nodes that have such a form."""
    return frozenset(_type(node) for node in nodes if has(node))


def has(node: Expr) -> bool:
    """Return whether it is a call of a function that has such a form."""
    return bool(node.args) and f"{node.op}_{_type(node)}" in LIMITS


def far_statement(node: Expr, x: str) -> str:
    """Return a statement: notes whether the argument, a variable, is too large."""
    t = _type(node)
    return f"far_{t} |= __builtin_fabs{'f' if t == 'f32' else ''}({x}) > {LIMITS[f'{node.op}_{t}']};"


def argument(node: Expr, text: str) -> tuple[str, str]:
    """Return the argument as the function takes it, and its type."""
    return convert(text, node.dtype, _type(node)), _type(node)


def call(node: Expr, x: str) -> str:
    """Return the function near zero."""
    return convert(f"opk_{node.op}_near_{_type(node)}({x})", _type(node), node.dtype)


def _type(node: Expr) -> str:
    return DTYPES[node.dtype].compute


def _roots(s: Statement) -> list[Expr]:
    return [s.value] if isinstance(s, Let | Store | Update) else []


def _repeats(statements: list[Statement], nodes: set[Expr]) -> bool:
    stores = [s for s in statements if isinstance(s, Store)]
    scratch = {s.name for s in statements if isinstance(s, Scratch)}
    loaded = {node.data[0] for node in nodes if node.op == "load"}
    at = [*(s.at for s in stores), *(each for node in nodes for each in expr.indices(node))]
    return (
        not any(s.update is not None for s in stores)
        and not {s.buffer for s in stores} & (loaded - scratch)
        and not any(isinstance(s, Loop) and s.stop is not None for s in statements)
        and not any(isinstance(leaf, Value) for each in at for leaf in each.leaves())
        and not any(node.op in expr.CHECKS for node in nodes)
    )
