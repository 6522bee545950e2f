"""Users' functions in Triton kernels: their text, and how they read the tensors and numbers that they capture.

Each expression becomes a function in Triton (:class:`~opkit.kernels.triton.named.FunctionText`), which kernels take as a part of
the programs of masks and biases. Captured tensors lie in slots of their own after those of masks and biases, with strides by
dimension, and captured numbers and the sizes of these tensors after the other numbers, so that nothing is compiled again for
others. Coordinates that are computed are limited to the tensor, and variables to the call's sizes: nothing else is read.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opkit.attn.functions.expression import Function, coordinates, derivatives, indexed
from opkit.compiler.emit.triton.expressions import TYPES, applied, constant, converted
from opkit.compiler.ir.expr import Expr
from opkit.kernels.triton.named import FunctionText

SLOTS, NUMBERS = 6, 24
OTHER_SLOTS, OTHER_NUMBERS = 6, 8  #: of masks and biases, which come before those of functions
TENSORS = tuple(f"f{i}" for i in range(SLOTS))
DIMS = 4  # of a tensor
_WIDE = 2**31  # elements that 32 bits do not count
_DEVICE, _EMITTED = "opkit.attn.gpu.device.functions", "opkit.compiler.emit.triton.functions"


@dataclasses.dataclass(frozen=True)
class Placed:
    """A function of a mask or a bias, and where in a kernel its tensors and numbers are.

    Attributes:
        whose: "mask" or "bias".
        function: the function.
        tensors: the first of its tensors among those of all functions.
        numbers: the first of its numbers: the integers, the floats, and of each tensor the size of each dimension.
    """

    whose: str
    function: Function
    tensors: int
    numbers: int

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of each tensor."""
        found = dict.fromkeys(range(len(self.function.tensors)), 0)
        for node, at in indexed(self.function.root):
            found[int(node.data[0][1:])] = len(at)
        return tuple(found.values())

    def sizes(self, tensor: int) -> int:
        """The first of the numbers that are the sizes of one of its tensors."""
        before = len(self.function.integers) + len(self.function.floats) + sum(self.dims[:tensor])
        return self.numbers + before

    @property
    def end(self) -> tuple[int, int]:
        """The first tensor and number after its own."""
        function = self.function
        count = len(function.integers) + len(function.floats) + sum(self.dims)
        return self.tensors + len(function.tensors), self.numbers + count

    @property
    def variables(self) -> frozenset[str]:
        """The variables that it depends on."""
        return variables_of(self.function.root)


def variables_of(root: Expr) -> frozenset[str]:
    """Return the names of the variables of an expression."""
    return frozenset(node.data for node in root.walk() if node.op == "var")


def fit(placed: Sequence[Placed]) -> bool:
    """Return whether there is room for the tensors and numbers of functions."""
    tensors, numbers = placed[-1].end if placed else (0, 0)
    return tensors <= SLOTS and numbers <= NUMBERS and all(max(each.dims, default=0) <= DIMS for each in placed)


def pair_bytes(placed: Placed, tensors: Sequence[Tensor]) -> int:
    """Return the bytes that a function reads of captured tensors for each pair of a query and a key."""
    numbers = placed.function.tensors
    loads = (node for node, _ in indexed(placed.function.root) if _variables_of_place(node) >= _PAIR)
    return sum(tensors[numbers[int(node.data[0][1:])]].element_size() for node in loads)


_PAIR = frozenset("ij")


def _variables_of_place(load: Expr) -> frozenset[str]:
    return frozenset().union(*map(variables_of, coordinates(load)))


