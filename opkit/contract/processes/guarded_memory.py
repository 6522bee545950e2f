"""This module makes wrong accesses to memory show, in child processes: protected pages, watched bytes, the checked heap."""

# pyright: reportUnknownMemberType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import mmap
import platform
import struct
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from opkit.contract.compare.outcome import plain

NOTHING, READ, ANYTHING = 0, 1, 3
"""Protections of a page: PROT_NONE, PROT_READ, and PROT_READ with PROT_WRITE, of sys/mman.h."""

_PAGE = mmap.PAGESIZE
_MARGIN = _PAGE  # bytes before and after a watched tensor
_BYTE = b"\xa5"
_ALIGN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
_MAX_BLOCKS = 8192  # the kernel allows a process about 65,000 mappings
_LOAD, _DYNAMIC = 1, 2  # program headers of elf.h
_STRTAB, _SYMTAB, _RELA, _RELASZ, _PLTRELSZ, _JMPREL = 5, 6, 7, 8, 2, 23  # its dynamic tags
_PERTURB = -6  # M_PERTURB of malloc.h
# sizes of which each thread caches freed blocks, which it hands out with their old contents
_CACHED = range(24, 521, 16)
_BLOCKS_CACHED = 7  # of each size
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


def guard_missing() -> str:
    """Return why memory cannot be guarded here, or ""."""
    return "" if sys.platform == "linux" else "it needs Linux"


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of elements of memory from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _like(tensor: torch.Tensor, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a view of ``memory`` with the layout and flags of ``tensor``."""
    view = torch.as_strided(memory, tensor.shape, tensor.stride(), offset)
    view = torch._neg_view(view) if tensor.is_neg() else view
    return view.requires_grad_() if tensor.requires_grad else view


def _pages(bytes_: int) -> int:
    return -(-bytes_ // _PAGE)


def protect(memory: mmap.mmap, first: int, protection: int = NOTHING, pages: int = 1) -> None:
    """Change the protection of the pages of ``memory`` from byte ``first`` on."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(pages * _PAGE), protection):
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(tensor: torch.Tensor, at_end: bool, protection: int = NOTHING) -> torch.Tensor:
    """Copy a tensor so that its last element ends at a protected page, or its first begins after one.

    Args:
        tensor: a tensor on the CPU. Its gaps are copied too; an empty tensor is returned as it is.
        at_end: whether the protected page comes directly after the tensor, or before it.
        protection: the protection of the page.
    """
    elements = _reach(tensor)
    if elements == 0:
        return tensor
    size = elements * tensor.element_size()
    body = _pages(size) * _PAGE
    memory = mmap.mmap(-1, body + 2 * _PAGE)
    start = _PAGE + (body - size if at_end else 0)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=elements, offset=start)
    flat.copy_(torch.as_strided(plain(tensor), (elements,), (1,)))
    for page in (0, _PAGE + body):
        protect(memory, page, protection)
    return _like(tensor, flat, 0)


