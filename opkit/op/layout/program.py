"""Layout programs compute output sizes: this module encodes them, runs them in Python, and prints them.

``opkit/kernels/include/opkit.h`` defines the words. The interpreter here is the reference against which the runtime's is tested.
A call of sizes that are new takes 5 us with a program, and 8 ms where Python runs the reference on fake tensors instead (RMS
normalisation in C, torch 2.13, one thread); code without Python has nothing but programs.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex64: 9, torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
    torch.float8_e5m2: 23, torch.float8_e4m3fn: 24, torch.float8_e5m2fnuz: 25, torch.float8_e4m3fnuz: 26,
    torch.uint16: 27, torch.uint32: 28, torch.uint64: 29,
}  # fmt: skip
"""The numbers of ``enum opk_dtype``, and of the float8 types, which only Triton kernels take."""

CONSTANT, SIZE, STRIDE, INT, FLOAT_IS = range(5)
OPERANDS = {CONSTANT: 1, SIZE: 3, STRIDE: 3, INT: 2, FLOAT_IS: 3}
"""The number of words that follow each code that reads a value."""

ADD, SUBTRACT, MULTIPLY, FLOOR_DIVIDE, MODULO, MINIMUM, MAXIMUM = range(5, 12)
EQUAL, NOT_EQUAL, LESS, LESS_EQUAL, AND, OR, NOT, SELECT = range(12, 20)

MAX_DEPTH = 32
"""The maximal number of values on the stack while a program's code runs."""

_BINARY: dict[int, tuple[str, Callable[[int, int], int]]] = {
    ADD: ("+", operator.add),
    SUBTRACT: ("-", operator.sub),
    MULTIPLY: ("*", operator.mul),
    FLOOR_DIVIDE: ("//", operator.floordiv),
    MODULO: ("%", operator.mod),
    MINIMUM: ("min", min),
    MAXIMUM: ("max", max),
    EQUAL: ("==", operator.eq),
    NOT_EQUAL: ("!=", operator.ne),
    LESS: ("<", operator.lt),
    LESS_EQUAL: ("<=", operator.le),
    AND: ("and", lambda a, b: a != 0 and b != 0),
    OR: ("or", lambda a, b: a != 0 or b != 0),
}


class UnfitError(Exception):
    """A value cannot be part of a program or of a call that fits one; the message says why."""


def is_int64(value: int) -> bool:
    """Return whether ``value`` is in the range of ``int64_t``."""
    return -(2**63) <= value < 2**63


# ---- keys -----------------------------------------------------------------------------------------------------------


def dtype_number(dtype: Any) -> int:
    """Return the number of a dtype.

    Raises:
        UnfitError: C kernels have no type for it.
    """
    number = dtype if isinstance(dtype, int) else DTYPES.get(dtype)
    if number is None:
        raise UnfitError(f"C kernels have no element type for {dtype}")
    return number


def string_hash(text: str) -> int:
    """Return the FNV-1a hash of the text's UTF-8 bytes, as a signed number of 64 bits."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value - 2**64 if value >= 2**63 else value


def float_bits(value: float) -> int:
    """Return the bits of a double, as a signed number of 64 bits."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _tensor_key(tensor: torch.Tensor) -> list[int]:
    if tensor.layout is not torch.strided:
        raise UnfitError(f"one of its tensors has the layout {tensor.layout}")
    return [tensor.ndim, dtype_number(tensor.dtype), int(tensor.is_contiguous())]


_KEYS: dict[str, Callable[[Any], list[int]]] = {
    "tensor": lambda x: [1, *_tensor_key(x)],
    "tensors": lambda xs: [1, len(xs), *(word for x in xs for word in _tensor_key(x))],
    "int": lambda _: [1],
    "float": lambda _: [1],
    "bool": lambda x: [1, int(x)],
    "str": lambda x: [1, string_hash(x)],
    "dtype": lambda x: [1, dtype_number(x)],
    "ints": lambda xs: [1, len(xs)],
    "floats": lambda xs: [1, len(xs)],
    "bools": lambda xs: [1, len(xs), *map(int, xs)],
}


