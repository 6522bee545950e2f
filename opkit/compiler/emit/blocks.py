"""This module writes the expressions of a block as C: one that is used twice gets a variable, others are written in place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TypeAlias

from opkit.compiler.emit import callees, indices, near
from opkit.compiler.emit.expressions import apply, convert, reinterpret
from opkit.compiler.emit.prefetch import Prefetches
from opkit.compiler.emit.types import C_TYPES, number, variable_type
from opkit.compiler.ir import expr
from opkit.compiler.ir.expr import Callee, Expr
from opkit.compiler.ir.index import Atom, Div, Index, Mod, Value
from opkit.compiler.ir.kernel import Accumulator

Key: TypeAlias = Expr | Div | Mod
_TRIVIAL = ("const", "var")
_LONG = 160  # characters, from which on an expression gets a name, so that no line grows without end


@dataclasses.dataclass
class CWriter:
    """The C text of a function so far.

    Attributes:
        lines: its lines.
        depth: the number of open blocks.
        names: the number of named variables.
        accumulators: those declared so far, by name.
        fails: whether the function needs a label to jump to on failure.
        near: the types whose functions for arguments near zero it calls.
        dtypes: the dtypes of the arguments.
        streamed: the arguments that are written past the caches.
        prefetches: the rows that it prefetches.
        callees: the numbers of libraries' functions in the runtime's table.
    """

    lines: list[str] = dataclasses.field(default_factory=list)
    depth: int = 1
    names: int = 0
    accumulators: dict[str, Accumulator] = dataclasses.field(default_factory=dict)
    fails: bool = False
    near: frozenset[str] = frozenset()
    dtypes: dict[str, str] = dataclasses.field(default_factory=dict)
    streamed: frozenset[str] = frozenset()
    prefetches: Prefetches = dataclasses.field(default_factory=Prefetches)
    callees: Mapping[Callee, int] = dataclasses.field(default_factory=dict[Callee, int])

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def name(self, ctype: str, text: str) -> str:
        """Give a value a name."""
        self.names += 1
        self.line(f"const {ctype} t{self.names} = {text};")
        return f"t{self.names}"


@dataclasses.dataclass
class CScope:
    """The names and values that are visible in a block.

    Attributes:
        writer: the text that the block is written to.
        spelled: expressions that were computed before and are still valid, with their C text.
        reads: the buffers and accumulators that each expression depends on.
        uses: how often other expressions use each expression of the block's own statements.
        rows: the row for each buffer that is filled through one, and the index in it.
    """

    writer: CWriter
    spelled: dict[Key, str]
    reads: dict[Key, frozenset[str]]
    uses: dict[Expr, int]
    rows: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def within(self, roots: Iterable[Expr]) -> CScope:
        """Return the scope of a block inside, whose own statements need ``roots``."""
        return CScope(self.writer, dict(self.spelled), self.reads, _uses(roots), dict(self.rows))

    def forget(self, changed: frozenset[str]) -> None:
        """Drop the expressions whose value may have changed."""
        stale = [key for key in self.spelled if self.reads.get(key, frozenset()) & changed]
        for key in stale:
            del self.spelled[key]

    def value(self, root: Expr, named: bool = False) -> str:
        """Return an expression; ``named``: as the name of a variable, or a number."""
        once: dict[Key, str] = {}
        for node in _missing(root, self.spelled):
            self._spell(node, once, named and node is root)
        return self.spelled.get(root) or once[root]

    def index(self, at: Index) -> str:
        """Return an index; expressions in it are computed in variables first."""
        for root in values(at):
            self.value(root, named=True)
        return self._index(at, {})

    def fails(self, root: Expr) -> bool:
        """Return whether computing it can stop the program."""
        return any(node.op in expr.CHECKS for node in _missing(root, self.spelled))

    def _spell(self, node: Expr, once: dict[Key, str], named: bool) -> None:
        self.reads[node] = frozenset(_own(node)).union(*(self.reads[child] for child in _children(node)))
        if node.op == "where":
            for arm in node.args[1:]:  # both arms are computed: a choice that need not jump can be vectorised
                self._name_value(arm, once)
        args = [self.spelled.get(arg) or once[arg] for arg in node.args]
        text = once[node] = _TEXTS.get(node.op, _scalar)(
            self, node, args, [self._index(at, once) for at in expr.indices(node)]
        )
        if node.op in expr.CHECKS or named or self.uses.get(node, 0) > 1 or len(text) > _LONG:
            self._name_value(node, once)

    def _name_value(self, node: Expr, once: dict[Key, str]) -> None:
        """Give an expression a variable if it has none."""
        if node not in self.spelled and node.op not in _TRIVIAL:
            text = once[node]
            self.spelled[node] = text if text.isidentifier() else self.writer.name(variable_type(node.dtype), text)

    def _index(self, at: Index, once: dict[Key, str]) -> str:
        return indices.text(at, lambda atom: self._atom(atom, once))

    def _atom(self, atom: Atom, once: dict[Key, str]) -> str:
        if isinstance(atom, Value):
            return self.spelled.get(atom.expr) or once[atom.expr]
        if not isinstance(atom, Div | Mod):
            return indices.plain(atom)
        if atom not in self.spelled:
            text = indices.divided(atom, lambda inner: self._atom(inner, once))
            self.spelled[atom] = self.writer.name("int64_t", text)
            inside = values(atom.dividend) + values(atom.divisor)
            self.reads[atom] = frozenset[str]().union(*(self.reads[root] for root in inside))
        return self.spelled[atom]


# ---- what an expression depends on -----------------------------------------------------------------------------------


def values(at: Index) -> list[Expr]:
    """Return the expressions that an index is computed from."""
    return [leaf.expr for leaf in at.leaves() if isinstance(leaf, Value)]


def _children(node: Expr) -> list[Expr]:
    return [*node.args, *(root for at in expr.indices(node) for root in values(at))]


def _own(node: Expr) -> list[str]:
    """Return the buffer or variable that a node itself reads."""
    return [node.data[0]] if node.op == "load" else [node.data] if node.op == "var" else []


def _missing(root: Expr, known: Container[object]) -> list[Expr]:
    """Return each node that is not known, what it needs first."""
    order: list[Expr] = []
    seen: set[Expr] = set()
    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen and node not in known:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in reversed(_children(node))]
    return order


def _uses(roots: Iterable[Expr]) -> dict[Expr, int]:
    counts: dict[Expr, int] = {}
    seen: set[Expr] = set()
    for root in roots:
        counts[root] = counts.get(root, 0) + 1
        for node in _missing(root, seen):
            seen.add(node)
            for child in _children(node):
                counts[child] = counts.get(child, 0) + 1
    return counts


# ---- one node --------------------------------------------------------------------------------------------------------


def _load(scope: CScope, node: Expr, args: list[str], at: list[str]) -> str:
    element = f"p_{node.data[0]}[{at[0]}]"
    return f"({args[0]} ? {element} : {number(0, node.dtype)})" if args else element


def _var(scope: CScope, node: Expr, args: list[str], at: list[str]) -> str:
    accumulator = scope.writer.accumulators.get(node.data)
    name = f"v_{node.data}"
    if accumulator is None or not marks_nan(accumulator):
        return name
    return f"(v_{node.data}_nan ? {number(math.nan, node.dtype)} : {name})"


def _bound(scope: CScope, node: Expr, args: list[str], at: list[str]) -> str:
    """Checked in a statement of its own, from which the function ends."""
    x, n = scope.writer.name("int64_t", args[0]), scope.writer.name("int64_t", at[0])
    scope.writer.fails = True
    scope.writer.line(f"if ({x} < -{n} || {x} >= {n}) {{ opkit_fail(runtime, 1, {x}, {n}); goto end; }}")
    return f"({x} < 0 ? {x} + {n} : {x})"


def _nonzero(scope: CScope, node: Expr, args: list[str], at: list[str]) -> str:
    x = scope.writer.name(C_TYPES[node.dtype], args[0])
    scope.writer.fails = True
    scope.writer.line(f"if ({x} == 0) {{ opkit_fail(runtime, 3, 0, 0); goto end; }}")
    return x


def _scalar(scope: CScope, node: Expr, args: list[str], at: list[str]) -> str:
    if scope.writer.near and near.has(node):
        text, dtype = near.argument(node, args[0])
        x = scope.writer.name(C_TYPES[dtype], text)
        scope.writer.line(near.far_statement(node, x))
        return near.call(node, x)
    return apply(node.op, node.args[-1].dtype, args, node.dtype)


_TEXTS: dict[str, Callable[[CScope, Expr, list[str], list[str]], str]] = {
    "const": lambda scope, node, args, at: number(node.data, node.dtype),
    "index": lambda scope, node, args, at: at[0] if at[0].isidentifier() else f"({at[0]})",
    "load": _load,
    "var": _var,
    "random": lambda scope, node, args, at: f"opk_random_{node.dtype}({args[0]}, {at[0]})",
    "bound": _bound,
    "nonzero": _nonzero,
    "call": lambda scope, node, args, at: callees.text(node, scope.writer.callees[node.data], args),
    "cast": lambda scope, node, args, at: convert(args[0], node.args[0].dtype, node.dtype),
    "bitcast": lambda scope, node, args, at: reinterpret(args[0], node.args[0].dtype, node.dtype),
}


def marks_nan(accumulator: Accumulator) -> bool:
    """Return whether a flag records NaN: then maximum and minimum are plain comparisons, which can be vectorised."""
    return accumulator.reduction in ("max", "min") and accumulator.dtype in ("f32", "f64")
