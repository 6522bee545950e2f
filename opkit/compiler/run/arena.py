"""The memory for tensors of compiled graphs that live no longer than a call: a few large blocks that all graphs share.

A call takes a block and gives it back, so that nested calls and calls of several threads have a block each.
"""

from __future__ import annotations

import threading

import torch

_LEAST = 1 << 12
_GROWTH = 1.25  # sizes that grow slowly from call to call must not need new memory at each

_lock = threading.Lock()
_free: list[Arena] = []


class Arena:
    """A block of memory, aligned to 64 bytes.

    Attributes:
        memory: its bytes.
        size: the number of bytes.
    """

    __slots__ = ("__weakref__", "memory", "size")

    def __init__(self, size: int) -> None:
        with torch.inference_mode(False):  # a block made within it could not be written to outside
            self.memory = torch.empty(size, dtype=torch.uint8)
        self.size = size


def take(size: int) -> Arena:
    """Return a block of at least ``size`` bytes for exclusive use; a free block that is too small is replaced."""
    with _lock:
        if _free and _free[-1].size >= size:
            return _free.pop()
        for position in range(len(_free) - 1, -1, -1):
            if _free[position].size >= size:
                return _free.pop(position)
        grown = int(size * _GROWTH) if _free else size
        if _free:
            _free.pop()
    return Arena(max(grown, _LEAST))


def give(arena: Arena) -> None:
    """Return a block to the free ones."""
    _free.append(arena)


def release() -> None:
    """Free the blocks that are not in use."""
    with _lock:
        _free.clear()
