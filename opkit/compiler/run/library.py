"""This module compiles and loads the C of a graph's segments, with torch's OpenMP and the library functions that kernels call.

Loading another OpenMP than torch's into the process would give it a second pool of threads, so none is loaded here.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import glob
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opkit.compiler.ir.expr import Callee
from opkit.compiler.run.torch_operators import missing_operator
from opkit.errors import CompileError, IndexOutOfRangeError
from opkit.kernels.cc import isa
from opkit.kernels.cc.compilation import Request, Unit, build
from opkit.op import registry
from opkit.op.native.function import NativeFunction
from opkit.op.trace.contract_hash import contract_hash

# Signed integers wrap around, as ATen's do. "omp simd" alone of OpenMP: the sharing among threads is done by hand, on the
# OpenMP that torch has loaded. Of gcc's levels, the vectoriser is what loop nests that were planned already need: sixteen
# kernels took gcc 12 0.5 s so, and 0.95 s at "-O3"; a tanh in float32 was slower without "-fexpensive-optimizations".
_FLAGS = (
    "-O1",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fexpensive-optimizations",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fopenmp-simd",
    "-ffp-contract=off",
    "-fno-semantic-interposition",
)
_MACHINES = {"x86_64": ("-mprefer-vector-width=512",)}

_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (IndexOutOfRangeError, "index {} is out of range for a dimension of size {}"),
    2: (MemoryError, "there is no memory for {} bytes of scratch"),
    3: (RuntimeError, "ZeroDivisionError: an integer was divided by {}"),  # as eager names it
}


class Runtime(ctypes.Structure):
    """``struct opkit_runtime``; see ``opkit.compiler.emit.c.source``."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),
        ("thread", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("error", ctypes.c_int64 * 3),
        ("functions", ctypes.c_void_p),
    )


class LoadedKernel(NamedTuple):
    """A kernel on a device: the address of its function, the threads of a program, and its bytes of shared memory."""

    function: int
    threads: int
    shared: int


@dataclasses.dataclass(frozen=True)
class LoadedSegments:
    """The loaded code of a graph.

    Attributes:
        addresses: of segments, functions that take pointers, sizes and a runtime, and return 0 or an error's code.
        library: their library.
        kernels: the kernels of a GPU.
    """

    addresses: tuple[int, ...] = ()
    library: ctypes.CDLL | None = None
    kernels: Sequence[LoadedKernel] = ()


def flags() -> tuple[str, ...]:
    """Return the flags of ``opkit.kernels.cc.compilation.Request``."""
    return (*_FLAGS, *_MACHINES.get(isa.machine(), ()))


class SegmentsBuild:
    """The translation units of a graph, which the C compiler compiles in the background: that takes longer than all else.

    Args:
        texts: the C; empty if there are no segments.
        count: the number of segments.
        label: their name in messages.
        flags: the compiler's flags.
    """

    def __init__(self, texts: Sequence[str], count: int, label: str, flags: Sequence[str] = ()) -> None:
        units = tuple(Unit(f"graph{number}.c", text, "c") for number, text in enumerate(texts))
        self._request, self._count, self._process = Request(label, units, tuple(flags)), count, os.getpid()
        self._path: Future[Path] = Future()
        if count:
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(self._make,), name="opkit-graph").start()

    def _make(self) -> None:
        try:
            self._path.set_result(build(self._request))
        except BaseException as error:
            self._path.set_exception(error)

    def wait(self) -> LoadedSegments:
        """Wait for the compiler, and return the loaded functions.

        Raises:
            ToolchainError: there is no C compiler.
            CompileError: the compiler refused the text.
        """
        if self._count == 0:
            return LoadedSegments()
        # a process that was forked in the meantime does not have the thread
        path = self._path.result() if self._process == os.getpid() else build(self._request)
        return _segments(ctypes.CDLL(str(path)), self._count)


@contextlib.contextmanager
def as_file(image: bytes) -> Iterator[str]:
    """Return the path of a file with the bytes of a library, which exists for as long as it takes to load it."""
    with tempfile.NamedTemporaryFile(prefix="opkit-", suffix=".so") as file:
        file.write(image)
        file.flush()
        yield file.name


def from_bytes(image: bytes, count: int) -> LoadedSegments:
    """Return the segments of a library that is in no file.

    Raises:
        OSError: it is no library, or libraries in the folder of temporary files may not be loaded.
    """
    with as_file(image) as path:
        return _segments(ctypes.CDLL(path), count)


def _segments(library: ctypes.CDLL, count: int) -> LoadedSegments:
    return LoadedSegments(tuple(_address(library, number) for number in range(count)), library)


def _address(library: ctypes.CDLL, number: int) -> int:
    return ctypes.cast(getattr(library, f"opkit_segment_{number}"), ctypes.c_void_p).value or 0


