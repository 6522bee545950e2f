"""Read what else decides how Triton compiles, without importing it: its release, variables and settings.

If Triton was imported, its settings (``triton.knobs``) are read, which a program may have changed; else the environment, from
which they come.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

_READ = re.compile(
    r"(TRITON|LLVM|MLIR|AMDGCN|AMDGPU|NVPTX|PTXAS|GLUON|PROTON|DISABLE|ENABLE|ALLOW)_\w*|USE_IR_LOC", re.ASCII
)
"""The names of variables that Triton, LLVM or ptxas may read; more than they do."""

_COMPILES = ("TRITON_ALWAYS_COMPILE", "TRITON_KERNEL_OVERRIDE", "TRITON_KERNEL_DUMP")
_VERSION = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def watched() -> bool:
    """Return whether Triton compiles what it has already, or something inspects how it compiles."""
    knobs = _knobs()
    if knobs is None:
        return any(map(_is_on, _COMPILES))
    return any(
        (
            knobs.compilation.always_compile, knobs.compilation.override, knobs.compilation.dump_ir,
            knobs.compilation.listener, getattr(knobs.runtime, "add_stages_inspection_hook", None),
        )
    )  # fmt: skip


def interprets() -> bool:
    """Return whether functions that are decorated now are for Triton's interpreter."""
    knobs = _knobs()
    return _is_on("TRITON_INTERPRET") if knobs is None else bool(knobs.runtime.interpret)


def defaults() -> tuple[bool, str]:
    """Return what Triton compiles with where a kernel does not say: whether for debugging, and how instrumented."""
    knobs = _knobs()
    if knobs is None:
        return _is_on("TRITON_DEBUG"), os.environ.get("TRITON_INSTRUMENTATION_MODE", "")
    return bool(knobs.runtime.debug), str(knobs.compilation.instrumentation_mode)


def variables() -> list[tuple[str, str, tuple[int, int] | None]]:
    """Return the variables that Triton may read; of one that names a file, such as another ptxas, its size and time too."""
    named = sorted((name, value) for name, value in os.environ.items() if _READ.fullmatch(name))
    return [(name, value, _stamp(value) if os.path.isfile(value) else None) for name, value in named]


def knows_all() -> bool:
    """Return whether :func:`variables` has every variable by which Triton, which has been imported, says that results differ."""
    from triton._C import libtriton

    return all(map(_READ.fullmatch, libtriton.get_cache_invalidating_env_vars()))


@functools.cache
def compiler() -> tuple[str, tuple[int, int]] | None:
    """Triton's release, and its library's size and time; None where it is not installed, or not as it is known to be."""
    folder = _folder()
    try:
        version = None if folder is None else _VERSION.search((folder / "__init__.py").read_text(encoding="utf-8"))
        libraries = [] if folder is None else sorted((folder / "_C").glob("libtriton*.so"))
        return (version[1], _stamp(libraries[0])) if version and len(libraries) == 1 else None
    except OSError:
        return None


def runtime() -> tuple[str, str]:
    """Return the releases of Python, and of torch if it is imported, which modules import in addition to Triton."""
    return sys.version, str(getattr(sys.modules.get("torch"), "__version__", ""))


def _folder() -> Path | None:
    """Return where the package ``triton`` is."""
    try:
        found = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    places = () if found is None else found.submodule_search_locations or ()
    return next(map(Path, places), None)


def _stamp(path: Path | str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _knobs() -> Any:
    return sys.modules.get("triton.knobs")


def _is_on(name: str) -> bool:
    """As Triton reads it."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y")
