"""Verify that a program or a kernel is well formed: tests do so, and the compiler for the rules of users.

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

from opkit.compiler.ir.dtypes import DTYPES, is_int
from opkit.compiler.ir.expr import Expr, indices
from opkit.compiler.ir.index import Axis, Div, Index, Mod, Symbol
from opkit.compiler.ir.kernel import Accumulator, Kernel, Let, Loop, Scratch, Statement, Store, Update
from opkit.compiler.ir.ops import OPS, REDUCTIONS
from opkit.compiler.ir.printer import statements_text, step_text
from opkit.compiler.ir.program import Compute, Extern, Program, ScalarItem, Step, Strided, reads
from opkit.errors import CompilerError

_POSITIONED = ("argmax", "argmin")


# ---- kernels ---------------------------------------------------------------------------------------------------------


def verify_kernel(kernel: Kernel) -> None:
    """Verify a kernel.

    Raises:
        CompilerError: an op has arguments that it does not take, or a name is used where it is not known.
    """
    known = KnownNames(
        f"kernel {kernel.name}", {a.buffer: (a.dtype, 1) for a in kernel.arguments}, frozenset(kernel.sizes)
    )
    names = [a.buffer for a in kernel.arguments]
    known.require(len(set(names)) == len(names), f"its arguments {names} are not all different")
    _body(kernel.body, _Nest(known, {a.buffer for a in kernel.arguments if a.written}))


@dataclasses.dataclass
class _Nest:
    """The names that are visible, and the statements that are allowed, at a place in a loop nest.

    Attributes:
        known: the names that expressions may use.
        written: the buffers that may be stored to.
        accumulators: the accumulators that are declared.
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
        known = dataclasses.replace(
            self.known,
            buffers=dict(self.known.buffers),
            axes=dict(self.known.axes),
            variables=dict(self.known.variables),
        )
        written, accumulators = set(self.written), dict(self.accumulators)
        return dataclasses.replace(self, known=known, written=written, accumulators=accumulators, **changes)

    def declare(self, name: str) -> None:
        self.known.require(name not in self.names, f"the name {name} is used already")
        self.names.add(name)


def _body(body: Iterable[Statement], nest: _Nest) -> None:
    start = nest.known.place
    for statement in body:
        line = statements_text([statement])[0] if not isinstance(statement, Loop) else f"loop a{statement.axis.number}"
        nest.known.place = f"{start}, {line}"
        _STATEMENTS[type(statement)](statement, nest, nest.known)
        nest.known.place = start


def _loop(loop: Loop, nest: _Nest, known: KnownNames) -> None:
    verify_index(loop.axis.extent, known)
    known.require(loop.axis.number not in known.axes, "a loop around it has the same number")
    known.require(loop.how in ("parallel", "plain", "vector"), f"how={loop.how!r} is not known")
    known.require(loop.how != "parallel" or nest.parallel, "a parallel loop stands inside another statement's block")
    known.require(loop.how != "parallel" or len(loop.body) > 0, "a parallel loop is empty")
    known.require(not nest.vector, "a loop stands in a vector loop, which must be the innermost")
    inner = nest.within(parallel=nest.parallel and loop.how == "parallel", vector=loop.how == "vector")
    inner.known.axes[loop.axis.number] = loop.axis.extent
    if loop.stop is not None:
        known.require(loop.how == "plain", f"a {loop.how} loop cannot stop early")
        verify_index(loop.stop[0], inner.known)
        verify_index(loop.stop[1], inner.known)
    _body(loop.body, inner)


def _let(let: Let, nest: _Nest, known: KnownNames) -> None:
    verify_expr(let.value, known)
    nest.declare(let.name)
    known.variables[let.name] = let.value.dtype


def _scratch(scratch: Scratch, nest: _Nest, known: KnownNames) -> None:
    verify_index(scratch.length, known)
    known.require(not scratch.length.axes(), "its length depends on a loop")
    known.require(scratch.name not in known.buffers, f"{scratch.name} is a buffer already")
    nest.declare(scratch.name)
    known.buffers[scratch.name] = (scratch.dtype, 1)
    nest.written.add(scratch.name)


