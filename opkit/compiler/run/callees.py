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
            _begun(callee.library)
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
def _begun(path: str) -> Any:
    """A kernel's library with the runtime that opkit gives to it, for as long as the process lives."""
    from opkit import _core

    return _core.KernelLibrary(path)
