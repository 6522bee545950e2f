"""``opkit.attention`` compared with torch's scaled dot-product attention and compiled FlexAttention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import opkit
from opkit.bench.topics import Case, Setting, Ways
from opkit.masks import Causal, SlidingWindow

_WINDOW = 256


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the forward of each mask, and the backward."""
    sizes = (
        [(1, 8, 1024, 64), (1, 8, 2048, 128)] if setting.device == "cpu" else [(8, 16, 2048, 64), (4, 16, 4096, 128)]
    )
    for size in [(1, 2, 128, 64)] if setting.quick else sizes:
        for dtype in (torch.float32, torch.bfloat16):
            for mask in ("no mask", "causal", "window"):
                for training in (False, True):
                    batch, heads, length, head = size
                    shape = f"{batch} x {heads} x {length} x {head} {str(dtype)[6:]}"
                    name = f"{'backward' if training else 'forward'}, {mask}, {shape}"
                    yield Case(name, functools.partial(_ways, setting.device, size, dtype, mask, training))


def _ways(device: str, size: tuple[int, int, int, int], dtype: torch.dtype, mask: str, training: bool) -> Ways:
    q, k, v, gradient = (torch.randn(size, device=device, dtype=dtype) for _ in range(4))
    q, k, v = (each.requires_grad_(training) for each in (q, k, v))
    calls: dict[str, Callable[[], Tensor]] = {
        name: functools.partial(function, q, k, v) for name, function in _functions(mask, size[2], device).items()
    }
    if not training:
        return calls
    if torch.device(device).type == "cpu":
        calls.pop("FlexAttention", None)  # it has no backward on CPUs
    results = {name: call() for name, call in calls.items()}
    return {
        name: functools.partial(torch.autograd.grad, result, (q, k, v), gradient, retain_graph=True)
        for name, result in results.items()
    }


def _functions(mask: str, length: int, device: str) -> dict[str, Callable[..., Any]]:
    sdpa = F.scaled_dot_product_attention
    if mask == "no mask":
        return {"opkit": opkit.attention, "SDPA": sdpa, "FlexAttention": _flex()}
    causal = mask == "causal"

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) if causal else (i >= j) & (i - j < _WINDOW)

    block_mask = create_block_mask(seen, None, None, length, length, device=device)
    if causal:
        return {
            "opkit": functools.partial(opkit.attention, mask=Causal()),
            "SDPA": functools.partial(sdpa, is_causal=True),
            "FlexAttention": functools.partial(_flex(), block_mask=block_mask),
        }
    difference = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    dense = (difference >= 0) & (difference < _WINDOW)
    return {
        "opkit": functools.partial(opkit.attention, mask=Causal() & SlidingWindow(_WINDOW - 1)),
        "SDPA": functools.partial(sdpa, attn_mask=dense),
        "FlexAttention": functools.partial(_flex(), block_mask=block_mask),
    }


def _flex() -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)
