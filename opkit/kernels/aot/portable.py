"""Locate a Python package, and identify a kernel's source independently of that location."""

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

_FORMAT = 1  # of an identity: change it when the meaning of its parts changes
_SEARCH_FLAG = re.compile(r"(-I|-L|-isystem|-Wl,-rpath[,=])?(/.*)")


# ---- location --------------------------------------------------------------------------------------------------------


def root(module: str) -> Path | None:
    """Return the folder of a module's top-level package, or of a module outside packages; None if it has none."""
    listed = _above(module)
    return listed[-1] if listed else None


def places(module: str, name: str) -> list[Path]:
    """Return the folders called ``name`` next to a module and in the packages that contain it, the nearest first.

    A module outside packages may be next to others, so its folder has its name too.
    """
    alone = "." not in real_name(module) and not _is_package(module)
    return [folder / (f"{name}_{real_name(module)}" if alone else name) for folder in _above(module)]


def _above(module: str) -> list[Path]:
    """Return the folders of the packages that contain a module, the nearest first."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return []
    folder = Path(os.path.abspath(file)).parent
    depth = real_name(module).count(".") + _is_package(module)
    return [folder, *folder.parents][: max(1, depth)]


def _is_package(module: str) -> bool:
    return hasattr(sys.modules.get(module), "__path__")


def real_name(module: str) -> str:
    """Return the name by which a module can be imported, also of the one that was started as ``__main__``."""
    if module != "__main__":
        return module
    main = sys.modules[module]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None else Path(getattr(main, "__file__", None) or module).stem


# ---- identity --------------------------------------------------------------------------------------------------------


def identity(native: NativeKernel, bound: Bound, folder: Path) -> str:
    """Return a hash of the author's source and options, independent of the location of the package ``folder``.

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
    """Return the sha256 of the package's own headers and further sources of a kernel, by their path in ``folder``."""
    sources = ((str(path), sha256_of(path)) for path in native.sources)
    found = {_within(path, folder): content for path, content in (*sources, *build_key.headers(request))}
    return {path: content for path, content in sorted(found.items()) if path}


def _portable(text: str, folder: Path) -> str:
    return text.replace(f"{folder}{os.sep}", "").replace(str(folder), ".")


def _nameless(flag: str) -> str:
    """Return a flag without the folder that it names, which differs between machines."""
    found = _SEARCH_FLAG.fullmatch(flag)
    return flag if found is None else f"{found[1] or ''}{Path(found[2]).name}"


def _within(path: str | os.PathLike[str], folder: Path) -> str:
    """Return the path in the folder; "" if it is outside."""
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else ""


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
