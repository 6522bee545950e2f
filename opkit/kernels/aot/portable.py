"""Where a Python package lies, and what identifies a kernel's source wherever that is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
from pathlib import Path

from opkit.kernels.binding.binding import Bound
from opkit.kernels.cc import build_key
from opkit.kernels.cc.commands import Request
from opkit.kernels.cc.native import NativeKernel

_FORMAT = 1  # of an identity: change it when what goes in changes its meaning
_SEARCH_FLAG = re.compile(r"(-I|-L|-isystem|-Wl,-rpath[,=])?(/.*)")


# ---- where -----------------------------------------------------------------------------------------------------------


def root(module: str) -> Path | None:
    """The folder of a module's top-level package, or the folder that a module of its own lies in; None if it has none."""
    listed = _above(module)
    return listed[-1] if listed else None


def places(module: str, name: str) -> list[Path]:
    """The folders called ``name`` beside a module and in the packages that it is part of, the nearest first.

    A module of its own may lie among others, so its folder bears its name too.
    """
    alone = "." not in real_name(module) and not _is_package(module)
    return [folder / (f"{name}_{real_name(module)}" if alone else name) for folder in _above(module)]


def _above(module: str) -> list[Path]:
    """The folders of the packages that a module is part of, the nearest first."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return []
    folder = Path(os.path.abspath(file)).parent
    depth = real_name(module).count(".") + _is_package(module)
    return [folder, *folder.parents][: max(1, depth)]


def _is_package(module: str) -> bool:
    return hasattr(sys.modules.get(module), "__path__")


def real_name(module: str) -> str:
    """The name by which a module can be imported, if it is the one that was started."""
    if module != "__main__":
        return module
    main = sys.modules[module]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None else Path(getattr(main, "__file__", None) or module).stem


# ---- what was compiled -----------------------------------------------------------------------------------------------


def identity(native: NativeKernel, bound: Bound, folder: Path) -> str:
    """A hash of all that the author wrote which decides what is compiled, wherever the package ``folder`` lies.

    Neither the compiler nor the instruction set is part of it.
    """
    parts = (
        _FORMAT,
        native.language,
        native.name,
        _portable(native.text, folder),
        [(variable, list(types)) for variable, types in native.variables.items()],
        sorted(native.bind.items()),
        [_nameless(_portable(flag, folder)) for flag in native.flags],
        [_nameless(_portable(library, folder)) for library in native.libraries],
        [_within(path, folder) for path in (*native.sources, *native.include_dirs)],
        dataclasses.asdict(bound.facts),
    )
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()


def files(native: NativeKernel, request: Request, folder: Path) -> dict[str, str]:
    """The sha256 of the package's own headers and further sources that go into a kernel, by their path in ``folder``."""
    sources = ((str(path), sha256_of(path)) for path in native.sources)
    found = {_within(path, folder): content for path, content in (*sources, *build_key.headers(request))}
    return {path: content for path, content in sorted(found.items()) if path}


def _portable(text: str, folder: Path) -> str:
    return text.replace(f"{folder}{os.sep}", "").replace(str(folder), ".")


def _nameless(flag: str) -> str:
    """A flag without the folder that it names: that of another machine."""
    found = _SEARCH_FLAG.fullmatch(flag)
    return flag if found is None else f"{found[1] or ''}{Path(found[2]).name}"


def _within(path: str | os.PathLike[str], folder: Path) -> str:
    """The path in the folder; empty where it is outside."""
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else ""


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
