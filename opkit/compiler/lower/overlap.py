"""Reorder a program so that collectives communicate while kernels run.

Waits move down, each to before the first step that reads its result or overwrites what the collective reads. A wait keeps what
the collective reads in memory. So the oldest wait goes no further while those that move keep more than ``MAX_KEPT`` bytes.

Then collectives move up, each to after the step that writes what it reads. None passes a wait, or another call of an operator
that may communicate: their order stays that of the graph, which is the same in all processes. Of results that exist earlier than
in the graph, there are at most those that were to be started before the next wait.
"""

from __future__ import annotations

import dataclasses

from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import product
from opkit.compiler.ir.program import WAIT, Extern, Program, Step, is_collective, reads

MAX_KEPT = 64 << 20  # bytes


def overlapped(program: Program) -> Program:
    """Return the program with collectives as early, and waits as late, as the rule allows."""
    if not any(map(_starts, program.steps)):
        return program
    return dataclasses.replace(program, steps=tuple(_starts_early(program, _waits_late(program))))


def _waits_late(program: Program) -> list[Step]:
    found: list[Step] = []
    waiting: list[Step] = []
    for step in program.steps:
        due = [wait for wait in waiting if _depend(program, wait, step)]
        waiting = [wait for wait in waiting if wait not in due]
        found += due
        (waiting if isinstance(step, Extern) and step.target == WAIT else found).append(step)
        while len(waiting) > 1 and sum(_kept(program, wait) for wait in waiting) > MAX_KEPT:
            found.append(waiting.pop(0))
    return found + waiting


def _starts_early(program: Program, steps: list[Step]) -> list[Step]:
    found: list[Step] = []
    for step in steps:
        at = len(found)
        while (
            _starts(step) and at and not _may_communicate(found[at - 1]) and not _depend(program, found[at - 1], step)
        ):
            at -= 1
        found.insert(at, step)
    return found


def _starts(step: Step) -> bool:
    return isinstance(step, Extern) and is_collective(step.target)


def _may_communicate(step: Step) -> bool:
    """Return whether a step calls an operator that is not one of torch's for a single process."""
    return isinstance(step, Extern) and not step.target.startswith("aten.")


def _depend(program: Program, first: Step, second: Step) -> bool:
    """Return whether one of two steps writes what the other reads or writes."""
    before, after = program.writes(first), program.writes(second)
    touched = {*program.reads(second), *after}
    return not touched.isdisjoint(before) or not set(after).isdisjoint(program.reads(first))


def _kept(program: Program, wait: Step) -> float:
    """Return the bytes that a wait keeps in memory apart from its result, and the caller's."""
    buffers = [program.buffers[name] for name in reads(wait)[1:]]
    made = [buffer for buffer in buffers if buffer.role == "made"]
    return sum(estimate(product(each.shape), program.sizes) * DTYPES[each.dtype].bytes for each in made)