def tensors_of(
    placed: Sequence[Placed], masks: Sequence[Tensor], biases: Sequence[Tensor] | None
) -> list[Tensor | None]:
    """Return the tensors for the parameters ``TENSORS``, viewed with four dimensions, of which the last ones are their own.

    Without ``biases`` those of biases' functions are None, and so are their numbers for :func:`numbers_of`.
    """
    found: list[Tensor | None] = []
    for each in placed:
        tensors = masks if each.whose == "mask" else biases
        for number, dims in zip(each.function.tensors, each.dims, strict=True):
            x = None if tensors is None else tensors[number]
            pad = (1,) * (DIMS - dims)
            found.append(x if x is None else x.as_strided(pad + tuple(x.shape), (0,) * len(pad) + tuple(x.stride())))
    return [*found, *[None] * (SLOTS - len(found))]


def numbers_of(
    placed: Sequence[Placed], masks: Sequence[Tensor], biases: Sequence[Tensor] | None
) -> dict[str, int | None]:
    """Return the numbers that a kernel takes, by its parameters' names; floats are the integers of their bits."""
    found: list[int | None] = []
    for each in placed:
        tensors, function = masks if each.whose == "mask" else biases, each.function
        if tensors is None:
            found += [None] * (each.end[1] - each.numbers)
            continue
        found += function.integers
        found += [struct.unpack("<i", struct.pack("<f", x))[0] for x in function.floats]
        found += [size for number in function.tensors for size in tensors[number].shape]
    return {f"m{i}": found[i] if i < len(found) else None for i in range(NUMBERS)}


def words_of(
    words: Sequence[tuple[int, ...]], placed: Sequence[Placed], opcode: int, tensors: Sequence[Tensor]
) -> tuple[tuple[Any, ...], ...]:
    """Return a program as kernels take it: in place of each function its Triton function, and of biases' the derivative too.

    The derivative is that by the score, 0 where the function does not depend on it.
    """
    found: list[tuple[Any, ...]] = []
    for word in words:
        if word[0] == opcode:
            root = placed[word[1]].function.root
            slopes = [slope for node, slope in derivatives(root).items() if node.op == "var"]
            texts = [text_of(placed[word[1]], each, tensors) for each in (root, *slopes)]
            word = (opcode, *texts) if placed[word[1]].whose == "mask" or slopes else (opcode, *texts, 0)
        found.append(word)
    return tuple(found)


def text_of(placed: Placed, root: Expr, tensors: Sequence[Tensor]) -> FunctionText:
    """Return an expression of a function's variables and captures as a Triton function, whose result is float32 or bool."""
    wide = tuple(is_wide(tensors[number]) for number in placed.function.tensors)
    return _written(placed, root, wide, False)


def place_of(placed: Placed, load: Expr, tensors: Sequence[Tensor]) -> FunctionText:
    """Return the number of the element that a function loads, of the tensor laid out densely, as a Triton function."""
    wide = tuple(is_wide(tensors[number]) for number in placed.function.tensors)
    return _written(placed, load, wide, True)


def is_wide(x: Tensor) -> bool:
    """Return whether places in a tensor take 64 bits."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) >= _WIDE


@functools.lru_cache(maxsize=1024)
def _written(placed: Placed, root: Expr, wide: tuple[bool, ...], place: bool) -> FunctionText:
    writing = _Writing(placed, wide)
    if place:
        for at in coordinates(root):
            writing.write(at)
        result = writing.dense_place(root)
    else:
        writing.write(root)
        result = writing.names[root]
        result = result if root.dtype == "b1" else converted(result, root.dtype, "f32")
    name = "place" if place else "function"
    body = [*writing.lines, f"return {result}"]
    head = f"@triton.jit\ndef {name}(score, slots, numbers, b, h, i, j):\n"
    text = head + "".join(f"    {line}\n" for line in body)
    return FunctionText(name, _IMPORTS + text)


_IN_TRITON = {"f32": {"tanh", "log", "log2", "sin", "cos", "erf"}, "f64": {"log", "log2", "sin", "cos", "erf"}}
"""Functions that Triton's language has, and its interpreter; ``tanh`` is this folder's."""
_IMPORTS = f"""import triton
import triton.language as tl
from {_EMITTED} import opk_div, opk_floordiv, opk_fmod, opk_max, opk_max_nan, opk_min, opk_min_nan, opk_pow, opk_rem
from {_EMITTED} import opk_rem_float, opk_shl, opk_shr, opk_shr_unsigned
from triton.language.extra import libdevice