def _store(store: Store, nest: _Nest, known: KnownNames) -> None:
    verify_expr(store.value, known)
    verify_index(store.at, known)
    known.require(store.buffer in nest.written, f"{store.buffer} is not an argument that is written, nor scratch")
    expected = known.buffers[store.buffer][0]
    known.require(store.value.dtype == expected, f"{store.value.dtype} is stored to a buffer of {expected}")
    _verify_update(store.update, known)
    known.require(not store.atomic or store.update is not None, "only a store with an update can be atomic")


def _accumulator(accumulator: Accumulator, nest: _Nest, known: KnownNames) -> None:
    known.require(accumulator.reduction in REDUCTIONS, f"{accumulator.reduction!r} is not a reduction")
    known.require(accumulator.dtype in DTYPES, f"{accumulator.dtype!r} is not a type")
    nest.declare(accumulator.name)
    nest.accumulators[accumulator.name] = accumulator
    known.variables[accumulator.name] = accumulator.dtype
    if accumulator.reduction in _POSITIONED:
        known.variables[f"{accumulator.name}_at"] = "i64"


def _update(update: Update, nest: _Nest, known: KnownNames) -> None:
    verify_expr(update.value, known)
    accumulator = nest.accumulators.get(update.name)
    known.require(accumulator is not None, f"there is no accumulator {update.name} here")
    assert accumulator is not None
    expected = (accumulator.dtype, accumulator.reduction)
    known.require((update.value.dtype, update.reduction) == expected, f"the accumulator is {' '.join(expected)}")
    positioned = update.reduction in _POSITIONED
    known.require((update.at is not None) == positioned, "argmax and argmin alone have a position")
    if update.at is not None:
        verify_index(update.at, known)


_STATEMENTS: dict[type, Callable[[Any, _Nest, KnownNames], None]] = {
    Loop: _loop,
    Let: _let,
    Scratch: _scratch,
    Store: _store,
    Accumulator: _accumulator,
    Update: _update,
}


# ---- programs --------------------------------------------------------------------------------------------------------


def verify_program(program: Program) -> None:
    """Verify a program.

    Raises:
        CompilerError: a step uses a buffer before it is filled, or an axis or a type is wrong.
    """
    place = f"program {program.name}"
    known = KnownNames(
        place, {b.name: (b.dtype, len(b.shape)) for b in program.buffers.values()}, frozenset(program.sizes)
    )
    for name, buffer in program.buffers.items():
        known.require(buffer.name == name, f"the buffer {buffer.name} is listed as {name}")
        known.require(len(buffer.shape) == len(buffer.strides), f"{name} has not as many strides as sizes")
        known.require(buffer.role in ("input", "number", "constant", "made"), f"{name} has the role {buffer.role!r}")
        known.require(buffer.whole is None or buffer.whole.whole is None, f"{name} is a part of a part")
    filled = {name for name, buffer in program.buffers.items() if buffer.role != "made"}
    for step in program.steps:
        _step(program, step, dataclasses.replace(known, place=f"{place}, {step_text(step)}"), filled)
    _verify_filled(program.outputs, filled, known)


def _step(program: Program, step: Step, known: KnownNames, filled: set[str]) -> None:
    if isinstance(step, Extern):
        _verify_filled((step.args, step.kwargs), filled, known)
        made = [name for name in step.outputs if isinstance(name, str)]
        for name in [*made, *step.mutated]:
            known.require(name in known.buffers, f"there is no buffer {name}")
        filled.update(program.with_parts(made))
        return
    known.readable = frozenset(filled)
    _compute(step, known)
    for name in (step.buffer, *reads(step)):
        known.require(name not in program.parts, f"{name} is read and written by its parts")
    filled.add(step.buffer)
    filled.update(whole for whole, parts in program.parts.items() if filled.issuperset(parts))


