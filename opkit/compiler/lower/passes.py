"""Passes over a whole program.

They simplify expressions, merge equal computes, remove dead steps, and move copies to right after their source is written.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from opkit.compiler.ir.expr import Expr, make, rewrite
from opkit.compiler.ir.index import Index, Value, product, value
from opkit.compiler.ir.program import Compute, Extern, Program, ScalarItem, Step, Strided, reads, writes
from opkit.compiler.lower.inline import cost
from opkit.compiler.lower.rewrites import simplify


def tidied(program: Program) -> Program:
    """Return the program after every pass."""
    return with_copies_early(without_dead(without_repeats(with_simple_bodies(program))))


def with_simple_bodies(program: Program) -> Program:
    steps = tuple(
        dataclasses.replace(step, body=simplify(step.body)) if isinstance(step, Compute) else step
        for step in program.steps
    )
    return dataclasses.replace(program, steps=steps)


# ---- common subexpressions -------------------------------------------------------------------------------------------


def without_repeats(program: Program) -> Program:
    """Keep only the first of several computes with equal results.

    Buffers that are returned, and those that several steps write to, stay: the caller may write to one of two results.
    """
    written = collections.Counter(name for step in program.steps for name in program.writes(step))
    fixed = {name for name, count in written.items() if count > 1 or program.buffers[name].role != "made"}
    fixed |= set(program.with_parts(_buffers(program.outputs)))
    fixed |= {part for step in program.steps if isinstance(step, Extern) for part in _parts(program, step)}
    same: dict[str, str] = {}
    seen: dict[Any, str] = {}
    steps: list[Step] = []
    for found in program.steps:
        step = renamed(found, same)
        key = _key(program, step, fixed, written)
        if key is not None and isinstance(step, Compute) and seen.setdefault(key, step.buffer) != step.buffer:
            same[step.buffer] = seen[key]
        else:
            steps.append(step)
    return dataclasses.replace(program, steps=tuple(steps))


def _parts(program: Program, call: Extern) -> list[str]:
    """Return the parts of a call's arguments: it reads their memory."""
    return [part for name in reads(call) for part in program.parts.get(name, ())]


def _key(program: Program, step: Step, fixed: set[str], written: Mapping[str, int]) -> Any:
    """Return a key that is equal for computes that can be merged; None for a step that must stay."""
    if not isinstance(step, Compute) or step.update is not None or step.buffer in fixed:
        return None
    if any(written[name] > (program.buffers[name].role == "made") for name in reads(step)):
        return None  # a buffer that it reads changes while the program runs
    buffer = program.buffers[step.buffer]
    kind = (buffer.dtype, buffer.shape, buffer.strides)
    return kind, step.axes, step.target, step.body, step.reduction, step.reduced


def renamed(step: Step, names: dict[str, str]) -> Step:
    """Return a step with the buffers that it reads renamed."""
    if not any(name in names for name in reads(step)):
        return step
    if isinstance(step, Extern):
        args, kwargs = _renamed_argument(step.args, names), _renamed_argument(step.kwargs, names)
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


def _renamed_argument(argument: Any, names: dict[str, str]) -> Any:
    if isinstance(argument, Strided | ScalarItem):
        name = names.get(argument.buffer, argument.buffer)
        return dataclasses.replace(argument, buffer=name)
    if isinstance(argument, dict):
        return {key: _renamed_argument(a, names) for key, a in argument.items()}
    if isinstance(argument, list | tuple) and not hasattr(argument, "_fields"):
        return type(argument)(_renamed_argument(a, names) for a in argument)
    return argument


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
    if isinstance(step, Extern) and (step.mutated or any(isinstance(o, Index) for o in step.outputs)):
        return True
    if isinstance(step, Extern) and (step.effect or not step.outputs):
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
