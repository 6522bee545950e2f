"""Compare attention in float8 with descales on a GPU with bfloat16 of the same sizes.

Milliseconds of ``opkit.attention`` in float8_e4m3fn, with descales of each head, and in bfloat16, both by the kernel that a call
gets and by the portable one; and of cuDNN in bfloat16. All alternate as in attention_gpu.py, forward alone::

    python benchmarks/attention_gpu_float8.py [--rounds 5] [--only TEXT,TEXT] [--quick] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import attention_gpu as gpu
import torch
from attention_gpu import Call
from torch.nn.attention import SDPBackend

import opkit
from opkit.masks import Causal

SIZES = [
    (8, 16, 2048, 128, True), (8, 16, 2048, 128, False), (2, 16, 8192, 128, True), (2, 16, 8192, 128, False),
    (1, 16, 16384, 128, True), (16, 16, 1024, 128, True), (16, 16, 1024, 64, True), (1, 16, 16384, 64, True),
    (2, 8, 8192, 256, True), (2, 8, 8192, 256, False),
]  # fmt: skip


def calls(size: gpu.Size, causal: bool) -> dict[str, Call]:
    """The calls, by name, of the same numbers but for how they are rounded."""
    mask = Causal() if causal else None
    batch, heads, *_ = size
    q, k, v = gpu.tensors(*size)
    descales = [torch.rand(batch, heads, device=gpu.DEVICE) + 0.5 for _ in range(3)]
    small = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    return {
        "opkit float8": lambda: opkit.attention(*small, mask=mask, descales=descales),
        "float8, portable": lambda: opkit.attention(*small, mask=mask, descales=descales, kernel="triton"),
        "opkit": lambda: opkit.attention(q, k, v, mask=mask),
        "opkit portable": lambda: opkit.attention(q, k, v, mask=mask, kernel="triton"),
        "cuDNN": lambda: gpu.torch_forward(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
    }


def float8(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Milliseconds of each, TFLOP/s of float8, and how many times as fast as the others it is."""
    for size, causal in gpu.sizes(options, SIZES):
        batch, heads, length, head = size
        with torch.no_grad():
            times = gpu.interleaved(calls(size, causal), options.rounds)
        found = {name: statistics.median(each) for name, each in times.items()}
        flops = 4 * batch * heads * length * length * head * (0.5 if causal else 1)
        yield {
            "case": gpu.label(size, causal),
            **{f"{name}, ms": round(each * 1e3, 3) for name, each in found.items()},
            "TFLOP/s of float8": round(flops / found["opkit float8"] / 1e12),
            **{f"float8 / {name}": round(gpu.ratio(times, "opkit float8", name), 2) for name in [*found][1:]},
        }


if __name__ == "__main__":
    gpu.main({"float8": float8}, __doc__)