def runtime(functions: int | None = None) -> Runtime:
    """Return a runtime for one call at a time, with torch's OpenMP; ``functions`` is the address of the table of callees."""
    return Runtime(*openmp_functions(), 1, (0, 0, 0), functions)


def raise_error(state: Runtime, origins: Sequence[str], graph: str) -> None:
    """Raise the error that a segment reported.

    Raises:
        IndexOutOfRangeError: an index that was read from memory is out of range.
        RuntimeError: an integer was divided by 0.
        MemoryError: a kernel could not allocate its scratch memory.
    """
    code, *numbers = state.error
    state.error[:] = (0, 0, 0)
    where = "; ".join(dict.fromkeys(filter(None, origins)))
    kind, what = _ERRORS[code]
    raise kind(f"{what.format(*numbers)} (in {graph}{', at one of: ' + where if where else ''})")


# ---- functions of other libraries that kernels call -------------------------------------------------------------------


def function_table(functions: Sequence[Callee]) -> ctypes.Array[Any]:
    """Return the addresses of functions, in order.

    Raises:
        CompileError: a library does not exist, or does not have the function.
    """
    return (ctypes.c_void_p * max(1, len(functions)))(*map(_callee_address, functions))


_OF_OPERATOR = re.compile(r"(?P<operator>[\w.]+::[\w.]+)\[(?P<kernel>[^\]]+)\]#(?P<digest>[0-9a-f]+)")


def library_of(function: NativeFunction) -> str:
    """Return the name of the library of an operator's kernel, which is the same in every process, unlike its path."""
    return f"{function.operator.name}[{function.__name__}]#{_digest(function)}"


def _digest(function: NativeFunction) -> str:
    return contract_hash([("kernel", function)])


def callee_path(library: str) -> str:
    """Return the path of a library; that of an operator's kernel is built if need be.

    Raises:
        CompileError: this process has no such operator, or another kernel of that name.
    """
    named = _OF_OPERATOR.fullmatch(library)
    if named is None:
        return library
    op = registry.find(named["operator"])
    if op is None:
        raise CompileError(missing_operator(named["operator"]))
    kernels = op._operator.kernels.kernels
    kernel = next((each for each in kernels if each.name == named["kernel"]), None)
    if kernel is None or not isinstance(kernel.function, NativeFunction) or _digest(kernel.function) != named["digest"]:
        raise CompileError(
            f"The compiled function calls the kernel {named['kernel']} of {named['operator']}, which has changed since. "
            "Compile the function again."
        )
    return str(kernel.function.build())


def _callee_address(callee: Callee) -> int:
    path = callee_path(callee.library)
    try:
        library = load_callee(path)
        if callee.run_parameters:
            _init_kernel(path)
            entry = library.opk_entry
            entry.restype = ctypes.c_void_p
            return int(entry(callee.instance))
        return ctypes.cast(getattr(library, callee.name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        raise CompileError(f"the function {callee.name} of {callee.library} cannot be called: {error}") from error


@functools.cache
def load_callee(path: str) -> ctypes.CDLL:
    """Return the library of functions that kernels call; its file is not read again."""
    return ctypes.CDLL(path)


@functools.cache
def _init_kernel(path: str) -> None:
    """Give a kernel's library opkit's runtime; loading it again would drop the output sizes that its operator added."""
    from opkit import _core

    load_callee(path).opk_init(ctypes.c_void_p(_core.runtime_address()))


# ---- torch's OpenMP --------------------------------------------------------------------------------------------------

_LIBRARY = re.compile(r"lib(g|i)?omp5?[\w.-]*\.(so|dylib)[\d.]*\Z")
_forked = False


def _set_forked() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_set_forked)


def threads() -> int:
    """Return how many threads a call may use: torch's number, or one in a forked process, which does not inherit the pool."""
    return 1 if _forked else torch.get_num_threads()


@functools.cache
def openmp_functions() -> tuple[int, int]:
    """Return the addresses of GOMP_parallel and omp_get_thread_num, or zeros if torch has no OpenMP with both."""
    for path in _openmp_libraries():
        found = _openmp_addresses(path)
        if found is not None:
            return found
    return 0, 0


def _openmp_addresses(path: str) -> tuple[int, int] | None:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        parallel, thread = library.GOMP_parallel, library.omp_get_thread_num
    except (OSError, AttributeError):
        return None
    return _function_address(parallel), _function_address(thread)


def _function_address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # pyright: ignore[reportArgumentType]


def _openmp_libraries() -> list[str]:
    """Return the OpenMP libraries in the process, torch's own first."""
    own = str(Path(torch.__file__).parent)
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        paths = [line[line.index("/") :] for line in lines if "/" in line]
    except OSError:
        paths = glob.glob(f"{glob.escape(own)}/lib/*omp*")
    found = [path for path in dict.fromkeys(paths) if _LIBRARY.search(os.path.basename(path))]
    return sorted(found, key=lambda path: not path.startswith(own))
