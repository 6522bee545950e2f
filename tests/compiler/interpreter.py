"""Runs a program with numpy, one step after the other: slow, and what every faster way is compared with.

Values of bfloat16 are held as float32 and rounded where they are stored or cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Axis, Div, Index, Mod, Symbol, Value
from opkit.compiler.ir.ops import OPS
from opkit.compiler.ir.program import Buffer, Compute, Extern, Program, ScalarItem, Strided

Call = Callable[[Extern, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an extern call on numpy arrays; gives a result for each of its outputs, or its one result."""

_NUMPY = {
    name: np.dtype("float32" if name == "bf16" else row.torch)
    for name, row in DTYPES.items()
    if name != "c32" and row.kind != "bits"
}


def run(
    program: Program,
    inputs: Sequence[Any],
    sizes: Mapping[str, int] | None = None,
    call: Call | None = None,
    constants: Mapping[str, Any] | None = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> list[Any]:
    """The program's results for arrays (and integers) as inputs.

    Arrays of inputs that the program writes to are changed. ``call`` runs extern calls; ``constants`` holds the arrays of the
    program's constants, by name, and ``functions`` what the functions of libraries are of numbers, by name.
    """
    machine = _Machine(program, dict(program.sizes if sizes is None else sizes), call, functions or {})
    return machine.run(inputs, constants or {})


def bfloat16(values: Any) -> Any:
    """float32 values rounded to the nearest bfloat16, halves to even.

    >>> float(bfloat16(np.float32(1.00390625)))
    1.0
    """
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), np.asarray(values, np.float32), rounded.view(np.float32))


def as_dtype(values: Any, dtype: str) -> Any:
    """C's conversion, with integers that wrap around."""
    with np.errstate(all="ignore"):
        found = np.asarray(values).astype(_NUMPY[dtype])
    return bfloat16(found) if dtype == "bf16" else found