from {_DEVICE} import of_pairs, tanh, within


"""


class _Writing:
    """Writes the lines of a function; ``names`` are those of the nodes."""

    def __init__(self, placed: Placed, wide: Sequence[bool]) -> None:
        self.placed, self.wide = placed, wide
        self.slot, self.number = OTHER_SLOTS + placed.tensors, OTHER_NUMBERS + placed.numbers
        self.names: dict[Expr, str] = {}
        self.lines: list[str] = []

    def write(self, root: Expr) -> None:
        for node in root.walk():
            if node not in self.names:
                self.names[node] = f"x{len(self.names)}"
                self.lines.append(f"{self.names[node]} = {self._text(node)}")

    def _text(self, node: Expr) -> str:
        if node.op == "const":
            return constant(node.data, node.dtype)
        if node.op == "var":
            return self._variable(node)
        if node.op == "load":
            return self._load(node)
        texts = [self.names[each] for each in node.args]
        if node.op == "cast":
            return converted(texts[0], node.args[0].dtype, node.dtype)
        if node.op == "bitcast":
            return f"{texts[0]}.to({TYPES[node.dtype]}, bitcast=True)"
        if node.op == "nonzero":
            return texts[0]
        if node.dtype in _IN_TRITON and node.op in _IN_TRITON[node.dtype]:
            return f"{'' if node.op == 'tanh' else 'tl.'}{node.op}({texts[0]})"
        return applied(node.op, node.args[-1].dtype, texts, exact=False)

    def _variable(self, node: Expr) -> str:
        kind, integers = node.data[0], len(self.placed.function.integers)
        if kind == "n":
            return f"numbers[{self.number + int(node.data[1:])}].to({TYPES[node.dtype]})"
        if kind == "x":
            bits = f"numbers[{self.number + integers + int(node.data[1:])}]"
            return converted(f"{bits}.to(tl.int32).to(tl.float32, bitcast=True)", "f32", node.dtype)
        return f"{node.data}.to({TYPES[node.dtype]})"

    def _load(self, node: Expr) -> str:
        tensor = int(node.data[0][1:])
        slot = self.slot + tensor
        at = self._coordinates(node)
        steps = [f"{text} * slots[{slot}][{1 + DIMS - len(at) + dim}]" for dim, text in enumerate(at)]
        place = f"slots[{slot}][0] + ({' + '.join(steps) or 0})"
        each = {"i", "j"} <= (of := variables_of(node)) or "score" in of
        found = f"of_pairs({place}, {self._size(node, 0)})" if each else f"tl.load({place})"
        return f"({found} != 0)" if node.dtype == "b1" else found

    def _coordinates(self, node: Expr) -> list[str]:
        """Return the coordinates of a load, limited to its tensor, in as many bits as places in it take."""
        (variables,) = (at for each, at in indexed(node) if each is node)
        bits = ".to(tl.int64)" if self.wide[int(node.data[0][1:])] else ""
        found: list[str] = []
        for dim, (at, variable) in enumerate(zip(coordinates(node), variables, strict=True)):
            found.append(f"{variable or f'within({self.names[at]}, {self._size(node, dim)})'}{bits}")
        return found

    def _size(self, node: Expr, dim: int) -> str:
        return f"numbers[{OTHER_NUMBERS + self.placed.sizes(int(node.data[0][1:])) + dim}]"

    def dense_place(self, node: Expr) -> str:
        """Return where in a dense tensor an element lies."""
        text = "0"
        for dim, at in enumerate(self._coordinates(node)):
            text = f"({text}) * {self._size(node, dim)} + {at}" if dim else at
        return text
