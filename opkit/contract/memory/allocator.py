"""This module puts a protected page behind every block of torch's CPU allocator, in child processes, until they end.

libc10 calls posix_memalign and free through its table of imported functions. In this table the module replaces posix_memalign by
a function that ends each block at a protected page, as near as its alignment allows, and free by a function that does nothing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from opkit.contract.memory import guarded

_BYTE = b"\xa5"
_ALIGN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
_MAX_BLOCKS = 8192  # the kernel allows a process about 65,000 mappings
_LOAD, _DYNAMIC = 1, 2  # program headers of elf.h
_STRTAB, _SYMTAB, _RELA, _RELASZ, _PLTRELSZ, _JMPREL = 5, 6, 7, 8, 2, 23  # its dynamic tags
_PAGE = mmap.PAGESIZE
_WRITABLE = 3  # PROT_READ and PROT_WRITE


@functools.cache
def missing() -> str:
    """Return why blocks cannot be guarded here, or ""."""
    if guarded.missing():
        return guarded.missing()
    try:
        found = _slots("posix_memalign") and _slots("free")
    except (OSError, struct.error, ValueError, StopIteration):
        found = []
    return "" if found else "torch's allocator does not import posix_memalign and free here"


def _library() -> tuple[Path, int]:
    """Return libc10's file, and its address in memory."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        line = next(line for line in lines if line.rstrip().endswith("/libc10.so"))
    fields = line.split(maxsplit=5)
    return Path(fields[5].strip()), int(fields[0].split("-")[0], 16) - int(fields[2], 16)


@functools.cache
def _slots(name: str) -> list[int]:
    """Return where libc10 stores the address of an imported function, for calls and for uses of the address."""
    path, base = _library()
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    return [base + at for found, at in _imports(data) if found == name]


def _imports(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield the names of imported functions, and where their addresses are stored, relative to the library."""
    start, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", data, start + i * size) for i in range(count)]
    loads = [(address, offset, length) for kind, _, offset, address, _, length, _, _ in headers if kind == _LOAD]

    def at(address: int) -> int:
        return next(offset + address - first for first, offset, length in loads if first <= address < first + length)

    _, _, offset, _, _, length, _, _ = next(header for header in headers if header[0] == _DYNAMIC)
    tags = dict(struct.iter_unpack("<QQ", data[offset : offset + length]))
    for table, bytes_ in ((_JMPREL, _PLTRELSZ), (_RELA, _RELASZ)):
        if table not in tags:
            continue
        first = at(tags[table])
        for place, info, _ in struct.iter_unpack("<QQq", data[first : first + tags[bytes_]]):
            symbol = info >> 32
            if symbol:
                name = at(tags[_STRTAB]) + struct.unpack_from("<I", data, at(tags[_SYMTAB]) + 24 * symbol)[0]
                yield data[name : data.index(b"\0", name)].decode(), place


@functools.cache
def guard() -> Guard:
    """Return this process's guard. It stays in place: an operator may cache a block for its next call."""
    return Guard()


@dataclasses.dataclass
class Guard:
    """Blocks that torch allocates between calls of :meth:`begin` and :meth:`end`."""

    libc: ctypes.CDLL = dataclasses.field(default_factory=lambda: ctypes.CDLL(None))
    blocks: list[tuple[mmap.mmap, int, int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._callback = _ALIGN(self._align)
        self.libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]

    def begin(self) -> None:
        """Start to guard torch's blocks; none is freed from here on."""
        nothing = ctypes.cast(self.libc.getppid, ctypes.c_void_p).value or 0
        ours = ctypes.cast(self._callback, ctypes.c_void_p).value or 0
        self._set("free", nothing)
        self._set("posix_memalign", ours)

    def end(self) -> None:
        """Restore torch's allocation. The guarded blocks must never be freed, so free is not restored."""
        self._set("posix_memalign", ctypes.cast(self.libc.posix_memalign, ctypes.c_void_p).value or 0)

    def _set(self, name: str, function: int) -> None:
        for slot in _slots(name):
            self.libc.mprotect(ctypes.c_void_p(slot & -_PAGE), ctypes.c_size_t(2 * _PAGE), _WRITABLE)
            ctypes.c_void_p.from_address(slot).value = function

    def _align(self, pointer: ctypes._Pointer[ctypes.c_void_p], alignment: int, size: int) -> int:  # pyright: ignore
        try:
            block = _block(size, alignment) if size and len(self.blocks) < _MAX_BLOCKS else None
        except OSError:  # the process has the largest number of mappings
            block = None
        if block is None:
            return self.libc.posix_memalign(pointer, alignment, size)
        self.blocks.append(block)
        pointer[0] = ctypes.addressof(ctypes.c_char.from_buffer(block[0])) + block[1]
        return 0

    def touched(self) -> str:
        """Describe where a byte outside of its block was written since the last call, or return ""."""
        found = ""
        for memory, start, size in self.blocks:
            around = {"past the end": (start + size, len(memory) - _PAGE), "before the beginning": (_PAGE, start)}
            for where, (first, last) in around.items():
                if memory[first:last].count(_BYTE) != last - first:
                    found = found or f"{where} of a block of {size} bytes"
                    memory[first:last] = _BYTE * (last - first)
        return found


def _block(size: int, alignment: int) -> tuple[mmap.mmap, int, int]:
    """Map memory between two protected pages, in which ``size`` bytes begin at the last possible aligned place."""
    body = -(-size // _PAGE) * _PAGE
    memory = mmap.mmap(-1, body + 2 * _PAGE)
    memory[_PAGE : _PAGE + body] = _BYTE * body
    for page in (0, _PAGE + body):
        guarded.protect(memory, page)
    return memory, _PAGE + (body - size) // alignment * alignment, size