class _Machine:
    """Buffers in flat arrays, and the steps on them."""

    def __init__(
        self, program: Program, sizes: dict[str, int], call: Call | None, functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.program = program
        self.functions = functions
        self.sizes = sizes
        self.call = call
        self.memory: dict[str, Any] = {}

    def run(self, inputs: Sequence[Any], constants: Mapping[str, Any]) -> list[Any]:
        given = {**constants, **dict(zip(map(str, self.program.inputs), inputs, strict=True))}
        for name, buffer in self.program.buffers.items():
            if not buffer.whole:
                self.memory[name] = self._empty(buffer)
            if name in given:
                self.view(buffer)[...] = given[name]
        for whole, parts in self.program.parts.items():
            self.memory |= {name: self._part(self.program.buffers[name], self.memory[whole]) for name in parts}
        for step in self.program.steps:
            self._compute(step) if isinstance(step, Compute) else self._extern(step)
        self._give_back(given)
        return [self._result(output) for output in self.program.outputs]

    def _give_back(self, given: dict[str, Any]) -> None:
        for name, array in given.items():
            own = {name, *self.program.parts.get(name, ())}
            changed = any(
                step.buffer in own if isinstance(step, Compute) else name in step.mutated for step in self.program.steps
            )
            if changed:
                array[...] = self.view(self.program.buffers[name])

    def _result(self, output: Any) -> Any:
        if isinstance(output, Index):
            return int(self.number(output))
        return np.array(self.strided(output)) if isinstance(output, Strided) else output

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _empty(self, buffer: Buffer) -> Any:
        shape, strides = self._numbers(buffer.shape), self._numbers(buffer.strides)
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        return np.zeros(0 if 0 in shape else last + 1, _NUMPY[buffer.dtype])

    def _part(self, buffer: Buffer, whole: Any) -> Any:
        """The memory of a part, from its first element on."""
        return whole.view(_NUMPY[buffer.dtype])[self.number(buffer.offset) :]

    def view(self, buffer: Buffer) -> Any:
        """A buffer's elements in its logical shape."""
        return self.strided(Strided(buffer.name, buffer.shape, buffer.strides, Index({})))

    def strided(self, at: Strided) -> Any:
        flat = self.memory[at.buffer]
        shape, strides = self._numbers(at.shape), self._numbers(at.strides)
        if 0 in shape:
            return np.zeros(shape, flat.dtype)
        start = flat[int(self.number(at.offset)) :]
        return np.lib.stride_tricks.as_strided(start, shape, [s * flat.itemsize for s in strides])

    def number(self, at: Index) -> int:
        return int(_Grid(self, ()).index(at))

    def _numbers(self, of: Sequence[Index]) -> tuple[int, ...]:
        return tuple(self.number(n) for n in of)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _compute(self, step: Compute) -> None:
        buffer = self.program.buffers[step.buffer]
        extents = self._numbers(step.axes)
        grid = _Grid(self, extents, step)
        out = self.view(buffer)
        if out.size == 0 or (0 in extents and step.reduction is None):
            return
        body = np.broadcast_to(grid.value(step.body), extents)
        target = tuple(np.broadcast_to(grid.index(at), extents) for at in step.target)
        if step.reduction is not None and not step.reduction.startswith("scan:"):
            body, target = self._reduced(step, body, target)
        elif step.reduction is not None:
            body = _scanned(step.reduction, body, min(step.reduced))
        self._store(step, out, target, as_dtype(body, buffer.dtype))

    def _reduced(self, step: Compute, body: Any, target: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        assert step.reduction is not None
        dims = sorted(step.reduced)
        first = tuple(slice(0, 1) if k in step.reduced else slice(None) for k in range(body.ndim))
        moved = np.moveaxis(body, dims, range(body.ndim - len(dims), body.ndim))
        kept = moved.shape[: body.ndim - len(dims)]
        rows = moved.reshape((*kept, math.prod(moved.shape[len(kept) :])))
        if 0 in body.shape:  # the target does not depend on the axes that are empty
            extents = tuple(1 if k in step.reduced else n for k, n in enumerate(body.shape))
            grid = _Grid(self, extents, step)
            target = tuple(np.broadcast_to(grid.index(at), extents) for at in step.target)
        places = tuple(np.asarray(at)[first].reshape(kept) for at in target)
        return reduction(step.reduction, rows), places

    def _store(self, step: Compute, out: Any, target: tuple[Any, ...], body: Any) -> None:
        if step.update is None:
            out[target] = body
            return
        meaning = OPS[step.update].numpy
        assert meaning is not None
        for at in np.ndindex(body.shape):
            place = tuple(int(t[at]) for t in target)
            with np.errstate(all="ignore"):
                out[place] = as_dtype(meaning(out[place], body[at]), self.program.buffers[step.buffer].dtype)

    def _extern(self, step: Extern) -> None:
        assert self.call is not None, f"{step.target} is not lowered, and there is no function to call it"
        results = self.call(step, self._arguments(step.args), self._arguments(step.kwargs))
        results = results if isinstance(results, tuple | list) else (results,)
        for output, found in zip(step.outputs, results, strict=True):
            if isinstance(output, str):
                self.view(self.program.buffers[output])[...] = found
            elif isinstance(output, Index):
                self.sizes[str(output)] = int(found)

    def _arguments(self, argument: Any) -> Any:
        if isinstance(argument, Strided):
            return self.strided(argument)
        if isinstance(argument, ScalarItem):
            return self.memory[argument.buffer][0].item()
        if isinstance(argument, Index):
            return self.number(argument)
        if isinstance(argument, dict):
            return {key: self._arguments(a) for key, a in argument.items()}
        if isinstance(argument, list | tuple) and not hasattr(argument, "_fields"):
            return type(argument)(self._arguments(a) for a in argument)
        return argument


class _Grid:
    """What expressions are, for every value of a step's axes at once."""

    def __init__(self, machine: _Machine, extents: Sequence[int], step: Compute | None = None) -> None:
        self.machine = machine
        self.known: dict[Expr, Any] = {}
        rank = len(extents)
        grids = [np.arange(n).reshape([-1 if k == j else 1 for j in range(rank)]) for k, n in enumerate(extents)]
        self.axes = dict(enumerate(grids))

    # ---- indices -----------------------------------------------------------------------------------------------------

    def index(self, at: Index) -> Any:
        total = np.asarray(0, np.int64)
        for monomial, coefficient in at.terms.items():
            term = np.asarray(coefficient, np.int64)
            for atom in monomial:
                term = term * self._atom(atom)
            total = total + term
        return total

    def _atom(self, atom: Any) -> Any:
        if isinstance(atom, Axis):
            return self.axes[atom.number]
        if isinstance(atom, Symbol):
            return self.machine.sizes[atom.name]
        if isinstance(atom, Value):
            return self.value(atom.expr).astype(np.int64)
        assert isinstance(atom, Div | Mod)
        meaning = np.floor_divide if isinstance(atom, Div) else np.remainder
        return meaning(self.index(atom.dividend), self.index(atom.divisor))

    # ---- values ------------------------------------------------------------------------------------------------------

    def value(self, root: Expr) -> Any:
        for node in root.walk():
            if node not in self.known:
                with np.errstate(all="ignore"):
                    self.known[node] = self._value(node, [self.known[a] for a in node.args])
        return self.known[root]

    def _value(self, node: Expr, args: list[Any]) -> Any:
        if node.op in _LEAVES:
            return _LEAVES[node.op](self, node, args)
        meaning = OPS[node.op].numpy
        assert meaning is not None, node.op
        found = np.asarray(meaning(*args))
        return found if node.dtype == "b1" else as_dtype(found, node.dtype)

    def constant(self, node: Expr, args: list[Any]) -> Any:
        return as_dtype(node.data, node.dtype)

    def position(self, node: Expr, args: list[Any]) -> Any:
        return self.index(node.data)

    def load(self, node: Expr, args: list[Any]) -> Any:
        name, coordinates = node.data
        array = self.machine.view(self.machine.program.buffers[name])
        places = [np.asarray(self.index(at)) for at in coordinates]
        if not args:
            return array[tuple(places)] if places else array[()]
        if array.size == 0:
            return np.zeros(np.shape(args[0]), array.dtype)
        inside = [np.clip(at, 0, n - 1) for at, n in zip(places, array.shape, strict=True)]
        return np.where(args[0], array[tuple(inside)], np.zeros((), array.dtype))

    def random(self, node: Expr, args: list[Any]) -> Any:
        """Any generator serves: what it draws is nobody's promise."""
        mixed = (self.index(node.data).astype(np.uint64) + args[0].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return ((mixed >> np.uint64(40)) / 2.0**24).astype(_NUMPY[node.dtype])

    def bound(self, node: Expr, args: list[Any]) -> Any:
        extent = self.machine.number(node.data)
        if np.any((args[0] < -extent) | (args[0] >= extent)):
            raise IndexError(f"An index of {node} is outside a dimension of {extent}.")
        return np.where(args[0] < 0, args[0] + extent, args[0])

    def nonzero(self, node: Expr, args: list[Any]) -> Any:
        if np.any(args[0] == 0):
            raise ZeroDivisionError(f"{node} is 0.")
        return args[0]

    def callee(self, node: Expr, args: list[Any]) -> Any:
        function = self.machine.functions[node.data.name]
        return np.vectorize(function, otypes=[_NUMPY[node.dtype]])(*args)

    def where(self, node: Expr, args: list[Any]) -> Any:
        return np.where(*args)

    def cast(self, node: Expr, args: list[Any]) -> Any:
        return as_dtype(args[0], node.dtype)

    def bitcast(self, node: Expr, args: list[Any]) -> Any:
        return np.ascontiguousarray(args[0]).view(_NUMPY[node.dtype]).reshape(np.shape(args[0]))


_LEAVES: dict[str, Callable[[_Grid, Expr, list[Any]], Any]] = {
    "const": _Grid.constant,
    "index": _Grid.position,
    "load": _Grid.load,
    "random": _Grid.random,
    "bound": _Grid.bound,
    "nonzero": _Grid.nonzero,
    "call": _Grid.callee,
    "where": _Grid.where,
    "cast": _Grid.cast,
    "bitcast": _Grid.bitcast,
}


# ---- reductions ------------------------------------------------------------------------------------------------------


def reduction(name: str, rows: Any) -> Any:
    """The reduction of the last dimension."""
    if name in ("argmax", "argmin"):
        return (np.argmax if name == "argmax" else np.argmin)(rows, axis=-1)
    meanings = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
    if name in ("any", "all"):
        return (np.any if name == "any" else np.all)(rows, axis=-1)
    if rows.shape[-1] == 0:
        return np.full(rows.shape[:-1], neutral(name, rows.dtype))
    return meanings[name].reduce(rows, axis=-1, dtype=rows.dtype)


def neutral(name: str, dtype: Any) -> Any:
    """What a reduction of nothing gives."""
    if name in ("sum", "prod"):
        return dtype.type(name == "prod")
    if dtype.kind == "f":
        return dtype.type(-math.inf if name == "max" else math.inf)
    if dtype.kind == "b":
        return name == "min"
    return np.iinfo(dtype).min if name == "max" else np.iinfo(dtype).max


def _scanned(name: str, body: Any, dim: int) -> Any:
    meanings = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
    return meanings[name.removeprefix("scan:")].accumulate(body, axis=dim, dtype=body.dtype)