def _compute(step: Compute, known: KnownNames) -> None:
    for extent in step.axes:
        verify_index(extent, known)
        known.require(not extent.axes(), "the length of an axis depends on another axis")
    known.axes = dict(enumerate(step.axes))
    known.require(step.buffer in known.buffers, f"there is no buffer {step.buffer}")
    dtype, rank = known.buffers[step.buffer]
    known.require(
        len(step.target) == rank, f"{step.buffer} has {rank} dimensions, and the target {len(step.target)} coordinates"
    )
    for at in step.target:
        verify_index(at, known)
    verify_expr(step.body, known)
    _reduction(step, dtype, known)
    _verify_update(step.update, known)


def _reduction(step: Compute, dtype: str, known: KnownNames) -> None:
    known.require((step.reduction is None) == (not step.reduced), "a reduction goes with axes that are reduced")
    if step.reduction is None:
        known.require(step.body.dtype == dtype, f"{step.body.dtype} is stored to a buffer of {dtype}")
        return
    name = step.reduction.removeprefix("scan:")
    known.require(name in REDUCTIONS, f"{step.reduction!r} is not a reduction")
    known.require(step.reduced <= set(range(len(step.axes))), "an axis is reduced that does not exist")
    scan = name != step.reduction
    known.require(not scan or len(step.reduced) == 1, "a scan goes along one axis")
    used = {axis.number for at in step.target for axis in at.axes()}
    known.require(scan or not used & step.reduced, "the target depends on an axis that is reduced")


def _verify_filled(argument: Any, filled: set[str], known: KnownNames) -> None:
    """Verify that every buffer among the arguments of a call is filled."""
    if isinstance(argument, Strided | ScalarItem):
        known.require(argument.buffer in known.buffers, f"there is no buffer {argument.buffer}")
        known.require(argument.buffer in filled, f"{argument.buffer} is used before it is filled")
        for at in (*argument.shape, *argument.strides, argument.offset) if isinstance(argument, Strided) else ():
            verify_index(at, known)
    elif isinstance(argument, Index):
        verify_index(argument, known)
    elif isinstance(argument, list | tuple | Mapping):
        for each in argument.values() if isinstance(argument, Mapping) else argument:
            _verify_filled(each, filled, known)


def _verify_update(update: str | None, known: KnownNames) -> None:
    fits = update is None or (update in OPS and OPS[update].arity == 2 and OPS[update].result == "same")
    known.require(fits, f"{update!r} is not an op that combines two values of one type")


# ---- expressions -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class KnownNames:
    """The names that an expression may use.

    Attributes:
        place: where it stands, for messages.
        buffers: the type of each buffer, and by how many coordinates its elements are read.
        sizes: symbolic sizes.
        axes: the extent of each loop around, by number.
        variables: their types.
        readable: the buffers that hold something; None for all.
    """

    place: str
    buffers: dict[str, tuple[str, int]]
    sizes: frozenset[str]
    axes: dict[int, Index] = dataclasses.field(default_factory=dict)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    readable: frozenset[str] | None = None

    def require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise CompilerError(f"{self.place}: {otherwise}.")


def verify_expr(root: Expr, known: KnownNames) -> None:
    """Verify an expression.

    Raises:
        CompilerError: it is not well formed.
    """
    for node in root.walk():
        row = OPS.get(node.op)
        known.require(row is not None, f"{node.op!r} is not an op of expressions")
        known.require(node.dtype in DTYPES, f"{node.dtype!r} is not a type")
        for at in indices(node):
            verify_index(at, known)
        _RULES.get(node.op, _scalar)(node, known)


def verify_index(at: Index, known: KnownNames) -> None:
    """Verify an index.

    Raises:
        CompilerError: it depends on a loop, a size or a variable that is not known here.
    """
    for atom in at.atoms():
        if isinstance(atom, Div | Mod):
            verify_index(atom.dividend, known)
            verify_index(atom.divisor, known)
        elif isinstance(atom, Axis):
            known.require(atom.number in known.axes, f"{atom} is used outside of its loop")
            extent = known.axes[atom.number]
            known.require(extent == atom.extent, f"{atom} runs to {extent} here, and is used as one to {atom.extent}")
        elif isinstance(atom, Symbol):
            known.require(atom.name in known.sizes, f"{atom} is not one of the sizes {sorted(known.sizes)}")
        else:
            verify_expr(atom.expr, known)
            known.require(is_int(atom.expr.dtype), f"the index {atom} is of type {atom.expr.dtype}")


