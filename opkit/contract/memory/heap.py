"""This module controls the C library's heap: its used bytes, the contents of fresh memory, and its consistency.

It needs glibc, and runs in child processes, whose heap nothing else uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from collections.abc import Generator

_PERTURB = -6  # M_PERTURB of malloc.h
_CACHED = range(
    24, 521, 16
)  # sizes of which each thread caches freed blocks, which it hands out with their old contents
_BLOCKS_CACHED = 7  # of each size
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def missing() -> str:
    """Return why the heap cannot be controlled here, or ""."""
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
    """Return the number of allocated bytes."""
    info = _libc().mallinfo2()
    return info.uordblks + info.hblkhd


def inspect() -> None:
    """Let malloc check its data; it aborts the process if something has overwritten them."""
    if not missing():
        _libc().malloc_trim(1 << 30)


@contextlib.contextmanager
def poisoned(byte: int) -> Generator[None]:
    """Fill fresh memory of torch's allocator, of numpy's and of kernels with ``byte``, which cannot be 255."""
    libc = _libc()
    blocks = [libc.malloc(size) for size in _CACHED for _ in range(_BLOCKS_CACHED)]
    libc.mallopt(_PERTURB, byte ^ 0xFF)
    try:
        yield
    finally:
        libc.mallopt(_PERTURB, 0)
        for block in blocks:
            libc.free(block)
