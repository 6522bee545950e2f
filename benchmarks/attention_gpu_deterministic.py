"""Compare deterministic backwards on a GPU, opkit's with FlashAttention-4's and torch's.

TFLOP/s of five products, in bfloat16, without determinism and with it: opkit's and torch's with
``torch.use_deterministic_algorithms(True)``, FlashAttention-4's with its argument ``deterministic``. Torch then also fills what
is allocated with NaN; "unfilled" is opkit's with ``torch.utils.deterministic.fill_uninitialized_memory = False``. "the same bits"
says of which deterministic ones two calls gave the same gradients. All alternate as in attention_gpu.py::

    python benchmarks/attention_gpu_deterministic.py [--rounds 5] [--only TEXT,TEXT] [--quick] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import attention_gpu as gpu
import torch
import torch.utils.deterministic
from attention_gpu import OWN, Call
from torch import Tensor
from torch.nn.attention import SDPBackend

import opkit
from opkit.masks import Causal

SIZES = [
    (2, 16, 8192, 128, True), (1, 16, 16384, 64, True), (2, 16, 8192, 128, False), (1, 16, 16384, 64, False),
    (8, 16, 2048, 128, True),
]  # fmt: skip


def forwards(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Call]:
    """The forwards whose backwards are measured; "deterministic" is part of the names of those to be called so."""
    mask = Causal() if causal else None
    attention = functools.partial(opkit.attention, q, k, v, mask=mask)
    found: dict[str, Call] = dict.fromkeys((OWN, f"{OWN} deterministic", f"{OWN} deterministic, unfilled"), attention)
    if (fa4 := gpu.flash_attention_4()) is not None:
        inside = [x.transpose(1, 2).contiguous().detach().requires_grad_() for x in (q, k, v)]
        found["FA4"] = lambda: gpu.first(fa4(*inside, causal=causal))
        found["FA4 deterministic"] = lambda: gpu.first(fa4(*inside, causal=causal, deterministic=True))
    for name, backend in {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}.items():
        way = functools.partial(gpu.torch_forward, backend, q, k, v, causal)
        found |= {name: way, f"{name} deterministic": way}
    return found


def deterministically(call: Call, fill: bool) -> Any:
    """A call with deterministic algorithms, which fill what is allocated or leave it."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = fill
    try:
        return call()
    finally:
        settings.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(False)


def backwards(size: gpu.Size, causal: bool) -> dict[str, Call]:
    """The calls that are measured."""
    *inputs, gradient = gpu.tensors(*size, count=4)
    q, k, v = (x.requires_grad_() for x in inputs)
    found: dict[str, Call] = {}
    for name, call in forwards(q, k, v, causal).items():
        if gpu.runs(name, call):
            found[name] = set_up(name, gpu.backward_of(call(), (q, k, v), gradient))
    return found


def set_up(name: str, call: Call) -> Call:
    """A call with the settings that its name says; FlashAttention-4 has its own."""
    if "deterministic" not in name or name.startswith("FA4"):
        return call
    return functools.partial(deterministically, call, "unfilled" not in name)


def same_bits(call: Callable[[], tuple[Tensor, ...]]) -> bool:
    """Whether two calls give the same."""
    return all(torch.equal(a, b) for a, b in zip(call(), call(), strict=True))


def backward(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """TFLOP/s of the backward, by the five products that it needs at least."""
    for size, causal in gpu.sizes(options, SIZES):
        batch, heads, length, head = size
        calls = backwards(size, causal)
        times = gpu.interleaved(calls, options.rounds)
        flops = 10 * batch * heads * length * length * head * (0.5 if causal else 1)
        alike = [name for name in times if "deterministic" in name and same_bits(calls[name])]
        yield {
            "case": gpu.label(size, causal),
            **{name: round(flops / statistics.median(each) / 1e12) for name, each in times.items()},
            **ratios(times),
            "the same bits": "; ".join(alike),
        }


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """How many times as fast as FlashAttention-4 opkit is, and as opkit without determinism; where these are there."""
    pairs = {
        "opkit / FA4": (OWN, "FA4"),
        "both deterministic": (f"{OWN} deterministic", "FA4 deterministic"),
        "opkit unfilled / FA4 deterministic": (f"{OWN} deterministic, unfilled", "FA4 deterministic"),
        "opkit deterministic / not": (f"{OWN} deterministic", OWN),
    }
    return {
        label: round(gpu.ratio(times, *pair), 2) for label, pair in pairs.items() if all(name in times for name in pair)
    }


if __name__ == "__main__":
    gpu.main({"backward": backward}, __doc__)
