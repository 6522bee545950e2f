"""The functions of libraries that kernels call, by address."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from opkit.compiler.ir.callee import Callee
from opkit.errors import CompileError


def table(functions: Sequence[Callee]) -> ctypes.Array[Any]:
    """Their addresses, in order.

    Raises:
        CompileError: a library is not there, or has no such function.
    """
    return (ctypes.c_void_p * max(1, len(functions)))(*map(_address, functions))


def _address(callee: Callee) -> int:
    try:
        library = _loaded(callee.library)
        if callee.given:
            _init_kernel(callee.library)
            entry = library.opk_entry
            entry.restype = ctypes.c_void_p
            return int(entry(callee.instance))
        return ctypes.cast(getattr(library, callee.name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        raise CompileError(f"the function {callee.name} of {callee.library} cannot be called: {error}") from error


@functools.cache
def _loaded(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


@functools.cache
def _init_kernel(path: str) -> None:
    """Give a kernel's library opkit's runtime; loading it again would drop the output sizes that its operator added."""
    from opkit import _core

    _loaded(path).opk_init(ctypes.c_void_p(_core.runtime_address()))
