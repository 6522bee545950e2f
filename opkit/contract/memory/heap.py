"""What is to be asked of the C library's heap: how much is in use, what fresh memory holds, whether it is whole.

Glibc's answers; there are none elsewhere. They are asked in child processes, whose heap is nobody else's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from collections.abc import Generator

_PERTURB = -6  # M_PERTURB of malloc.h
_CACHED = range(24, 521, 16)  # of the sizes of which each thread keeps freed blocks, to hand them out as they were left
_KEPT = 7  # of each size
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def missing() -> str:
    """Why nothing can be asked of the heap here, or ""."""
    known = platform.libc_ver()[0] == "glibc" and hasattr(_libc(), "mallinfo2")
    return "" if known else "it needs glibc 2.33 or newer"


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Info
    return libc


def used() -> int:
    """Bytes that are allocated."""
    info = _libc().mallinfo2()
    return info.uordblks + info.hblkhd


def inspect() -> None:
    """Make malloc look at what it has; it aborts the process where something was written over its own data."""
    if not missing():
        _libc().malloc_trim(1 << 30)


@contextlib.contextmanager
def poisoned(byte: int) -> Generator[None]:
    """Fresh memory holds ``byte``, which cannot be 255: that of torch's allocator, of numpy's, and of kernels themselves."""
    libc = _libc()
    held = [libc.malloc(size) for size in _CACHED for _ in range(_KEPT)]
    libc.mallopt(_PERTURB, byte ^ 0xFF)
    try:
        yield
    finally:
        libc.mallopt(_PERTURB, 0)
        for block in held:
            libc.free(block)
