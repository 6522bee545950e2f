"""Read what decides how a kernel is compiled, without importing it or Triton: its files, and Triton's release and settings.

If Triton was imported, its settings (``triton.knobs``) are read, which a program may have changed; else the variables from
which they come. A module's files are its own, those of the modules of its package that it imports, and so on. With their hash a
compiled kernel is found by the text of what it was compiled from. The text decides the result only where modules are as their
files say; :func:`origin_of` gives nothing where they may not be.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from opkit.kernels.triton import parsing

_READ = re.compile(
    r"(TRITON|LLVM|MLIR|AMDGCN|AMDGPU|NVPTX|PTXAS|GLUON|PROTON|DISABLE|ENABLE|ALLOW)_\w*|USE_IR_LOC", re.ASCII
)
"""The names of variables that Triton, LLVM or ptxas may read; more than they do."""

_COMPILES = ("TRITON_ALWAYS_COMPILE", "TRITON_KERNEL_OVERRIDE", "TRITON_KERNEL_DUMP")


def watched() -> bool:
    """Return whether Triton compiles kernels that are cached too, or something inspects how it compiles."""
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
    """Return Triton's defaults: whether it compiles for debugging, and the instrumentation mode."""
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
def installed_triton() -> tuple[str, tuple[int, int]] | None:
    """Return Triton's release, and its library's size and time; None where it is not installed, or not in the known way."""
    folder = _folder()
    if folder is None:
        return None
    try:
        version = parsing.assigned((folder / "__init__.py").read_text(encoding="utf-8"), "__version__")
        libraries = sorted((folder / "_C").glob("libtriton*.so"))
        if not isinstance(version, ast.Constant) or not isinstance(version.value, str) or len(libraries) != 1:
            return None
        return version.value, _stamp(libraries[0])
    except OSError:
        return None


def releases() -> tuple[str, ...]:
    """Return the releases of Python, and of torch and NumPy if they are imported, which modules import besides Triton."""
    return sys.version, *(str(getattr(sys.modules.get(name), "__version__", "")) for name in ("torch", "numpy"))


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
    """Return whether a variable is set, as Triton reads it."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y")


# ---- the files that a module comes from ------------------------------------------------------------------------------


_STARTED = time.time_ns()
_LIBRARIES = frozenset({"triton", "torch", "numpy", "__future__", *sys.stdlib_module_names})
"""The packages that may also be imported: Triton, torch and NumPy, whose releases count, and the standard library."""


class SourceFile(NamedTuple):
    """A file of a module as it was when it was read first."""

    module: str
    path: Path
    stamp: tuple[int, int]  # its size, and when it was written
    digest: str
    imports: tuple[str, ...]  # modules of the same package
    others: tuple[str, ...]  # the packages of all others


_files: dict[str, SourceFile] = {}
_imported_here: dict[str, dict[str, Any]] = {}  # by :func:`loading`: the modules, with what they defined then
_lock = threading.RLock()


def origin_of(module: str) -> str | None:
    """Return the sha256 of all files of a module; None where they do not decide what importing it gives in this process.

    They do not where one cannot be found, where it imports a library that is unknown here, where a module was imported before
    its file was written, and where one that imports Triton was imported by others, who may have changed it.
    """
    with _lock:
        files = _closure(module)
        if files is None or not all(map(_usable, files.values())):
            return None
    parts = [(name, file.digest) for name, file in sorted(files.items())]
    return hashlib.sha256(repr((module, parts)).encode()).hexdigest()


def origin_names(module: str) -> list[str]:
    """Return the modules whose files count, in order; empty where one cannot be found."""
    with _lock:
        return sorted(_closure(module) or ())


def _closure(module: str) -> Mapping[str, SourceFile] | None:
    found: dict[str, SourceFile] = {}
    left = [module]
    while left:
        name = left.pop()
        file = _source_file(name)
        if file is None:
            return None
        found[name] = file
        left += [each for each in file.imports if each not in found and each not in left]
    return found


def _usable(file: SourceFile) -> bool:
    if not set(file.others) <= _LIBRARIES:
        return False
    if file.module not in sys.modules or file.module in _imported_here:
        return True
    return "triton" not in file.others and file.stamp[1] <= _STARTED


def _source_file(module: str) -> SourceFile | None:
    if module not in _files:
        path = parsing.file_of(module)
        try:
            file = None if path is None else _read_source(module, path)
        except (OSError, UnicodeDecodeError):
            file = None
        if file is None:
            return None
        _files[module] = file
    return _files[module]


def _read_source(module: str, path: Path) -> SourceFile:
    stamp, data = _stamp(path), path.read_bytes()
    text = data.decode("utf-8")
    own, others = set[str](), set[str]()
    for each in parsing.imports(text, module):
        top = each.module.partition(".")[0]
        if top == module.partition(".")[0]:
            own.add(_meant(each))
        else:
            others.add(top)
    digest = hashlib.sha256(data).hexdigest()
    return SourceFile(module, path, stamp, digest, tuple(sorted(own)), tuple(sorted(others)))


def _meant(each: parsing.Imported) -> str:
    """Return the module that a statement imports: a name may be that of a module, or of something in one."""
    inner = f"{each.module}.{each.name}"
    return inner if each.name and parsing.file_of(inner) is not None else each.module


# ---- what this process has imported ----------------------------------------------------------------------------------


def load_module(module: str) -> Any:
    """Import a module, and note what it and the modules that it imports define."""
    with _lock:
        before = {name for name in origin_names(module) if name in sys.modules}
        found = importlib.import_module(module)
        for name in origin_names(module):
            if name not in before and name in sys.modules:
                _imported_here[name] = dict(vars(sys.modules[name]))
    return found


def untouched(module: str) -> bool:
    """Return whether an imported module, and those that it imports, are as their files, and as the import left them."""
    with _lock:
        files = _closure(module)
        return files is not None and all(_usable(file) and _as_read(file) and _as_left(file) for file in files.values())


def _as_read(file: SourceFile) -> bool:
    try:
        return _stamp(file.path) == file.stamp
    except OSError:
        return False


def _as_left(file: SourceFile) -> bool:
    noted = _imported_here.get(file.module)
    now = vars(sys.modules[file.module]) if file.module in sys.modules else None
    return noted is None or (now is not None and all(now.get(name) is value for name, value in noted.items()))
