"""What an ELF file says of itself, read without loading it: the machine that it is for and the symbols that it exports."""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"\x7fELF"
_HEADER = 20  # bytes: up to and with the machine
_DYNSYM = 11  # a section's type: symbols for the loader
_KINDS = {0: "function", 1: "variable", 2: "function", 6: "variable", 10: "function"}  # 10: chosen when loaded
_LOCAL = 0  # a symbol's binding


class _Section(NamedTuple):
    kind: int
    offset: int
    size: int
    link: int


def own(path: str | Path) -> bool:
    """Whether ``path`` is a file of machine code that this process could load: the same machine, width and byte order."""
    theirs, ours = _identity(path), _identity(sys.executable)
    return theirs is not None and theirs == ours


def readable() -> bool:
    """Whether this system's libraries are such files at all."""
    return _identity(sys.executable) is not None


def _identity(path: str | Path) -> tuple[bytes, bytes] | None:
    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER)
    except OSError:
        return None
    return (head[4:6], head[18:20]) if head.startswith(_MAGIC) and len(head) == _HEADER else None


def exported(path: str | Path) -> dict[str, str] | None:
    """The symbols that a library defines for others, each a "function" or a "variable"; None if they cannot be read."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _exported(data)
    except (OSError, ValueError, struct.error, IndexError):
        return None


def _exported(data: mmap.mmap) -> dict[str, str] | None:
    if data[:4] != _MAGIC or data[4] != 2:
        return None
    order = "<" if data[5] == 1 else ">"
    sections = _sections(data, order)
    table = next((section for section in sections if section.kind == _DYNSYM), None)
    if table is None:
        return None
    strings = sections[table.link]
    names = data[strings.offset : strings.offset + strings.size]
    symbols = data[table.offset : table.offset + table.size]
    return dict(_symbols(symbols, names, order))


def _sections(data: mmap.mmap, order: str) -> list[_Section]:
    (start,) = struct.unpack_from(f"{order}Q", data, 0x28)
    size, count = struct.unpack_from(f"{order}HH", data, 0x3A)
    found = []
    for number in range(count):
        words = struct.unpack_from(f"{order}IIQQQQI", data, start + number * size)
        found.append(_Section(words[1], words[4], words[5], words[6]))
    return found


def _symbols(symbols: bytes, names: bytes, order: str) -> list[tuple[str, str]]:
    found = []
    for name, info, _, section, _, _ in struct.iter_unpack(f"{order}IBBHQQ", symbols):
        if section != 0 and info >> 4 != _LOCAL and info & 15 in _KINDS:
            text = names[name : names.index(b"\0", name)]
            found.append((text.decode("utf-8", "replace"), _KINDS[info & 15]))
    return found
