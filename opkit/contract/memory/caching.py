"""Torch's caching allocator on a GPU: what fresh memory holds there, and how much is in use.

A GPU has no pages to guard, and what a kernel reads past an allocation is mostly torch's as well: it shows in results alone.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

_SMALL = 2**20  # bytes of the largest block that torch 2.13 cuts from a segment of 2 MiB, as it does all small ones
_FRESH = (_SMALL,) * 4 + (19 * 2**20,) * 4  # segments of either kind, for calls that need more than is there


def used(device: torch.device) -> int:
    """Bytes that torch's tensors take on the device."""
    torch.cuda.synchronize(device)
    return torch.cuda.memory_stats(device)["allocated_bytes.all.current"]


@contextlib.contextmanager
def poisoned(byte: int, device: torch.device) -> Generator[None]:
    """Memory that torch hands out next holds ``byte``: all that it has and is not in use, and some more."""
    torch.cuda.synchronize(device)
    unused = _unused(device)
    sizes = unused if sum(unused) > sum(_FRESH) else [*unused, *_FRESH]
    blocks = [torch.full((size,), byte, dtype=torch.uint8, device=device) for size in sizes]
    torch.cuda.synchronize(device)
    del blocks
    yield


def _unused(device: torch.device) -> list[int]:
    """Sizes of the blocks that torch keeps for later."""
    number = torch.cuda.current_device() if device.index is None else device.index
    found: list[int] = []
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"] if segment["device"] == number else ():
            if block["state"] == "inactive":
                parts, rest = divmod(block["size"], _SMALL if segment["segment_type"] == "small" else block["size"])
                found += [block["size"]] if not rest and parts == 1 else [_SMALL] * parts + [rest] * bool(rest)
    return found