def sealed(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to read-only memory; an empty one is returned as it is."""
    elements = _reach(tensor)
    if elements == 0:
        return tensor
    pages = _pages(elements * tensor.element_size())
    memory = mmap.mmap(-1, pages * _PAGE)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=elements)
    flat.copy_(torch.as_strided(plain(tensor), (elements,), (1,)))
    protect(memory, 0, READ, pages)
    return _like(tensor, flat, 0)


@dataclasses.dataclass(frozen=True)
class Watched:
    """A copy of a tensor among watched bytes: before it, after it, and in its gaps."""

    tensor: torch.Tensor
    memory: torch.Tensor
    inside: torch.Tensor
    before: torch.Tensor

    def touched(self) -> str:
        """Describe the first watched byte that was changed, or return ""."""
        changed = (self.memory != self.before) & ~self.inside
        if not changed.any():
            return ""
        first = int(changed.nonzero()[0]) - _MARGIN
        return _place(first, _reach(self.tensor) * self.tensor.element_size(), self.tensor.element_size())


def _place(byte: int, end: int, size: int) -> str:
    if byte < 0:
        return f"{-byte} bytes before its first element"
    if byte >= end:
        return f"element {(byte - end) // size} past its end"
    return f"the gap at element {byte // size} of its memory"


def watched(tensor: torch.Tensor, byte: int) -> Watched:
    """Copy ``tensor`` to memory that contains ``byte`` outside of its elements."""
    size = tensor.element_size()
    elements = _reach(tensor)
    memory = mmap.mmap(-1, 2 * _MARGIN + max(_pages(elements * size), 1) * _PAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8).fill_(byte)
    typed = raw.view(tensor.dtype)
    offset = _MARGIN // size
    inside = torch.zeros(typed.shape, dtype=torch.bool)
    inside[_like(plain(tensor), torch.arange(typed.numel()), offset).reshape(-1)] = True
    source = torch.as_strided(plain(tensor), (elements,), (1,)) if elements else plain(tensor).reshape(-1)
    span = typed[offset : offset + elements]
    span.copy_(torch.where(inside[offset : offset + elements], source, span))
    placed = _like(tensor, typed, offset)
    return Watched(placed, raw, inside.repeat_interleave(size), raw.clone())


# ---- blocks of torch's allocator -------------------------------------------------------------------------------------------
#
# libc10 calls posix_memalign and free through its table of imported functions. In this table posix_memalign is replaced by a
# function that ends each block at a protected page, as near as its alignment allows, and free by a function that does nothing.


@functools.cache
def allocator_missing() -> str:
    """Return why blocks cannot be guarded here, or ""."""
    if guard_missing():
        return guard_missing()
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


def _import(name: str, function: Any) -> None:
    """Let libc10 call another function in place of the one that it imports."""
    for slot in _slots(name):
        _libc().mprotect(ctypes.c_void_p(slot & -_PAGE), ctypes.c_size_t(2 * _PAGE), ANYTHING)
        ctypes.c_void_p.from_address(slot).value = ctypes.cast(function, ctypes.c_void_p).value


@functools.cache
def guard() -> Guard:
    """Return this process's guard. It stays in place: an operator may cache a block for its next call."""
    return Guard()


@dataclasses.dataclass
class Guard:
    """Blocks that torch allocates between calls of :meth:`begin` and :meth:`end`."""

    blocks: list[tuple[mmap.mmap, int, int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._callback = _ALIGN(self._align)

    def begin(self) -> None:
        """Start to guard torch's blocks; none is freed from here on."""
        _import("free", _libc().getppid)
        _import("posix_memalign", self._callback)

    def end(self) -> None:
        """Restore torch's allocation. The guarded blocks must never be freed, so free is not restored."""
        _import("posix_memalign", _libc().posix_memalign)

    def _align(self, pointer: ctypes._Pointer[ctypes.c_void_p], alignment: int, size: int) -> int:  # pyright: ignore
        try:
            block = _block(size, alignment) if size and len(self.blocks) < _MAX_BLOCKS else None
        except OSError:  # the process has the largest number of mappings
            block = None
        if block is None:
            return _libc().posix_memalign(pointer, alignment, size)
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
    body = _pages(size) * _PAGE
    memory = mmap.mmap(-1, body + 2 * _PAGE)
    memory[_PAGE : _PAGE + body] = _BYTE * body
    for page in (0, _PAGE + body):
        protect(memory, page)
    return memory, _PAGE + (body - size) // alignment * alignment, size


# ---- the heap of the C library, which is glibc ---------------------------------------------------------------------------


class _Info(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def heap_missing() -> str:
    """Return why the heap cannot be controlled here, or ""."""
    known = platform.libc_ver()[0] == "glibc" and hasattr(_libc(), "mallinfo2")
    return "" if known else "it needs glibc 2.33 or newer"


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Info
    return libc


def heap_bytes() -> int:
    """Return the number of allocated bytes."""
    info = _libc().mallinfo2()
    return info.uordblks + info.hblkhd


def inspect_heap() -> None:
    """Let malloc check its data; it aborts the process if something has overwritten them."""
    if not heap_missing():
        _libc().malloc_trim(1 << 30)


@contextlib.contextmanager
def poisoned_heap(byte: int) -> Generator[None]:
    """Fill fresh memory of torch's allocator, of numpy's and of kernels with ``byte``, which cannot be 255."""
    libc = _libc()
    blocks = [libc.malloc(size) for size in _CACHED for _ in range(_BLOCKS_CACHED)]
    libc.mallopt(_PERTURB, byte ^ 0xFF)

    @_ALIGN
    def filled(pointer: ctypes._Pointer[ctypes.c_void_p], alignment: int, size: int) -> int:  # pyright: ignore
        failed = libc.posix_memalign(pointer, alignment, size)
        if not failed:
            ctypes.memset(pointer[0], byte, size)
        return failed

    try:
        if not allocator_missing():
            _import("posix_memalign", filled)  # glibc's hands out cached blocks too, in newer releases
        yield
    finally:
        if not allocator_missing():
            _import("posix_memalign", libc.posix_memalign)
        libc.mallopt(_PERTURB, 0)
        for block in blocks:
            libc.free(block)
