"""This module writes the expressions of a block as C: one that is used twice gets a variable, others are written in place.

A library function of runs of elements takes values, each a pointer, an integer or a float, as ``opk_trampoline`` of opkit.h says.

sin, cos and tan of arguments of any size take twice as long as of usual sizes, and a branch in a loop would prevent
vectorisation. So a kernel that calls them is written in two forms. The first calls functions for arguments near zero, records in
``far_f32`` and ``far_f64`` whether an argument was too large, and returns that; the second one then recomputes everything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from opkit.compiler.emit.analysis import children, own_reads, postorder, use_counts, values
from opkit.compiler.emit.c import expressions
from opkit.compiler.emit.c.expressions import C_TYPES, apply, convert, number, reinterpret, variable_type
from opkit.compiler.emit.c.functions.trigonometric import LIMITS
from opkit.compiler.emit.c.prefetch import Prefetches
from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Callee, Expr
from opkit.compiler.ir.index import Atom, Div, Index, Mod, Value
from opkit.compiler.ir.kernel import Accumulator, Kernel, Let, Loop, Scratch, Statement, Store, Update, walk

Key: TypeAlias = Expr | Div | Mod
_TRIVIAL = ("const", "var")
TRUE = "1"  # the text of a mask that is known
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
        return CScope(self.writer, dict(self.spelled), self.reads, use_counts(roots), dict(self.rows))

    def forget(self, changed: frozenset[str]) -> None:
        """Drop the expressions whose value may have changed."""
        stale = [key for key in self.spelled if self.reads.get(key, frozenset()) & changed]
        for key in stale:
            del self.spelled[key]

    def value(self, root: Expr, named: bool = False) -> str:
        """Return an expression; ``named``: as the name of a variable, or a number."""
        once: dict[Key, str] = {}
        for node in postorder(root, self.spelled):
            self._spell(node, once, named and node is root)
        return self.spelled.get(root) or once[root]

    def index(self, at: Index) -> str:
        """Return an index; expressions in it are computed in variables first."""
        for root in values(at):
            self.value(root, named=True)
        return self._index(at, {})

    def fails(self, root: Expr) -> bool:
        """Return whether computing it can stop the program."""
        return any(node.op in expr.CHECKS for node in postorder(root, self.spelled))

    def _spell(self, node: Expr, once: dict[Key, str], named: bool) -> None:
        self.reads[node] = frozenset(own_reads(node)).union(*(self.reads[child] for child in children(node)))
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
        return expressions.index_text(at, lambda atom: self._atom(atom, once))

    def _atom(self, atom: Atom, once: dict[Key, str]) -> str:
        if isinstance(atom, Value):
            return self.spelled.get(atom.expr) or once[atom.expr]
        if not isinstance(atom, Div | Mod):
            return expressions.atom_name(atom)
        if atom not in self.spelled:
            text = expressions.division(atom, lambda inner: self._atom(inner, once))
            self.spelled[atom] = self.writer.name("int64_t", text)
            inside = values(atom.dividend) + values(atom.divisor)
            self.reads[atom] = frozenset[str]().union(*(self.reads[root] for root in inside))
        return self.spelled[atom]


# ---- one node --------------------------------------------------------------------------------------------------------


def marks_nan(accumulator: Accumulator) -> bool:
    """Return whether a flag records NaN: then maximum and minimum are plain comparisons, which can be vectorised."""
    return accumulator.reduction in ("max", "min") and accumulator.dtype in ("f32", "f64")


def _load(scope: CScope, node: Expr, args: list[str], at: list[str]) -> str:
    element = f"p_{node.data[0]}[{at[0]}]"
    if args and args[0] == TRUE:
        return element
    return f"({args[0]} ? {element} : {number(0, node.dtype)})" if args else element


def _var(scope: CScope, node: Expr, args: list[str], at: list[str]) -> str:
    accumulator = scope.writer.accumulators.get(node.data)
    name = f"v_{node.data}"
    if accumulator is None or not marks_nan(accumulator):
        return name
    return f"(v_{node.data}_nan ? {number(math.nan, node.dtype)} : {name})"


def _bound(scope: CScope, node: Expr, args: list[str], at: list[str]) -> str:
    """Return a checked index: a statement of its own leaves the function if it is out of range."""
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
    if scope.writer.near and has_near_form(node):
        t = _compute_type(node)
        x = scope.writer.name(C_TYPES[t], convert(args[0], node.dtype, t))
        is_far = f"__builtin_fabs{'f' if t == 'f32' else ''}({x}) > {LIMITS[f'{node.op}_{t}']}"
        scope.writer.line(f"far_{t} |= {is_far};")
        return convert(f"opk_{node.op}_near_{t}({x})", t, node.dtype)
    return apply(node.op, node.args[-1].dtype, args, node.dtype)


_TEXTS: dict[str, Callable[[CScope, Expr, list[str], list[str]], str]] = {
    "const": lambda scope, node, args, at: number(node.data, node.dtype),
    "index": lambda scope, node, args, at: at[0] if at[0].isidentifier() else f"({at[0]})",
    "load": _load,
    "var": _var,
    "random": lambda scope, node, args, at: f"opk_random_{node.dtype}({args[0]}, {at[0]})",
    "bound": _bound,
    "nonzero": _nonzero,
    "call": lambda scope, node, args, at: call_text(node, scope.writer.callees[node.data], args),
    "cast": lambda scope, node, args, at: convert(args[0], node.args[0].dtype, node.dtype),
    "bitcast": lambda scope, node, args, at: reinterpret(args[0], node.args[0].dtype, node.dtype),
}


# ---- calls of library functions --------------------------------------------------------------------------------------


def declare_callee(callee: Callee, number: int) -> str:
    """Return the declaration of a function, from the runtime's table."""
    parameters, result = ", ".join(variable_type(t) for t in callee.arguments), variable_type(callee.result)
    if callee.run_parameters:
        parameters, result = "const union opkit_value *, const char **", "int32_t"
    return f"{result} (*const c_{number})({parameters}) = ({result} (*)({parameters}))runtime->functions[{number}];"


