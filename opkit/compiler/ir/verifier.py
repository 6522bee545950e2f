"""This module verifies that a program or a kernel is well formed; tests run it, and the rules of users are checked with it.

>>> from opkit.compiler.ir.expr import load
>>> from opkit.compiler.ir.index import axis
>>> from opkit.compiler.ir.kernel import KernelArgument, Kernel, Store
>>> try:
...     verify_kernel(Kernel("k", (KernelArgument("y", "f32", True),), (), (Store("y", axis(0, 4), load("y", "f32", 0)),)))
... except CompilerError as error:
...     print(error)
kernel k, y[a0] = y[0]: a0 is used outside of its loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index
from opkit.compiler.ir.kernel import Accumulator, Kernel, Let, Loop, Scratch, Statement, Store, Update
from opkit.compiler.ir.ops import OPS, REDUCTIONS
from opkit.compiler.ir.printer import statements_text, step_text
from opkit.compiler.ir.program import Compute, Extern, Program, ScalarItem, Step, Strided, reads
from opkit.compiler.ir.verifier_expr import KnownNames, verify_expr, verify_index
from opkit.errors import CompilerError

_POSITIONED = ("argmax", "argmin")


# ---- kernels ---------------------------------------------------------------------------------------------------------


def verify_kernel(kernel: Kernel) -> None:
    """
    Raises:
        CompilerError: an op is given what it does not take, or something is used where it is not known.
    """
    place = f"kernel {kernel.name}"
    names = [a.buffer for a in kernel.arguments]
    _require(len(set(names)) == len(names), place, f"its arguments {names} are not all different")
    known = KnownNames(place, {a.buffer: (a.dtype, 1) for a in kernel.arguments}, frozenset(kernel.sizes))
    nest = _Nest(known, {a.buffer for a in kernel.arguments if a.written})
    _body(kernel.body, nest)


@dataclasses.dataclass
class _Nest:
    """The names that are visible, and the statements that are allowed, at a place in a loop nest.

    Attributes:
        known: for expressions.
        written: the buffers that may be stored to.
        accumulators: those declared.
        names: all names so far, which must not be used again.
        parallel: whether only parallel loops are around.
        vector: whether a vector loop is around.
    """

    known: KnownNames
    written: set[str]
    accumulators: dict[str, Accumulator] = dataclasses.field(default_factory=dict)
    names: set[str] = dataclasses.field(default_factory=set)
    parallel: bool = True
    vector: bool = False

    def within(self, **changes: Any) -> _Nest:
        """Return a block inside, whose names end with it."""
        copied = dataclasses.replace(self, written=set(self.written), accumulators=dict(self.accumulators), **changes)
        return dataclasses.replace(copied, known=copied.known.copy())


def _body(body: Iterable[Statement], nest: _Nest) -> None:
    start = nest.known.place
    for statement in body:
        line = statements_text([statement])[0] if not isinstance(statement, Loop) else f"loop a{statement.axis.number}"
        nest.known.place = f"{start}, {line}"
        _STATEMENTS[type(statement)](statement, nest)
        nest.known.place = start


def _loop(loop: Loop, nest: _Nest) -> None:
    place = nest.known.place
    verify_index(loop.axis.extent, nest.known)
    _require(loop.axis.number not in nest.known.axes, place, "a loop around it has the same number")
    _require(loop.how in ("parallel", "plain", "vector"), place, f"how={loop.how!r} is not known")
    _require(loop.how != "parallel" or nest.parallel, place, "a parallel loop stands inside another statement's block")
    _require(loop.how != "parallel" or len(loop.body) > 0, place, "a parallel loop is empty")
    _require(not nest.vector, place, "a loop stands in a vector loop, which must be the innermost")
    inner = nest.within(parallel=nest.parallel and loop.how == "parallel", vector=loop.how == "vector")
    inner.known.axes[loop.axis.number] = loop.axis.extent
    if loop.stop is not None:
        _require(loop.how == "plain", place, f"a {loop.how} loop cannot stop early")
        verify_index(loop.stop[0], inner.known)
        verify_index(loop.stop[1], inner.known)
    _body(loop.body, inner)


def _name(name: str, nest: _Nest) -> None:
    _require(name not in nest.names, nest.known.place, f"the name {name} was given before")
    nest.names.add(name)


def _let(let: Let, nest: _Nest) -> None:
    verify_expr(let.value, nest.known)
    _name(let.name, nest)
    nest.known.variables[let.name] = let.value.dtype


def _scratch(scratch: Scratch, nest: _Nest) -> None:
    verify_index(scratch.length, nest.known)
    _require(not scratch.length.axes(), nest.known.place, "its length depends on a loop")
    _require(scratch.name not in nest.known.buffers, nest.known.place, f"{scratch.name} is a buffer already")
    _name(scratch.name, nest)
    nest.known.buffers[scratch.name] = (scratch.dtype, 1)
    nest.written.add(scratch.name)


def _store(store: Store, nest: _Nest) -> None:
    place = nest.known.place
    verify_expr(store.value, nest.known)
    verify_index(store.at, nest.known)
    _require(store.buffer in nest.written, place, f"{store.buffer} is not an argument that is written, nor scratch")
    wanted = nest.known.buffers[store.buffer][0]
    _require(store.value.dtype == wanted, place, f"{store.value.dtype} is stored where {wanted} is held")
    _verify_update(store.update, place)
    _require(not store.atomic or store.update is not None, place, "only a store with an update can be atomic")


def _accumulator(accumulator: Accumulator, nest: _Nest) -> None:
    place = nest.known.place
    _require(accumulator.reduction in REDUCTIONS, place, f"{accumulator.reduction!r} is not a reduction")
    _require(accumulator.dtype in DTYPES, place, f"{accumulator.dtype!r} is not a type")
    _name(accumulator.name, nest)
    nest.accumulators[accumulator.name] = accumulator
    nest.known.variables[accumulator.name] = accumulator.dtype
    if accumulator.reduction in _POSITIONED:
        nest.known.variables[f"{accumulator.name}_at"] = "i64"


def _update(update: Update, nest: _Nest) -> None:
    place, accumulator = nest.known.place, nest.accumulators.get(update.name)
    verify_expr(update.value, nest.known)
    _require(accumulator is not None, place, f"there is no accumulator {update.name} here")
    assert accumulator is not None
    wanted = (accumulator.dtype, accumulator.reduction)
    _require((update.value.dtype, update.reduction) == wanted, place, f"the accumulator is {' '.join(wanted)}")
    _require((update.at is not None) == (update.reduction in _POSITIONED), place, "a position goes with argmax, argmin")
    if update.at is not None:
        verify_index(update.at, nest.known)


_STATEMENTS: dict[type, Callable[[Any, _Nest], None]] = {
    Loop: _loop,
    Let: _let,
    Scratch: _scratch,
    Store: _store,
    Accumulator: _accumulator,
    Update: _update,
}


# ---- programs --------------------------------------------------------------------------------------------------------


def verify_program(program: Program) -> None:
    """
    Raises:
        CompilerError: a step uses a buffer before it is filled, an axis or a type that does not fit, or the like.
    """
    place = f"program {program.name}"
    known = KnownNames(
        place, {b.name: (b.dtype, len(b.shape)) for b in program.buffers.values()}, frozenset(program.sizes)
    )
    for name, buffer in program.buffers.items():
        _require(buffer.name == name, place, f"the buffer {buffer.name} is listed as {name}")
        _require(len(buffer.shape) == len(buffer.strides), place, f"{name} has not as many strides as sizes")
        _require(buffer.role in ("input", "constant", "made"), place, f"{name} has the role {buffer.role!r}")
        _require(buffer.whole is None or buffer.whole.whole is None, place, f"{name} is a part of a part")
    filled = {name for name, buffer in program.buffers.items() if buffer.role != "made"}
    for step in program.steps:
        _step(program, step, dataclasses.replace(known, place=f"{place}, {step_text(step)}"), filled)
    _buffers_are(program.outputs, filled, known)


def _step(program: Program, step: Step, known: KnownNames, filled: set[str]) -> None:
    if isinstance(step, Extern):
        _buffers_are((step.args, step.kwargs), filled, known)
        made = [name for name in step.outputs if isinstance(name, str)]
        for name in [*made, *step.mutated]:
            _require(name in known.buffers, known.place, f"there is no buffer {name}")
        filled.update(program.with_parts(made))
        return
    known.readable = frozenset(filled)
    _compute(step, known)
    for name in (step.buffer, *reads(step)):
        _require(name not in program.parts, known.place, f"{name} is read and written by its parts")
    filled.add(step.buffer)
    filled.update(whole for whole, parts in program.parts.items() if filled.issuperset(parts))


def _compute(step: Compute, known: KnownNames) -> None:
    place = known.place
    for extent in step.axes:
        verify_index(extent, known)
        _require(not extent.axes(), place, "an axis is as long as another says")
    known.axes = dict(enumerate(step.axes))
    _require(step.buffer in known.buffers, place, f"there is no buffer {step.buffer}")
    dtype, rank = known.buffers[step.buffer]
    _require(len(step.target) == rank, place, f"{step.buffer} has {rank} dimensions, and {len(step.target)} are given")
    for at in step.target:
        verify_index(at, known)
    verify_expr(step.body, known)
    _reduction(step, dtype, place)
    _verify_update(step.update, place)


def _reduction(step: Compute, dtype: str, place: str) -> None:
    _require((step.reduction is None) == (not step.reduced), place, "a reduction goes with axes that are reduced")
    if step.reduction is None:
        _require(step.body.dtype == dtype, place, f"{step.body.dtype} is stored where {dtype} is held")
        return
    name = step.reduction.removeprefix("scan:")
    _require(name in REDUCTIONS, place, f"{step.reduction!r} is not a reduction")
    _require(step.reduced <= set(range(len(step.axes))), place, "an axis is reduced that is not there")
    scan = name != step.reduction
    _require(not scan or len(step.reduced) == 1, place, "a scan goes along one axis")
    used = {axis.number for at in step.target for axis in at.axes()}
    _require(scan or not used & step.reduced, place, "the target depends on an axis that is reduced")


def _buffers_are(argument: Any, filled: set[str], known: KnownNames) -> None:
    """Every buffer among the arguments of a call is filled."""
    if isinstance(argument, Strided | ScalarItem):
        _require(argument.buffer in known.buffers, known.place, f"there is no buffer {argument.buffer}")
        _require(argument.buffer in filled, known.place, f"{argument.buffer} is used before it is filled")
        for at in (*argument.shape, *argument.strides, argument.offset) if isinstance(argument, Strided) else ():
            verify_index(at, known)
    elif isinstance(argument, Index):
        verify_index(argument, known)
    elif isinstance(argument, list | tuple | Mapping):
        for each in argument.values() if isinstance(argument, Mapping) else argument:
            _buffers_are(each, filled, known)


def _verify_update(update: str | None, place: str) -> None:
    fits = update is None or (update in OPS and OPS[update].arity == 2 and OPS[update].result == "same")
    _require(fits, place, f"{update!r} does not bring two values of a type together")


def _require(holds: bool, place: str, otherwise: str) -> None:
    if not holds:
        raise CompilerError(f"{place}: {otherwise}.")
