"""What a kernel computes, by the meaning of its ops, one element after the other: slow, and the oracle for emitters.

Arrays are flat. Those of bf16 hold its bits as uint16; values of it are float32 numbers that were rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Atom, Axis, Div, Index, Symbol, Value
from opkit.compiler.ir.kernel import Accumulator, Kernel, Let, Loop, Scratch, Statement, Store, Update
from opkit.compiler.ir.ops import OPS, REDUCTIONS

_NUMPY = {
    row.name: np.dtype(row.torch) for row in DTYPES.values() if row.name not in ("bf16", "c32") and row.kind != "bits"
}
_NUMPY["bf16"] = np.dtype("float32")
STORED = {**_NUMPY, "bf16": np.dtype("uint16")}
"""The element type of the array for each dtype."""

_LAST = np.int64(2**63 - 1)


def run_kernel(
    kernel: Kernel,
    arrays: dict[str, np.ndarray[Any, Any]],
    sizes: dict[str, int],
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
    """Write to the arrays what the kernel writes to its arguments.

    Args:
        kernel: what to run.
        arrays: flat, of the types in ``STORED``, by the names of the kernel's arguments.
        sizes: by the names of the kernel's sizes.
        functions: what the functions of libraries are of numbers, by name.

    Raises:
        IndexError: a ``bound`` failed; its ``args`` are the value and the extent.
        ZeroDivisionError: a ``nonzero`` failed.
    """
    state = _State(dict(arrays), {a.buffer: a.dtype for a in kernel.arguments}, sizes, functions or {})
    with np.errstate(all="ignore"):
        _run(kernel.body, state)


@dataclasses.dataclass
class _State:
    """Arrays and their dtypes by name, sizes, loop variables by number, variables by name."""

    arrays: dict[str, np.ndarray[Any, Any]]
    dtypes: dict[str, str]
    sizes: dict[str, int]
    functions: Mapping[str, Callable[..., Any]]
    axes: dict[int, int] = dataclasses.field(default_factory=dict)
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)


# ---- statements ------------------------------------------------------------------------------------------------------


def _run(body: Iterable[Statement], state: _State) -> None:
    for statement in body:
        _STATEMENTS[type(statement)](statement, state)


def _loop(loop: Loop, state: _State) -> None:
    for i in range(at(loop.axis.extent, state)):
        state.axes[loop.axis.number] = i
        if loop.stop is not None and at(loop.stop[0], state) >= at(loop.stop[1], state):
            break
        _run(loop.body, state)
    state.axes.pop(loop.axis.number, None)


def _let(let: Let, state: _State) -> None:
    state.variables[let.name] = value(let.value, state)


def _scratch(scratch: Scratch, state: _State) -> None:
    """Filled with what is easily noticed, for nobody may read it before it is written."""
    state.arrays[scratch.name] = np.full(at(scratch.length, state), 77, STORED[scratch.dtype])
    state.dtypes[scratch.name] = scratch.dtype


def _store(store: Store, state: _State) -> None:
    number, i = value(store.value, state), at(store.at, state)
    if store.update is not None:
        number = _apply(store.update, store.value.dtype, [_read(store.buffer, i, state), number], store.value.dtype)
    _write(store.buffer, i, number, state)


def _accumulator(accumulator: Accumulator, state: _State) -> None:
    state.variables[accumulator.name] = neutral(accumulator.reduction, accumulator.dtype)
    state.variables[f"{accumulator.name}_at"] = _LAST


def _update(update: Update, state: _State) -> None:
    number, old = value(update.value, state), state.variables[update.name]
    if update.at is None:
        merged = _apply(REDUCTIONS[update.reduction][0], update.value.dtype, [old, number], update.value.dtype)
        state.variables[update.name] = merged
        return
    position, last = at(update.at, state), state.variables[f"{update.name}_at"]
    if _rank(number, update.reduction) > _rank(old, update.reduction) or (
        _rank(number, update.reduction) == _rank(old, update.reduction) and position < last
    ):
        state.variables |= {update.name: number, f"{update.name}_at": np.int64(position)}


def _rank(number: Any, reduction: str) -> tuple[bool, Any]:
    """NaN is beyond all."""
    missing = bool(number != number)
    key = 0 if missing else float(number) if number.dtype.kind in "bf" else int(number)
    return missing, key if reduction == "argmax" else -key


_STATEMENTS: dict[type, Callable[[Any, _State], None]] = {
    Loop: _loop,
    Let: _let,
    Scratch: _scratch,
    Store: _store,
    Accumulator: _accumulator,
    Update: _update,
}


def neutral(reduction: str, dtype: str) -> Any:
    """What a reduction begins with."""
    start, kind = REDUCTIONS[reduction][1], _NUMPY[dtype]
    if start in ("zero", "one"):
        return kind.type(start == "one")
    if is_float(dtype):
        return kind.type(np.inf if start == "greatest" else -np.inf)
    if dtype == "b1":
        return np.bool_(start == "greatest")
    return kind.type(np.iinfo(kind).max if start == "greatest" else np.iinfo(kind).min)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _read(buffer: str, i: int, state: _State) -> Any:
    if not 0 <= i < len(state.arrays[buffer]):
        raise AssertionError(f"{buffer}[{i}] is read, and it has {len(state.arrays[buffer])} elements.")
    element = state.arrays[buffer][i]
    return (np.uint32(element) << np.uint32(16)).view(np.float32) if state.dtypes[buffer] == "bf16" else element


def _write(buffer: str, i: int, number: Any, state: _State) -> None:
    if not 0 <= i < len(state.arrays[buffer]):
        raise AssertionError(f"{buffer}[{i}] is written, and it has {len(state.arrays[buffer])} elements.")
    bits = np.uint16(np.float32(number).view(np.uint32) >> 16) if state.dtypes[buffer] == "bf16" else number
    state.arrays[buffer][i] = bits


# ---- expressions -----------------------------------------------------------------------------------------------------


def at(index: Index, state: _State) -> int:
    """The value of an index."""
    total = 0
    for monomial, coefficient in index.terms.items():
        for atom in monomial:
            coefficient *= _atom(atom, state)
        total += coefficient
    return total


def _atom(atom: Atom, state: _State) -> int:
    if isinstance(atom, Axis):
        return state.axes[atom.number]
    if isinstance(atom, Symbol):
        return state.sizes[atom.name]
    if isinstance(atom, Value):
        return int(value(atom.expr, state))
    a, b = at(atom.dividend, state), at(atom.divisor, state)
    return a // b if isinstance(atom, Div) else a % b


def value(root: Expr, state: _State) -> Any:
    """The value of an expression: a numpy scalar."""
    known: dict[Expr, Any] = {}
    for node in root.walk():
        known[node] = _node(node, [known[arg] for arg in node.args], state)
    return known[root]


def _node(node: Expr, args: list[Any], state: _State) -> Any:
    row = _LEAVES.get(node.op)
    if row is not None:
        return row(node, args, state)
    return _apply(node.op, node.args[0].dtype, args, node.dtype)


def _load(node: Expr, args: list[Any], state: _State) -> Any:
    if args and not args[0]:
        return _NUMPY[node.dtype].type(0)
    return _read(node.data[0], at(node.data[1][0], state), state)


def _bound(node: Expr, args: list[Any], state: _State) -> Any:
    extent, position = at(node.data, state), int(args[0])
    if not -extent <= position < extent:
        raise IndexError(position, extent)
    return _NUMPY[node.dtype].type(position + extent if position < 0 else position)


def _nonzero(node: Expr, args: list[Any], state: _State) -> Any:
    if args[0] == 0:
        raise ZeroDivisionError
    return args[0]


def _bitcast(node: Expr, args: list[Any], state: _State) -> Any:
    source, target = node.args[0].dtype, node.dtype
    bits = np.uint16(args[0].view(np.uint32) >> 16) if source == "bf16" else args[0]
    if target == "bf16":
        return (np.uint32(bits.view(np.uint16)) << np.uint32(16)).view(np.float32)
    return bits.view(_NUMPY[target])


def _random(node: Expr, args: list[Any], state: _State) -> Any:
    """As ``opkit.compiler.emit.c.prelude`` says: an f64 of two words, an f32 of the one that it shares with others."""
    seed, count = int(args[0]) % 2**64, at(node.data, state) % 2**64
    if node.dtype == "f64":
        words = _philox(seed, count)
        return np.float64((words[0] << 32 | words[1]) >> 11) / 2**53
    words = _philox(seed, count // 64 * 16 + count % 16)
    return np.float32((words[count // 16 % 4] >> 8) / 2**24)


def _philox(seed: int, count: int) -> list[int]:
    """Philox-4x32-10: the seed is the key, the count the lower half of the counter."""
    c, k = [count % 2**32, count >> 32, 0, 0], [seed % 2**32, seed >> 32]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q % 2**32, (p >> 32) ^ c[3] ^ k[1], p % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def _call(node: Expr, args: list[Any], state: _State) -> Any:
    return _NUMPY[node.dtype].type(state.functions[node.data.name](*args))


_LEAVES: dict[str, Callable[[Expr, list[Any], _State], Any]] = {
    "call": _call,
    "const": lambda node, args, state: _converted(np.asarray(node.data)[()], node.dtype),
    "index": lambda node, args, state: np.int64(at(node.data, state)),
    "load": _load,
    "var": lambda node, args, state: state.variables[node.data],
    "random": _random,
    "bound": _bound,
    "nonzero": _nonzero,
    "where": lambda node, args, state: args[1] if args[0] else args[2],
    "cast": lambda node, args, state: _converted(args[0], node.dtype),
    "bitcast": _bitcast,
}


def _apply(op: str, dtype: str, args: list[Any], result: str) -> Any:
    """An op of the table, in the type in which its arithmetic is done."""
    compute, function = _NUMPY[DTYPES[dtype].compute], OPS[op].numpy
    assert function is not None, op
    number = np.asarray(function(*(np.asarray(arg).astype(compute)[()] for arg in args)))
    return _converted(number[()], result)


def _converted(number: Any, dtype: str) -> Any:
    """C's conversion; a float that fits no integer becomes what x86 makes of it."""
    if dtype == "bf16":
        return _rounded(np.float32(number))
    kind = _NUMPY[dtype]
    if DTYPES[dtype].kind == "int" and np.asarray(number).dtype.kind == "f":
        return np.array(_whole(float(number), dtype, np.asarray(number).dtype == np.float64)).astype(kind)[()]
    return np.asarray(number).astype(kind)[()]


def _whole(number: float, dtype: str, double: bool) -> np.signedinteger[Any]:
    """Through a type that is wide enough; what does not fit is the least number of that."""
    short = DTYPES[dtype].bytes < 4 or dtype == "i32"
    wide = np.int32 if short and not (dtype == "u8" and double) else np.int64
    limit = 2.0 ** (8 * np.dtype(wide).itemsize - 1)
    if dtype == "u64" and number >= limit:
        return np.int64(int(number - limit) - int(limit) if number < 2 * limit else 0)
    return wide(int(number) if -limit <= number < limit else int(-limit))


def _rounded(number: Any) -> Any:
    """To the nearest number that bf16 has, halves to even."""
    if number != number:
        return np.float32(np.nan)
    bits = int(number.view(np.uint32))
    return np.uint32(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16) & 0xFFFFFFFF).view(np.float32)