def key(kinds: Sequence[str], values: Sequence[Any]) -> list[int]:
    """Return the key of a call from the kind and the value of each schema argument.

    Raises:
        UnfitError: a tensor has a layout or dtype that no key can hold.
    """
    words: list[int] = []
    for kind, value in zip(kinds, values, strict=True):
        if kind != "ignored":
            words += [0] if value is None else _KEYS[kind](value)
    return words


# ---- running --------------------------------------------------------------------------------------------------------


def run(words: Sequence[int], kinds: Sequence[str], values: Sequence[Any]) -> list[int] | None:
    """Return a call's layout (dtype, rank, sizes and strides of each new output); None if the call does not fit the program.

    Args:
        words: the program.
        kinds: the kind of each schema argument, as in ``opkit.kernels.facts.KINDS``.
        values: the value of each schema argument, defaults filled in.
    """
    try:
        expected = key(kinds, values)
        reader = Reader(words, 1)
        if reader.take(len(expected)) != expected or not evaluate(reader.code(), values):
            return None
        layout: list[int] = []
        while reader.more:
            layout += _output(reader, values)
    except (UnfitError, ZeroDivisionError):
        return None
    return layout


def _output(reader: Reader, values: Sequence[Any]) -> list[int]:
    dtype, rank = reader.take(2)
    sizes = [evaluate(reader.code(), values) for _ in range(rank)]
    if any(size < 0 for size in sizes):
        raise UnfitError("a size is negative")
    (explicit,) = reader.take(1)
    strides = [evaluate(reader.code(), values) for _ in range(rank)] if explicit else row_major(sizes)
    return [dtype, rank, *sizes, *strides]


