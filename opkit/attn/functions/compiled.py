"""Users' functions as machine code of the CPU, built once for an expression: numbers, sizes and strides are a call's."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from opkit.attn.functions.emission import ENTRY, mask_text, score_text, slope_text
from opkit.attn.functions.expression import Function
from opkit.attn.functions.loops import Layout
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr
from opkit.compiler.run import library
from opkit.errors import ToolchainError
from opkit.kernels.cc import toolchain
from opkit.kernels.cc.compilation import Request, Unit, build

Kind = Literal["mask", "score", "slope"]
_TEXTS: dict[Kind, Callable[[Expr], str]] = {"mask": mask_text, "score": score_text, "slope": slope_text}


class CompiledFunction(NamedTuple):
    """A function as the C++ kernels take it: ``Function`` of ``cpp_ext/attention/function.hpp``.

    Attributes:
        entry: the address of the code of the mask or score.
        slope: that of the score's derivatives, or 0.
        words: the captured numbers, and the sizes and strides of the captured tensors; addresses are left out.
        tensors: of each captured tensor the word of its address, and its number in the program's list.
    """

    entry: int
    slope: int
    words: list[int]
    tensors: list[tuple[int, int]]


def obstacle(function: Function, tensors: Sequence[Tensor]) -> str | None:
    """Return why a function cannot run as machine code, or None."""
    if any(DTYPES[node.dtype].kind == "complex" for node in function.root.walk()):
        return "a function computes with complex numbers"
    if any(tensors[number].device.type != "cpu" for number in function.tensors):
        return "a function captures a tensor that is not on the CPU"
    if not _has_compiler():
        return "there is no C compiler for the call's functions"
    return None


def _has_compiler() -> bool:
    try:
        toolchain.find("c")
    except ToolchainError:
        return False
    return True


def compiled(
    function: Function, kind: Literal["mask", "score"], tensors: Sequence[Tensor], slope: bool
) -> CompiledFunction:
    """Return a function's code and what it reads in calls of some shapes; ``slope``: with its derivatives.

    Raises:
        ToolchainError: there is no C compiler.
        CompileError: the compiler refused the text.
    """
    layout, captured = _layout(function.root), list(zip(_names(function.root), function.tensors, strict=True))
    words = [_word(function, name) for name in layout.numbers] + [0] * (layout.count - len(layout.numbers))
    for name, number in captured:
        sizes = [*tensors[number].shape, *tensors[number].stride()]
        words[layout.tensors[name] + 1 : layout.tensors[name] + 1 + len(sizes)] = sizes
    places = [(layout.tensors[name], number) for name, number in captured]
    return CompiledFunction(
        _address(function.root, kind), _address(function.root, "slope") if slope else 0, words, places
    )


@functools.lru_cache(256)
def _layout(root: Expr) -> Layout:
    return Layout.of(root)


def _names(root: Expr) -> list[str]:
    return list(_layout(root).tensors)


def _word(function: Function, name: str) -> int:
    place = int(name[1:])
    if name.startswith("n"):
        return function.integers[place]
    return struct.unpack("<q", struct.pack("<d", function.floats[place]))[0]


@functools.lru_cache(256)
def _address(root: Expr, kind: Kind) -> int:
    unit = Unit(f"{kind}_function.c", _TEXTS[kind](root), "c")
    path = build(Request(f"a {kind} function of attention", (unit,), library.flags()))
    return ctypes.cast(getattr(_load(str(path)), ENTRY), ctypes.c_void_p).value or 0


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)
