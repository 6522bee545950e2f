"""The C of a graph's segments, compiled and loaded: one function for each."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence

from opkit.compiler.run import openmp
from opkit.kernels.compilation import Request, Unit, build

_WHAT = {
    1: "index {} is out of range for a dimension of size {}",
    2: "there is no memory for {} bytes of scratch",
}
_NO_MEMORY = 2


class Runtime(ctypes.Structure):
    """``struct opkit_runtime``; see ``opkit.compiler.emit.source``."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),
        ("thread", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("error", ctypes.c_int64 * 3),
    )


@dataclasses.dataclass(frozen=True)
class Segments:
    """Loaded functions; each takes the addresses of pointers, sizes and a runtime, and returns 0 or an error's code."""

    functions: tuple[Callable[[int, int, int], int], ...] = ()
    library: ctypes.CDLL | None = None


def load(text: str, count: int, label: str, flags: Sequence[str] = ()) -> Segments:
    """Compile a unit, or find it in the build cache, and load it.

    Raises:
        ToolchainError: there is no C compiler.
        CompileError: the compiler refused the text.
    """
    if count == 0:
        return Segments()
    path = build(Request(label, (Unit("graph.c", text, "c"),), tuple(flags)))
    library = ctypes.CDLL(str(path))
    return Segments(tuple(_function(library, number) for number in range(count)), library)


def _function(library: ctypes.CDLL, number: int) -> Callable[[int, int, int], int]:
    function = getattr(library, f"opkit_segment_{number}")
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_int64
    return function


def runtime() -> Runtime:
    """A runtime for one call at a time, with torch's OpenMP."""
    return Runtime(*openmp.functions(), 1)


def raise_error(state: Runtime, origins: Sequence[str], graph: str) -> None:
    """Raise what a segment reported.

    Raises:
        IndexError: an index that was read from memory is out of range.
        MemoryError: a kernel had no memory for its scratch.
    """
    code, *numbers = state.error
    state.error[:] = (0, 0, 0)
    where = "; ".join(dict.fromkeys(filter(None, origins)))
    what = _WHAT.get(code, "error {}, {}").format(*numbers)
    kind = MemoryError if code == _NO_MEMORY else IndexError
    raise kind(f"{what} (in {graph}{', at one of: ' + where if where else ''})")
