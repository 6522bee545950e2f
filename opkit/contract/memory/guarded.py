"""This module copies tensors into memory that reveals accesses outside of them: protected pages, or watched bytes."""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import sys

import torch

MARGIN = mmap.PAGESIZE
"""Bytes before and after a watched tensor."""

NOTHING, READ, ANYTHING = 0, 1, 3
"""Protections of a page: PROT_NONE, PROT_READ, and PROT_READ with PROT_WRITE, of sys/mman.h."""


def missing() -> str:
    """Return why memory cannot be guarded here, or ""."""
    return "" if sys.platform == "linux" else "it needs Linux"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it is in memory, without torch's lazy minus."""
    found = tensor.detach()
    return torch._neg_view(found) if found.is_neg() else found


def reach(tensor: torch.Tensor) -> int:
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
    return -(-bytes_ // mmap.PAGESIZE)


def protect(memory: mmap.mmap, first: int, protection: int = NOTHING, pages: int = 1) -> None:
    """Change the protection of the pages of ``memory`` from byte ``first`` on."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(pages * mmap.PAGESIZE), protection):
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(tensor: torch.Tensor, at_end: bool, protection: int = NOTHING) -> torch.Tensor:
    """Copy a tensor so that its last element ends at a protected page, or its first begins after one.

    Args:
        tensor: a tensor on the CPU. Its gaps are copied too; an empty tensor is returned as it is.
        at_end: whether the protected page comes directly after the tensor, or before it.
        protection: the protection of the page.
    """
    elements = reach(tensor)
    if elements == 0:
        return tensor
    size = elements * tensor.element_size()
    body = _pages(size) * mmap.PAGESIZE
    memory = mmap.mmap(-1, body + 2 * mmap.PAGESIZE)
    start = mmap.PAGESIZE + (body - size if at_end else 0)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=elements, offset=start)
    flat.copy_(torch.as_strided(plain(tensor), (elements,), (1,)))
    for page in (0, mmap.PAGESIZE + body):
        protect(memory, page, protection)
    return _like(tensor, flat, 0)


def sealed(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to read-only memory; an empty one is returned as it is."""
    elements = reach(tensor)
    if elements == 0:
        return tensor
    pages = _pages(elements * tensor.element_size())
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
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
        first = int(changed.nonzero()[0]) - MARGIN
        return _place(first, reach(self.tensor) * self.tensor.element_size(), self.tensor.element_size())


def _place(byte: int, end: int, size: int) -> str:
    if byte < 0:
        return f"{-byte} bytes before its first element"
    if byte >= end:
        return f"element {(byte - end) // size} past its end"
    return f"the gap at element {byte // size} of its memory"


def watched(tensor: torch.Tensor, byte: int) -> Watched:
    """Copy ``tensor`` to memory that contains ``byte`` outside of its elements."""
    size = tensor.element_size()
    elements = reach(tensor)
    memory = mmap.mmap(-1, 2 * MARGIN + max(_pages(elements * size), 1) * mmap.PAGESIZE)
    raw = torch.frombuffer(memory, dtype=torch.uint8).fill_(byte)
    typed = raw.view(tensor.dtype)
    offset = MARGIN // size
    inside = torch.zeros(typed.shape, dtype=torch.bool)
    inside[_like(plain(tensor), torch.arange(typed.numel()), offset).reshape(-1)] = True
    source = torch.as_strided(plain(tensor), (elements,), (1,)) if elements else plain(tensor).reshape(-1)
    span = typed[offset : offset + elements]
    span.copy_(torch.where(inside[offset : offset + elements], source, span))
    placed = _like(tensor, typed, offset)
    return Watched(placed, raw, inside.repeat_interleave(size), raw.clone())
