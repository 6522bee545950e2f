"""Hash the files that a module comes from: its own, those of the modules of its package that it imports, and so on.

With the hash a compiled kernel is found by the text of what it was compiled from, without importing any of it. The text
decides the result only where modules are as their files say; :func:`of` gives nothing where they may not be.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from opkit.kernels.triton import statements

_STARTED = time.time_ns()
_LIBRARIES = frozenset({"triton", "torch", "__future__", *sys.stdlib_module_names})
"""What may be imported in addition to the package: Triton and torch, of which the releases count, and Python's own."""

_ABOUT_TRITON = re.compile(r"^[ \t]*(?:from|import)[ \t]+triton\b", re.MULTILINE)


class File(NamedTuple):
    """A file of a module as it was when it was read first."""

    module: str
    path: Path
    stamp: tuple[int, int]  # its size, and when it was written
    digest: str
    imports: tuple[str, ...]  # modules of the same package
    others: tuple[str, ...]  # the packages of all others
    of_gpu: bool  # whether it imports Triton


_files: dict[str, File] = {}
_imported_here: dict[str, dict[str, Any]] = {}  # by :func:`loading`: the modules, with what they defined then
_lock = threading.RLock()


def of(module: str) -> str | None:
    """sha256 over all files of a module; None where they do not decide what importing it gives in this process.

    They do not where one cannot be found, where it imports a library that is unknown here, where a module was imported before
    its file was written, and where one that imports Triton was imported by others, who may have changed it.
    """
    with _lock:
        files = _closure(module)
        if files is None or not all(map(_usable, files.values())):
            return None
    parts = [(name, file.digest) for name, file in sorted(files.items())]
    return hashlib.sha256(repr((module, parts)).encode()).hexdigest()


def names(module: str) -> list[str]:
    """Return the modules whose files count, in order; empty where one cannot be found."""
    with _lock:
        return sorted(_closure(module) or ())


def _closure(module: str) -> Mapping[str, File] | None:
    found: dict[str, File] = {}
    left = [module]
    while left:
        name = left.pop()
        file = _read(name)
        if file is None:
            return None
        found[name] = file
        left += [each for each in file.imports if each not in found and each not in left]
    return found


def _usable(file: File) -> bool:
    if not set(file.others) <= _LIBRARIES:
        return False
    if file.module not in sys.modules or file.module in _imported_here:
        return True
    return not file.of_gpu and file.stamp[1] <= _STARTED


def _read(module: str) -> File | None:
    if module not in _files:
        path = statements.file_of(module)
        try:
            file = None if path is None else _file(module, path)
        except (OSError, UnicodeDecodeError):
            file = None
        if file is None:
            return None
        _files[module] = file
    return _files[module]


def _file(module: str, path: Path) -> File:
    stamp, data = _stamp(path), path.read_bytes()
    text = data.decode("utf-8")
    own, others = set[str](), set[str]()
    for each in statements.imports(text, module):
        top = each.module.partition(".")[0]
        if top == module.partition(".")[0]:
            own.add(_meant(each))
        else:
            others.add(top)
    about = _ABOUT_TRITON.search(text) is not None
    digest = hashlib.sha256(data).hexdigest()
    return File(module, path, stamp, digest, tuple(sorted(own)), tuple(sorted(others)), about)


def _meant(each: statements.Imported) -> str:
    """Return the module that a statement imports: a name may be that of a module, or of something in one."""
    inner = f"{each.module}.{each.name}"
    return inner if each.name and statements.file_of(inner) is not None else each.module


def _stamp(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


# ---- what this process has imported ----------------------------------------------------------------------------------


def load(module: str) -> Any:
    """Import a module, and note what it and the modules that it imports define."""
    with _lock:
        before = {name for name in names(module) if name in sys.modules}
        found = importlib.import_module(module)
        for name in names(module):
            if name not in before and name in sys.modules:
                _imported_here[name] = dict(vars(sys.modules[name]))
    return found


def untouched(module: str) -> bool:
    """Return whether an imported module, and those that it imports, are as their files, and as the import left them."""
    with _lock:
        files = _closure(module)
        return files is not None and all(_usable(file) and _as_read(file) and _as_left(file) for file in files.values())


def _as_read(file: File) -> bool:
    try:
        return _stamp(file.path) == file.stamp
    except OSError:
        return False


def _as_left(file: File) -> bool:
    noted = _imported_here.get(file.module)
    now = vars(sys.modules[file.module]) if file.module in sys.modules else None
    return noted is None or (now is not None and all(now.get(name) is value for name, value in noted.items()))