def row_major(sizes: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor; sizes of 0 count as 1, as in torch."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides


@dataclasses.dataclass
class Reader:
    """Reads a program from the front."""

    words: Sequence[int]
    at: int = 0

    @property
    def more(self) -> bool:
        """Whether words are left."""
        return self.at < len(self.words)

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` words."""
        self.at += count
        return list(self.words[self.at - count : self.at])

    def code(self) -> list[int]:
        """Return the next piece of code, which follows its length."""
        (count,) = self.take(1)
        return self.take(count)


def instructions(code: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield each operation of a piece of code, with the words that belong to it."""
    reader = Reader(code)
    while reader.more:
        (op,) = reader.take(1)
        yield op, reader.take(OPERANDS.get(op, 0))


def evaluate(code: Sequence[int], values: Sequence[Any]) -> int:
    """Return the value of a piece of code.

    Raises:
        UnfitError: a value is out of the range of ``int64_t``.
        ZeroDivisionError: the code divides by zero.
    """
    stack: list[int] = []
    for op, operands in instructions(code):
        if op in OPERANDS:
            value = _read(op, operands, values)
        elif op == NOT:
            value = int(stack.pop() == 0)
        elif op == SELECT:
            otherwise, then, condition = stack.pop(), stack.pop(), stack.pop()
            value = then if condition else otherwise
        else:
            right, left = stack.pop(), stack.pop()
            value = int(_BINARY[op][1](left, right))
        if not is_int64(value):
            raise UnfitError("a value is out of the range of int64_t")
        stack.append(value)
    (result,) = stack
    return result


def _read(op: int, operands: list[int], values: Sequence[Any]) -> int:
    if op == CONSTANT:
        return operands[0]
    argument, item, last = [*operands, 0][:3]
    value = values[argument]
    if isinstance(value, (list, tuple)):
        value = value[item]
    if op == INT:
        return int(value)
    if op == FLOAT_IS:
        return int(float_bits(float(value)) == last)
    return value.shape[last] if op == SIZE else value.stride(last)


def depth(code: Sequence[int]) -> int:
    """Return the maximal number of values on the stack while a piece of code runs."""
    deepest = now = 0
    for op, _ in instructions(code):
        now += 1 if op in OPERANDS else 0 if op == NOT else -2 if op == SELECT else -1
        deepest = max(deepest, now)
    return deepest


# ---- printing -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LayoutProgram:
    """A program that computes the layout of an operator's new outputs from a call's arguments.

    ``words`` is the array that ``opkit.h`` describes; ``arguments`` are the schema's, by name and kind.
    """

    operator: str
    words: tuple[int, ...]
    arguments: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        reader = Reader(self.words, 1)
        lines = [f"output sizes of {self.operator}", f"  for   {', '.join(self._keys(reader)) or 'any arguments'}"]
        conditions = _conditions(reader.code(), self.arguments)
        lines += [f"  {'where' if i == 0 else '  and'} {condition}" for i, condition in enumerate(conditions)]
        while reader.more:
            lines.append(f"  gives {self._output(reader)}")
        return "\n".join(lines)

    def _keys(self, reader: Reader) -> list[str]:
        return [_show_key(reader, name, kind) for name, kind in self.arguments if kind != "ignored"]

    def _output(self, reader: Reader) -> str:
        dtype, rank = reader.take(2)
        shown = f"{_dtype_name(dtype)}[{', '.join(_show(reader.code(), self.arguments) for _ in range(rank))}]"
        if not reader.take(1)[0]:
            return f"{shown}, row-major"
        return f"{shown}, strides ({', '.join(_show(reader.code(), self.arguments) for _ in range(rank))})"


def _dtype_name(number: int) -> str:
    return next((str(dtype).removeprefix("torch.") for dtype, n in DTYPES.items() if n == number), str(number))


def _show_key(reader: Reader, name: str, kind: str) -> str:
    if not reader.take(1)[0]:
        return f"{name} None"
    if kind == "tensor":
        return f"{name} {_show_tensor(reader)}"
    if kind == "tensors":
        return f"{name} [{', '.join(_show_tensor(reader) for _ in range(reader.take(1)[0]))}]"
    if kind in ("ints", "floats"):
        return f"{name} {reader.take(1)[0]} {kind}"
    if kind == "bools":
        return f"{name} {[bool(word) for word in reader.take(reader.take(1)[0])]}"
    if kind in ("int", "float"):
        return f"{name} {kind}"
    (word,) = reader.take(1)
    return f"{name} {_dtype_name(word) if kind == 'dtype' else bool(word) if kind == 'bool' else f'str #{word:x}'}"


def _show_tensor(reader: Reader) -> str:
    rank, dtype, contiguous = reader.take(3)
    return f"{_dtype_name(dtype)} of rank {rank}{'' if contiguous else ', strided'}"


def _show(code: Sequence[int], arguments: Sequence[tuple[str, str]]) -> str:
    """Return a piece of code as an expression."""
    return _joined(_conditions(code, arguments))


def _conditions(code: Sequence[int], arguments: Sequence[tuple[str, str]]) -> list[str]:
    """Return the expressions whose conjunction a piece of code is; usually one."""
    stack: list[list[str]] = []
    for op, operands in instructions(code):
        if op in OPERANDS:
            stack.append([_show_read(op, operands, arguments)])
        elif op == NOT:
            stack.append([f"not {_joined(stack.pop())}"])
        elif op == SELECT:
            otherwise, then, condition = (_joined(stack.pop()) for _ in range(3))
            stack.append([f"({then} if {condition} else {otherwise})"])
        else:
            right, left = stack.pop(), stack.pop()
            stack.append([*left, *right] if op == AND else [_show_binary(op, _joined(left), _joined(right))])
    return stack.pop()


def _joined(conditions: list[str]) -> str:
    return conditions[0] if len(conditions) == 1 else f"({' and '.join(conditions)})"


def _show_binary(op: int, left: str, right: str) -> str:
    sign = _BINARY[op][0]
    return f"{sign}({left}, {right})" if op in (MINIMUM, MAXIMUM) else f"({left} {sign} {right})"


def _show_read(op: int, operands: list[int], arguments: Sequence[tuple[str, str]]) -> str:
    if op == CONSTANT:
        return str(operands[0])
    name, kind = arguments[operands[0]]
    item = f"{name}[{operands[1]}]" if kind.endswith("s") else name
    if op == INT:
        return item
    if op == FLOAT_IS:
        return f"({item} is {struct.unpack('<d', struct.pack('<q', operands[2]))[0]!r})"
    return f"{item}.{'size' if op == SIZE else 'stride'}({operands[2]})"