# ---- ops -------------------------------------------------------------------------------------------------------------


def _scalar(node: Expr, known: KnownNames) -> None:
    row, types = OPS[node.op], [arg.dtype for arg in node.args]
    known.require(len(types) == row.arity, f"{node.op} takes {row.arity} arguments, and has {len(types)}")
    known.require(len(set(types)) == 1, f"the arguments of {node.op} are of types {', '.join(types)}")
    kind = DTYPES[types[0]].kind
    known.require(kind[0] in row.takes, f"{node.op} does not take {types[0]}")
    wanted = "b1" if row.result == "b1" else types[0]
    known.require(node.dtype == wanted, f"{node.op} of {types[0]} is {wanted}, not {node.dtype}")


def _const(node: Expr, known: KnownNames) -> None:
    wanted = {"bool": bool, "int": int, "float": float}.get(DTYPES[node.dtype].kind)
    known.require(wanted is not None and type(node.data) is wanted, f"{node.data!r} is no constant of {node.dtype}")


def _load(node: Expr, known: KnownNames) -> None:
    buffer, coordinates = node.data
    known.require(buffer in known.buffers, f"there is no buffer {buffer} here")
    dtype, rank = known.buffers[buffer]
    known.require(node.dtype == dtype, f"{buffer} holds {dtype}, not {node.dtype}")
    known.require(
        len(coordinates) == rank, f"{buffer} has {rank} dimensions, and the load {len(coordinates)} coordinates"
    )
    known.require(known.readable is None or buffer in known.readable, f"{buffer} is read before it is filled")
    known.require([arg.dtype for arg in node.args] in ([], ["b1"]), f"the mask of {node} is not one b1")


def _var(node: Expr, known: KnownNames) -> None:
    known.require(node.data in known.variables, f"there is no variable {node.data} here")
    wanted = known.variables[node.data]
    known.require(node.dtype == wanted, f"{node.data} is of type {wanted}, not {node.dtype}")


def _random(node: Expr, known: KnownNames) -> None:
    known.require(node.dtype in ("f32", "f64"), f"random numbers are f32 or f64, not {node.dtype}")
    known.require(len(node.args) == 1 and is_int(node.args[0].dtype), "the seed is not one integer")


def _bound(node: Expr, known: KnownNames) -> None:
    types = [arg.dtype for arg in node.args]
    known.require(types == [node.dtype] and is_int(node.dtype), f"{node.op} takes and gives an integer, not {types}")


def _call(node: Expr, known: KnownNames) -> None:
    types, callee = tuple(arg.dtype for arg in node.args), node.data
    known.require(types == callee.arguments, f"{callee.name} takes {callee.arguments}, not {types}")
    known.require(node.dtype == callee.result, f"{callee.name} gives {callee.result}, not {node.dtype}")


def _where(node: Expr, known: KnownNames) -> None:
    types = [arg.dtype for arg in node.args]
    known.require(types == ["b1", node.dtype, node.dtype], f"where of {types} is not {node.dtype}")


def _bitcast(node: Expr, known: KnownNames) -> None:
    known.require(len(node.args) == 1, "bitcast takes one argument")
    source = node.args[0].dtype
    known.require(DTYPES[source].bytes == DTYPES[node.dtype].bytes, f"{source} and {node.dtype} have different sizes")


_RULES: dict[str, Callable[[Expr, KnownNames], None]] = {
    "const": _const,
    "index": lambda node, known: known.require(node.dtype == "i64", f"an index is i64, not {node.dtype}"),
    "load": _load,
    "var": _var,
    "random": _random,
    "bound": _bound,
    "nonzero": _bound,
    "call": _call,
    "where": _where,
    "cast": lambda node, known: known.require(len(node.args) == 1, "cast takes one argument"),
    "bitcast": _bitcast,
}
