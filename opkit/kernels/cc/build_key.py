"""Compute the key of a build: a hash of everything that decides its result."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from opkit.errors import ToolchainError
from opkit.kernels.cc import toolchain
from opkit.kernels.cc.commands import BuildPlan, Request, is_native
from opkit.kernels.cc.isa import cpu_features
from opkit.kernels.cc.toolchain import Compiler

_FORMAT = 1  # of this key: change it when the meaning of its parts changes
_HEADER = Path(__file__).parents[1] / "include" / "opkit.h"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include(?:_next)?[ \t]*(?:["<]([^">\n]+)[">]|([A-Za-z_]\w*))', re.MULTILINE)
_HEADERS = (".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".inl", ".def", ".ipp", ".tpp", "")

# The environment variables that compilers read.
_VARIABLES = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "SDKROOT",
    "MACOSX_DEPLOYMENT_TARGET",
)


@functools.cache
def abi_version() -> int:
    """Return ``OPK_ABI_VERSION`` of this opkit's header."""
    found = re.search(r"^#define OPK_ABI_VERSION (\d+)$", _HEADER.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"{_HEADER} does not define OPK_ABI_VERSION"
    return int(found[1])


def key(request: Request, plan: BuildPlan) -> str:
    """Return the sha256, in hexadecimal, of everything that decides the result; the label is not part of it."""
    parts = (
        _FORMAT,
        abi_version(),
        [(unit.name, unit.text, unit.language) for unit in request.units],
        plan.units,
        plan.link,
        [(compiler.path, compiler.family, compiler.identity) for compiler in _compilers(plan)],
        cpu_features() if is_native(plan, request) else (),
        list(headers(request)),
        list(_libraries(request)),
        [(name, os.environ[name]) for name in _VARIABLES if name in os.environ],
    )
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()


def _compilers(plan: BuildPlan) -> Iterator[Compiler]:
    """Yield the compilers of the plan, and the one that nvcc calls."""
    yield from plan.compilers
    if plan.compiler.family == "nvcc":
        with contextlib.suppress(ToolchainError):
            yield toolchain.find("c++")


# ---- headers ---------------------------------------------------------------------------------------------------------


def headers(request: Request) -> Iterator[tuple[str, str]]:
    """Yield each header that the units include, directly or not, with a hash of its content.

    Only those in the request's folders: the compiler's identity stands for the system's. A header that is included under a
    condition counts, whatever the condition. Where a macro names the file, all headers of the folders count.
    """
    folders = [os.path.abspath(folder) for folder in request.include_dirs]
    folders += [flag[2:] for flag in request.flags if flag.startswith("-I") and len(flag) > 2]
    if not folders:
        return
    seen: dict[str, str] = {}
    for unit in request.units:
        _follow(unit.text, folders, seen)
    yield from sorted(seen.items())


def _follow(text: str, folders: list[str], seen: dict[str, str], own: str | None = None) -> None:
    for name, macro in _INCLUDE.findall(text):
        near = [own, *folders] if own is not None else folders
        paths = _all_headers(folders) if macro else (os.path.join(folder, name) for folder in near)
        for path in paths:
            if path not in seen and os.path.isfile(path):
                content = Path(path).read_bytes()
                seen[path] = hashlib.sha256(content).hexdigest()
                _follow(content.decode("utf-8", "replace"), folders, seen, os.path.dirname(path))


def _all_headers(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        for place, _, names in os.walk(folder):
            yield from (os.path.join(place, name) for name in names if os.path.splitext(name)[1] in _HEADERS)


# ---- libraries -------------------------------------------------------------------------------------------------------


def _libraries(request: Request) -> Iterator[tuple[str, int, int]]:
    """Yield the linked files whose location the request gives, with size and time of change."""
    paths = [text for text in (*request.libraries, *request.flags) if os.path.isabs(text)]
    for folder in [os.path.abspath(each) for each in request.library_dirs]:
        names = [form.format(name) for name in request.libraries for form in ("lib{}.so", "lib{}.a", "{}")]
        paths += [os.path.join(folder, name) for name in names]
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        yield path, status.st_size, status.st_mtime_ns
