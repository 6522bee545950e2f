"""Attention of one query to a cache of keys and values, compared with torch's scaled dot-product attention.

32 heads of 128 share 8 heads of keys and values. ``paged`` keeps keys and values in pages of 16 tokens in a random order, which
torch gathers first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import opkit
from opkit.bench.topics import Case, Setting, Ways

_HEADS, _KV_HEADS, _HEAD, _PAGE = 32, 8, 128, 16


def cases(setting: Setting) -> Iterator[Case]:
    """Yield contiguous and paged caches of several lengths."""
    on_cpu = torch.device(setting.device).type == "cpu"
    sizes = [(1, 64)] if setting.quick else [(1, 4096), (8, 1024)] if on_cpu else [(8, 4096), (64, 1024)]
    for batch, keys in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            for make in (_contiguous, _paged):
                name = f"{make.__name__[1:]}, {batch} x {keys} keys {str(dtype)[6:]}"
                yield Case(name, functools.partial(make, setting.device, batch, keys, dtype))


def _contiguous(device: str, batch: int, keys: int, dtype: torch.dtype) -> Ways:
    q = torch.randn(batch, _HEADS, 1, _HEAD, device=device, dtype=dtype)
    k, v = (torch.randn(batch, _KV_HEADS, keys, _HEAD, device=device, dtype=dtype) for _ in range(2))
    return {
        "opkit": lambda: opkit.attention(q, k, v),
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    }


def _paged(device: str, batch: int, keys: int, dtype: torch.dtype) -> Ways:
    count = batch * keys // _PAGE
    q = torch.randn(batch, 1, _HEADS, _HEAD, device=device, dtype=dtype)
    k, v = (torch.randn(count, _PAGE, _KV_HEADS, _HEAD, device=device, dtype=dtype) for _ in range(2))
    table = torch.randperm(count, device=device).to(torch.int32).view(batch, -1)
    lengths = torch.full((batch,), keys, device=device, dtype=torch.int32)

    def gathered(x: Tensor) -> Tensor:
        return x[table].flatten(1, 2).transpose(1, 2)

    return {
        "opkit": lambda: opkit.paged_attention(q, k, v, table, lengths),
        "SDPA": lambda: F.scaled_dot_product_attention(q.transpose(1, 2), gathered(k), gathered(v), enable_gqa=True),
    }
