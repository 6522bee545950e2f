"""Rewrites that simplify expressions and programs without changing results.

Identities of expressions hold for all values, also NaN, infinities and signed zeros. Passes over a whole program merge equal
computes, remove dead steps, and move copies to right after their source is written.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.expr import Expr, const, make, rewrite
from opkit.compiler.ir.index import Index, Value, product, value
from opkit.compiler.ir.ops import OPS
from opkit.compiler.ir.program import Compute, Extern, Program, Step, Strided, reads, renamed_argument, writes
from opkit.compiler.lower.overlap import overlapped

_FREE = frozenset({"const", "index", "load", "cast", "var", "bitcast", "neg"})  # a sign goes into the sum or product
_QUICK = frozenset(
    {"add", "sub", "mul", "abs", "min", "max", "where", "lt", "le", "eq", "ne", "and", "or", "xor", "not"}
)
_SLOW_COST = 10
_CALL_COST = 100  # of a library's function, whose code is unknown

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


def cost(root: Expr) -> int:
    """Return the cost of computing an expression; reading an element from memory costs about 6."""
    ops = [node.op for node in root.walk()]
    return sum(0 if op in _FREE else 1 if op in _QUICK else _CALL_COST if op == "call" else _SLOW_COST for op in ops)


def slow_cost(root: Expr) -> int:
    """Return the cost of the functions of floats and the divisions in an expression."""
    return _SLOW_COST * sum(is_float(node.dtype) and node.op not in _FREE | _QUICK for node in root.walk())


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
    """neg(neg(x)) and not(not(x)) are x"""
    return node.args[0].args[0] if node.args[0].op == node.op else None


def _same(node: Expr) -> Expr | None:
    """min(x, x), max(x, x), and(x, x) and or(x, x) are x"""
    return node.args[0] if node.args[0] is node.args[1] else None


def _minus_negative(node: Expr) -> Expr | None:
    """x - (-y) is x + y"""
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


# ---- programs ---------------------------------------------------------------------------------------------------------


def simplify_program(program: Program) -> Program:
    """Return the program with simpler expressions, and after every pass."""
    steps = tuple(
        dataclasses.replace(step, body=simplify(step.body)) if isinstance(step, Compute) else step
        for step in program.steps
    )
    simple = without_dead(without_repeats(dataclasses.replace(program, steps=steps)))
    return overlapped(with_copies_early(simple))


# ---- common subexpressions -------------------------------------------------------------------------------------------


_REPEATABLE = ("aten.searchsorted.",)
"""Calls whose results depend on their arguments alone, which models repeat: layers that pack sequences number the tokens each."""


def without_repeats(program: Program) -> Program:
    """Keep only the first of several computes, or calls of :data:`_REPEATABLE`, with equal results.

    Buffers that are returned, and those that several steps write to, stay: the caller may write to one of two results.
    """
    written = collections.Counter(name for step in program.steps for name in program.writes(step))
    fixed = {name for name, count in written.items() if count > 1 or program.buffers[name].role != "made"}
    fixed |= set(program.with_parts(_buffers(program.outputs)))
    calls = [step for step in program.steps if isinstance(step, Extern)]  # they read the memory of all parts
    fixed |= {part for call in calls for name in reads(call) for part in program.parts.get(name, ())}
    same: dict[str, str] = {}
    seen: dict[Any, str] = {}
    steps: list[Step] = []
    for found in program.steps:
        step = renamed(found, same)
        key = _key(program, step, fixed, written)
        results = [] if key is None else writes(step)
        if results and seen.setdefault(key, results[0]) != results[0]:
            same[results[0]] = seen[key]
        else:
            steps.append(step)
    return dataclasses.replace(program, steps=tuple(steps))


def _key(program: Program, step: Step, fixed: set[str], written: Mapping[str, int]) -> Any:
    """Return a key that is equal for steps that can be merged; None for a step that must stay."""
    repeatable = step.target.startswith(_REPEATABLE) if isinstance(step, Extern) else step.update is None
    if not repeatable or fixed.intersection(writes(step)):
        return None
    if any(written[name] > (program.buffers[name].role == "made") for name in reads(step)):
        return None  # a buffer that it reads changes while the program runs
    buffer = program.buffers[writes(step)[0]]
    kind = (buffer.dtype, buffer.shape, buffer.strides)
    if isinstance(step, Extern):
        return kind, step.target, repr(step.args), repr(step.kwargs)
    return kind, step.axes, step.target, step.body, step.reduction, step.reduced


def renamed(step: Step, names: dict[str, str]) -> Step:
    """Return a step with the buffers that it reads renamed."""
    if not any(name in names for name in reads(step)):
        return step
    if isinstance(step, Extern):
        args, kwargs = renamed_argument(step.args, names), renamed_argument(step.kwargs, names)
        return dataclasses.replace(step, args=args, kwargs=kwargs)
    target = tuple(_renamed_index(at, names) for at in step.target)
    return dataclasses.replace(step, body=renamed_loads(step.body, names), target=target)


def renamed_loads(body: Expr, names: dict[str, str]) -> Expr:
    """Return an expression with the buffers that it loads from renamed."""

    def change(node: Expr) -> Expr:
        if node.op == "load":
            buffer, coordinates = node.data
            moved = tuple(_renamed_index(at, names) for at in coordinates)
            return make("load", node.dtype, node.args, (names.get(buffer, buffer), moved))
        if node.op in ("index", "random", "bound"):
            return make(node.op, node.dtype, node.args, _renamed_index(node.data, names))
        return node

    return rewrite(body, change)


def _renamed_index(at: Index, names: dict[str, str]) -> Index:
    values = [leaf for leaf in at.leaves() if isinstance(leaf, Value)]
    if not values:
        return at
    # Not through ``substitute``, which would go into the expressions to replace axes.
    terms = {tuple(_renamed_atom(atom, names) for atom in monomial): c for monomial, c in at.terms.items()}
    return Index(terms)


def _renamed_atom(atom: Any, names: dict[str, str]) -> Any:
    if isinstance(atom, Value):
        (renamed_atom,) = value(renamed_loads(atom.expr, names)).atoms()
        return renamed_atom
    if hasattr(atom, "dividend"):
        return type(atom)(_renamed_index(atom.dividend, names), _renamed_index(atom.divisor, names))
    return atom


# ---- dead code -------------------------------------------------------------------------------------------------------


def without_dead(program: Program) -> Program:
    """Remove steps and buffers that neither a result nor a write to an input needs."""
    needed = set(program.with_parts(_buffers(program.outputs)))
    live: list[Step] = []
    for step in reversed(program.steps):
        if _is_needed(program, step, needed):
            needed |= set(program.reads(step))
            live.append(_without_unused(program, step, needed))
    live.reverse()
    used = needed | {name for step in live for name in writes(step)} | {n for n in program.inputs if isinstance(n, str)}
    used |= {program.buffers[name].memory for name in used}
    buffers = {name: buffer for name, buffer in program.buffers.items() if name in used}
    return dataclasses.replace(program, steps=tuple(live), buffers=buffers)


def _is_needed(program: Program, step: Step, needed: set[str]) -> bool:
    if isinstance(step, Extern):
        decides_size = any(isinstance(o, Index) for o in step.outputs)
        if step.mutated or step.effect or decides_size or not step.outputs:
            return True
    return any(name in needed or program.buffers[name].role != "made" for name in program.writes(step))


def _without_unused(program: Program, step: Step, needed: set[str]) -> Step:
    """Return an extern call without its unused results."""
    if not isinstance(step, Extern) or step.out:
        return step
    unused = {o for o in step.outputs if isinstance(o, str) and needed.isdisjoint(program.with_parts([o]))}
    outputs = tuple(None if o in unused else o for o in step.outputs)
    return dataclasses.replace(step, outputs=outputs)


def _buffers(argument: Iterable[Any]) -> list[str]:
    return [a.buffer for a in argument if isinstance(a, Strided)]


# ---- order -----------------------------------------------------------------------------------------------------------


def with_copies_early(program: Program) -> Program:
    """Move copies to right after their source is written, so that the source need not live until the end of the graph.

    These are copies to results and to inputs. A graph writes to its inputs at its end; here as soon as nothing reads their old
    values any more.
    """
    early = _early(program)
    order: list[list[Step]] = []  # a step, and the copies that follow it
    written: dict[str, int] = {}  # the last place in the order that writes to a buffer
    touched: dict[str, int] = {}  # or reads it
    for step in program.steps:
        reads_here, writes_here = program.reads(step), program.writes(step)
        after = max(
            [-1, *(written.get(name, -1) for name in reads_here), *(touched.get(name, -1) for name in writes_here)]
        )
        if after < 0 or early.isdisjoint(writes_here):
            after = len(order)
            order.append([])
        order[after].append(step)
        written |= dict.fromkeys(writes_here, after)
        touched |= dict.fromkeys([*writes_here, *reads_here], after)
    return dataclasses.replace(program, steps=tuple(step for steps in order for step in steps))


def _early(program: Program) -> set[str]:
    """Return the buffers that are only copies, and that no step reads or that are the caller's, in memory without aliases."""
    calls = [step for step in program.steps if isinstance(step, Extern) and step.aliases]
    aliased = set(program.with_parts(name for step in calls for name in (*reads(step), *writes(step))))
    used = {name for step in program.steps for name in program.reads(step)}
    found: set[str] = set()
    for step in program.steps:
        if isinstance(step, Compute) and _is_copy(program, step) and aliased.isdisjoint((step.buffer, *reads(step))):
            found |= {step.buffer} if program.buffers[step.buffer].role != "made" or step.buffer not in used else set()
    return found - {name for step in program.steps if not _is_copy(program, step) for name in program.writes(step)}


def _is_copy(program: Program, step: Step) -> bool:
    """Return whether a step only moves elements: as many as its one source buffer has."""
    if not isinstance(step, Compute) or step.reduction or step.update or cost(step.body):
        return False
    read = reads(step)
    return len(read) == 1 and product(step.axes) == product(program.buffers[read[0]].shape)
