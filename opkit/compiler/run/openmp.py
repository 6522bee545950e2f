"""This module finds the OpenMP library that torch has loaded, and two of its functions, so that kernels use torch's threads.

Loading another OpenMP into the process would give it a second pool of threads, so nothing is loaded here.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import re
from pathlib import Path

import torch

_LIBRARY = re.compile(r"lib(g|i)?omp5?[\w.-]*\.(so|dylib)[\d.]*\Z")
_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def threads() -> int:
    """Return how many threads a call may use: torch's number, or one in a forked process, which does not inherit the pool."""
    return 1 if _forked else torch.get_num_threads()


@functools.cache
def functions() -> tuple[int, int]:
    """Return the addresses of GOMP_parallel and omp_get_thread_num, or zeros if torch has no OpenMP with both."""
    for path in _loaded():
        found = _addresses(path)
        if found is not None:
            return found
    return 0, 0


def _addresses(path: str) -> tuple[int, int] | None:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        parallel, thread = library.GOMP_parallel, library.omp_get_thread_num
    except (OSError, AttributeError):
        return None
    return _address(parallel), _address(thread)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # pyright: ignore[reportArgumentType]


def _loaded() -> list[str]:
    """Return the OpenMP libraries in the process, torch's own first."""
    own = str(Path(torch.__file__).parent)
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        paths = [line[line.index("/") :] for line in lines if "/" in line]
    except OSError:
        paths = glob.glob(f"{glob.escape(own)}/lib/*omp*")
    found = [path for path in dict.fromkeys(paths) if _LIBRARY.search(os.path.basename(path))]
    return sorted(found, key=lambda path: not path.startswith(own))
