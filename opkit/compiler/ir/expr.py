"""Scalar expressions: the value of one element of a tensor, as a function of the axes of the loops around it.

Expressions are values: equal ones are the same object (hash-consing), so a subexpression that occurs twice is one node,
and ``is`` compares.

>>> from opkit.compiler.ir.index import axis
>>> x = load("x", "f32", axis(0, 8))
>>> y = op("add", op("mul", x, x), const(1.0, "f32"))
>>> print(y)
add(mul(x[a0], x[a0]), 1.0)
>>> op("mul", x, x) is y.args[0]
True
"""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index, IndexLike, Value, index
from opkit.compiler.ir.ops import OPS


@dataclasses.dataclass(frozen=True)
class Callee:
    """A function of a library, of numbers or of runs of elements.

    Attributes:
        name: its symbol.
        library: the path of the library, or the name that the loader knows it by.
        arguments: the types that it takes, keys of ``DTYPES``.
        result: the type of its value.
        run_parameters: the kind of each parameter of a function of runs: "elements" (a pointer to them), "i" or "f" (an integer
            or a float: these three are the arguments, in order), "result" (a pointer to the results), "count" (their number).
            Empty for a function of numbers.
        instance: the number of a function of runs in its library.
    """

    name: str
    library: str
    arguments: tuple[str, ...]
    result: str
    run_parameters: tuple[str, ...] = ()
    instance: int = 0


class Expr:
    """A node: an op of the table, the type of its value, its arguments, and what else the op needs.

    Attributes:
        op: a key of ``OPS``.
        dtype: a key of ``DTYPES``.
        args: other expressions.
        data: see the op's row: a number, an index, (buffer, coordinates), a name; None for most.
    """

    __slots__ = ("__weakref__", "_hash", "args", "data", "dtype", "op")
    op: str
    dtype: str
    args: tuple[Expr, ...]
    data: Any

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return _printed(self)

    def substitute(self, axes: Mapping[Any, IndexLike]) -> Expr:
        """Return the expression with other indices for axes."""
        return rewrite(self, lambda e: moved(e, axes))

    def walk(self) -> list[Expr]:
        """Return each node once, arguments before what uses them; also those that an index is computed from."""
        order: dict[Expr, None] = {}
        _visit(self, order)
        return list(order)


_known: weakref.WeakValueDictionary[Any, Expr] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def make(op: str, dtype: str, args: tuple[Expr, ...] = (), data: Any = None) -> Expr:
    """Return the node; equal nodes are the same object."""
    key = (op, dtype, tuple(map(id, args)), type(data), _bits(data))
    with _lock:
        found = _known.get(key)
        if found is None:
            found = Expr()
            found.op, found.dtype, found.args, found.data = op, dtype, args, data
            found._hash = hash(key)
            _known[key] = found
    return found


def _bits(data: Any) -> Any:
    """Return a key that differs for 0.0 and -0.0, and is equal for two NaN."""
    return data.hex() if isinstance(data, float) else data


CHECKS = frozenset(["bound", "nonzero"])  # ops that can stop the program


# ---- constructors ----------------------------------------------------------------------------------------------------


def const(number: bool | int | float, dtype: str) -> Expr:
    """Return a number of a type; the value is converted to the type's kind."""
    convert: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float}
    return make("const", dtype, (), convert[DTYPES[dtype].kind](number))


def load(buffer: str, dtype: str, *coordinates: IndexLike, mask: Expr | None = None) -> Expr:
    """Return an element of a buffer at logical coordinates; if ``mask`` is false, it is 0 and nothing is read."""
    return make("load", dtype, () if mask is None else (mask,), (buffer, tuple(map(index, coordinates))))


def position(at: IndexLike, dtype: str = "i64") -> Expr:
    """Return an index as a number."""
    constant = index(at).constant
    whole = const(constant, "i64") if constant is not None else make("index", "i64", (), index(at))
    return cast(whole, dtype)


def var(name: str, dtype: str) -> Expr:
    return make("var", dtype, (), name)


def bound(at: Expr, extent: IndexLike) -> Expr:
    """Return a position in a dimension, where a negative one counts from the end; one outside stops the program."""
    return make("bound", at.dtype, (at,), index(extent))


def nonzero(value: Expr) -> Expr:
    """Return an integer that must not be 0; 0 stops the program."""
    known = value.op == "nonzero" or (value.op == "const" and value.data)
    return value if known else make("nonzero", value.dtype, (value,))


