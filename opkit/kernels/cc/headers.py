"""Find the headers that a request's units include, in the request's own folders."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from opkit.kernels.cc.request import Request

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include(?:_next)?[ \t]*(?:["<]([^">\n]+)[">]|([A-Za-z_]\w*))', re.MULTILINE)
_HEADER_SUFFIXES = (".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".inl", ".def", ".ipp", ".tpp", "")


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
            yield from (os.path.join(place, name) for name in names if os.path.splitext(name)[1] in _HEADER_SUFFIXES)
