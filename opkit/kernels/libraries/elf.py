"""Read an ELF file without loading it: its machine, the symbols that it exports, its sections."""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"\x7fELF"
_HEADER = 20  # bytes: up to and with the machine
_DYNSYM = 11  # a section's type: symbols for the loader
_NOBITS = 8  # a section's type: it takes memory, but no space in the file
_KINDS = {0: "function", 1: "variable", 2: "function", 6: "variable", 10: "function"}  # 10: chosen when loaded
_LOCAL = 0  # a symbol's binding


class _Section(NamedTuple):
    name: int
    kind: int
    offset: int
    size: int
    link: int


class Section(NamedTuple):
    """The content of a section, and its size in memory, which is larger where it starts as zeros."""

    data: bytes
    size: int


def own(path: str | Path) -> bool:
    """Return whether this process could load the machine code in ``path``: the same machine, width and byte order."""
    theirs, ours = _identity(path), _identity(sys.executable)
    return theirs is not None and theirs == ours


def readable() -> bool:
    """Return whether this system's libraries are ELF files."""
    return _identity(sys.executable) is not None


def _identity(path: str | Path) -> tuple[bytes, bytes] | None:
    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER)
    except OSError:
        return None
    return (head[4:6], head[18:20]) if head.startswith(_MAGIC) and len(head) == _HEADER else None


def exported(path: str | Path) -> dict[str, str] | None:
    """Return the symbols that a library exports, each a "function" or a "variable"; None if they cannot be read."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _exported(data)
    except (OSError, ValueError, struct.error, IndexError):
        return None


def sections(image: bytes) -> dict[str, Section] | None:
    """Return the sections of a file by their names; None if they cannot be read. Of two with one name, the last.

    >>> sections(b"no such file")
    """
    try:
        return _named(image) if image.startswith(_MAGIC) and image[4] == 2 else None
    except (ValueError, struct.error, IndexError):
        return None


def _named(image: bytes) -> dict[str, Section]:
    order = "<" if image[5] == 1 else ">"
    listed = _sections(image, order)
    (place,) = struct.unpack_from(f"{order}H", image, 0x3E)
    names = image[listed[place].offset :]
    return {_text(names, section.name): _read(image, section) for section in listed}


def _read(image: bytes, section: _Section) -> Section:
    length = 0 if section.kind == _NOBITS else section.size
    return Section(image[section.offset : section.offset + length], section.size)


def _text(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode("utf-8", "replace")


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
    found: dict[str, str] = {}
    for name, info, _, section, _, _ in struct.iter_unpack(f"{order}IBBHQQ", symbols):
        if section != 0 and info >> 4 != _LOCAL and info & 15 in _KINDS:
            found[_text(names, name)] = _KINDS[info & 15]
    return found


def _sections(data: mmap.mmap | bytes, order: str) -> list[_Section]:
    (start,) = struct.unpack_from(f"{order}Q", data, 0x28)
    size, count = struct.unpack_from(f"{order}HH", data, 0x3A)
    found = []
    for number in range(count):
        words = struct.unpack_from(f"{order}IIQQQQI", data, start + number * size)
        found.append(_Section(words[0], words[1], words[4], words[5], words[6]))
    return found