def call_text(node: Expr, number: int, arguments: Sequence[str]) -> str:
    """Return the value of a call; of a function of runs, of a run of one."""
    callee: Callee = node.data
    if not callee.run_parameters:
        return f"c_{number}({', '.join(arguments)})"
    kinds = argument_kinds(callee)
    declared = "".join(
        f"const {C_TYPES[dtype]} e{n} = {argument}; "
        for n, (kind, dtype, argument) in enumerate(zip(kinds, callee.arguments, arguments, strict=True))
        if kind == "elements"
    )
    arguments = [f"&e{n}" if kind == "elements" else arguments[n] for n, kind in enumerate(kinds)]
    return f"({{ {declared}{C_TYPES[callee.result]} e; {run_call(callee, number, arguments, '&e', '1')} e; }})"


def run_call(callee: Callee, number: int, arguments: Iterable[str], result: str, count: str) -> str:
    """Return the statement that calls a function of runs; its arguments are pointers and numbers."""
    rest = iter(arguments)
    known = {"result": f".p = {result}", "count": f".i = {count}"}
    members = {"elements": "p", "i": "i", "f": "f"}
    values = [known.get(kind) or f".{members[kind]} = {next(rest)}" for kind in callee.run_parameters]
    listed = ", ".join(f"{{{each}}}" for each in values)
    return f"{{ const char *said; c_{number}((const union opkit_value[]){{{listed}}}, &said); }}"


def argument_kinds(callee: Callee) -> list[str]:
    """Return what the arguments of a function of runs are: "elements", or numbers."""
    return [kind for kind in callee.run_parameters if kind not in ("result", "count")]


# ---- functions for arguments near zero -------------------------------------------------------------------------------

FAR_FLAGS = {"f32": "int32_t", "f64": "int64_t"}
"""The type of the flag, as wide as that of the arguments, so that a vector of one is compared into a vector of the other."""


def near_types(kernel: Kernel, exclusive: bool) -> frozenset[str]:
    """Return the types of the kernel's functions that have a form for arguments near zero; none if it cannot run twice.

    It can run twice unless it reads what it writes, or a number that too large an argument gave decides where it reads.
    """
    statements = list(walk(kernel.body))
    roots = [s.value for s in statements if isinstance(s, Let | Store | Update)]
    nodes = {node for root in roots for node in root.walk()}
    called = types_with_near_form(nodes)
    return called if called and exclusive and _can_run_twice(statements, nodes) else frozenset()


def types_with_near_form(nodes: Iterable[Expr]) -> frozenset[str]:
    """Return the types of the functions among these nodes that have a form for arguments near zero."""
    return frozenset(_compute_type(node) for node in nodes if has_near_form(node))


def has_near_form(node: Expr) -> bool:
    """Return whether a node is a call of such a function."""
    return bool(node.args) and f"{node.op}_{_compute_type(node)}" in LIMITS


def _compute_type(node: Expr) -> str:
    return DTYPES[node.dtype].compute


def _can_run_twice(statements: list[Statement], nodes: set[Expr]) -> bool:
    stores = [s for s in statements if isinstance(s, Store)]
    scratch = {s.name for s in statements if isinstance(s, Scratch)}
    loaded = {node.data[0] for node in nodes if node.op == "load"}
    at = [*(s.at for s in stores), *(each for node in nodes for each in expr.indices(node))]
    return (
        not any(s.update is not None for s in stores)
        and not {s.buffer for s in stores} & (loaded - scratch)
        and not any(isinstance(s, Loop) and s.stop is not None for s in statements)
        and not any(map(values, at))
        and not any(node.op in expr.CHECKS for node in nodes)
    )