def random(seed: Expr, count: IndexLike, dtype: str = "f32") -> Expr:
    """Return a random number in [0, 1), computed from a seed and a count."""
    return make("random", dtype, (seed,), index(count))


def call(callee: Callee, *args: Expr) -> Expr:
    """Return the value of a library's function."""
    return make("call", callee.result, args, callee)


def cast(value: Expr, dtype: str, explicit: bool = False) -> Expr:
    """Return the value as another type. ``explicit``: the user wrote the conversion, so its rounding must stay."""
    if value.dtype == dtype:
        return value
    if value.op == "const" and _safe(value, dtype):
        return const(_converted(value.data, dtype), dtype)
    return make("cast", dtype, (value,), explicit)


def where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return yes if yes is no else make("where", yes.dtype, (condition, yes, no))


def op(name: str, *args: Expr) -> Expr:
    """Return an op whose type follows from its arguments'."""
    row = OPS[name]
    assert row.kind == "scalar", name
    assert row.result != "explicit", name
    return make(name, "b1" if row.result == "b1" else args[0].dtype, args)


def _safe(value: Expr, dtype: str) -> bool:
    """Return whether Python converts a constant to a type as C does, without rounding.

    A constant is the number as it was written; the nearest number of its type may be another one.
    """
    source, target = DTYPES[value.dtype], DTYPES[dtype]
    if source.kind == target.kind == "float" and source.bytes < target.bytes:
        return value.data != value.data or value.data in (0, 1, math.inf, -math.inf)
    if DTYPES[dtype].kind == "int":
        limit = 2 ** (8 * DTYPES[dtype].bytes - 1)
        return value.data == value.data and abs(value.data) < limit and (value.data >= 0 or DTYPES[dtype].signed)
    return dtype in ("f64", "f32", "b1") or value.data in (0, 1)


def _converted(number: Any, dtype: str) -> Any:
    kind = DTYPES[dtype].kind
    return bool(number) if kind == "bool" else int(number) if kind == "int" else float(number)


# ---- walks and rewrites-----------------------------------------------------------------------------------------------


def rewrite(root: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Return an expression with ``change`` applied to every node, arguments first."""
    done: dict[Expr, Expr] = {}
    for node in _in_order(root):
        args = tuple(done[a] for a in node.args)
        done[node] = change(node if args == node.args else make(node.op, node.dtype, args, node.data))
    return done[root]


def _in_order(root: Expr) -> list[Expr]:
    """Return each node of the tree of arguments once, arguments first."""
    order: list[Expr] = []
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(a, False) for a in reversed(node.args)]
    return order


def _visit(root: Expr, order: dict[Expr, None]) -> None:
    for node in _in_order(root):
        for at in indices(node):
            for leaf in at.leaves():
                if isinstance(leaf, Value):
                    _visit(leaf.expr, order)
        order.setdefault(node)


def indices(node: Expr) -> tuple[Index, ...]:
    """Return the indices that a node holds itself."""
    if node.op == "load":
        return node.data[1]
    return (node.data,) if node.op in ("index", "random", "bound") else ()


def moved(node: Expr, axes: Mapping[Any, IndexLike]) -> Expr:
    """Return a node with other indices for axes in its own indices; its arguments stay."""
    if node.op == "load":
        buffer, coordinates = node.data
        return make("load", node.dtype, node.args, (buffer, tuple(c.substitute(axes) for c in coordinates)))
    if node.op == "index":
        return position(node.data.substitute(axes))
    if node.op in ("random", "bound"):
        return make(node.op, node.dtype, node.args, node.data.substitute(axes))
    return node


def _printed(node: Expr) -> str:
    if node.op == "const":
        return str(node.data)
    if node.op == "index":
        return f"({node.data})"
    if node.op == "var":
        return node.data
    if node.op == "load":
        buffer, coordinates = node.data
        mask = f" if {node.args[0]}" if node.args else ""
        return f"{buffer}[{', '.join(map(str, coordinates))}{mask}]"
    inside = [*map(str, node.args), *([str(node.data)] if node.op in ("random", "bound") else [])]
    names = {"cast": node.dtype, "bitcast": f"as_{node.dtype}", "call": getattr(node.data, "name", "")}
    return f"{names.get(node.op, node.op)}({', '.join(inside)})"
