"""Users' functions as machine code of the CPU, built once for an expression: numbers, sizes and strides are a call's."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from opkit.attn.functions.c.emission import ENTRY, TABULATE, mask_text, score_text, slope_text
from opkit.attn.functions.c.loops import Layout
from opkit.attn.functions.expression import Function
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr
from opkit.compiler.run import library
from opkit.errors import ToolchainError
from opkit.kernels.cc import toolchain
from opkit.kernels.cc.compilation import Request, Unit, build

Kind = Literal["mask", "score", "slope"]
TEXTS: dict[Kind, Callable[[Expr], tuple[str, int]]] = {"mask": mask_text, "score": score_text, "slope": slope_text}


class Code(NamedTuple):
    """The addresses of code, and of what tabulates distances for it: so many bytes for each; 0 for none."""

    entry: int = 0
    tabulate: int = 0
    bytes: int = 0


class CompiledFunction(NamedTuple):
    """A function as the C++ kernels take it: ``Function`` of ``cpp_ext/attention/function.hpp``.

    Attributes:
        code: of the mask or score.
        slope: of the score's derivatives, if they are needed.
        words: the captured numbers, and the sizes and strides of the captured tensors; addresses are left out.
        tensors: of each captured tensor the word of its address, and its number in the program's list.
    """

    code: Code
    slope: Code
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
        _code(function.root, kind), _code(function.root, "slope") if slope else Code(), words, places
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
def _code(root: Expr, kind: Kind) -> Code:
    text, entry_bytes = TEXTS[kind](root)
    request = Request(f"a {kind} function of attention", (Unit(f"{kind}_function.c", text, "c"),), library.flags())
    loaded = _load(str(build(request)))
    return Code(_address(loaded, ENTRY), _address(loaded, TABULATE) if entry_bytes else 0, entry_bytes)


def _address(loaded: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)
