"""How close does decoding attention come to the memory's bandwidth on a GPU, and how fast are torch's kernels?

Bfloat16, batch x heads/heads of keys x keys x head size. Kernel times are those of CUDA graphs of several calls, so that no
host time is in them, each on other keys and values where these would fit the cache (60 MB on an H200): keys come from memory.
"warm" are calls on the same keys. Host times are those of calls on 256 keys, which wait for nothing. Peers run in the same
process: torch's SDPA by cuDNN and by FlashAttention. Figures are medians over rounds.
``python benchmarks/attention_gpu_decode.py`` takes a minute; ``--only A,P`` some cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opkit.attn.gpu.decode import decoding
from opkit.attn.operator import attention_operator
from opkit.attn.paged import paged_attention_operator
from opkit.op.operator import CustomOp

CACHE = 512 << 20  # bytes of keys and values that calls take in turn


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    d: int = 128
    dv: int = 128
    paged: bool = False
    page: int = 16

    @property
    def bytes(self) -> int:
        """Of the keys and values of one call; values that are columns of keys do not count."""
        return 2 * self.batch * self.kv_heads * self.keys * (self.d + (self.dv if self.d == self.dv else 0))

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.heads * self.queries * self.keys * (self.d + self.dv)


CASES = [
    Case("A 1x32/8x8192x128", 1, 32, 8, 1, 8192),
    Case("B 8x32/1x16384x128", 8, 32, 1, 1, 16384),
    Case("C 16x32/8x8192x128", 16, 32, 8, 1, 8192),
    Case("P the same, pages of 16", 16, 32, 8, 1, 8192, paged=True),
    Case("D 8 queries 16x64/8x8192x128", 16, 64, 8, 8, 8192),
    Case("E 16 queries 16x64/8x8192x128", 16, 64, 8, 16, 8192),
    Case("F 256 queries 1x8/1x131072x128", 1, 8, 1, 256, 131072),
    Case("G latent 64x128/1x8192x576/512", 64, 128, 1, 1, 8192, 576, 512),
    Case("H the same, pages of 64", 64, 128, 1, 1, 8192, 576, 512, paged=True, page=64),
]
Call = Callable[[Tensor, Tensor], object]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def caches(case: Case) -> list[tuple[Tensor, Tensor]]:
    count = -(-CACHE // case.bytes)
    shape = (case.batch, case.kv_heads, case.keys)
    if case.d != case.dv:
        return [(k, k[..., : case.dv]) for k in (normal(*shape, case.d) for _ in range(count))]
    return [(normal(*shape, case.d), normal(*shape, case.dv)) for _ in range(count)]


def ours(case: Case) -> Call:
    if case.paged:
        return paged(case)
    op, q = attention_operator(), normal(case.batch, case.heads, case.queries, case.d)
    rest = ([], [], None, None, [], [], case.d**-0.5, 0.0, 0.0, False)
    return lambda k, v: op(q, k, v, *rest)


def paged(case: Case) -> Call:
    op, q = paged_attention_operator(), normal(case.batch, case.heads, case.d)
    table = torch.randperm(case.batch * case.keys // case.page, device="cuda").int().reshape(case.batch, -1)
    lengths = torch.full((case.batch,), case.keys, device="cuda")
    starts = torch.arange(case.batch + 1, device="cuda")
    rest = (table, lengths, starts, -(2**62), 0, case.d**-0.5, 0.0, None, None, None)

    def call(k: Tensor, v: Tensor) -> object:
        pages = [x.view(-1, case.page, case.kv_heads, case.d) for x in (k, v if case.d == case.dv else k)]
        return op(q, pages[0], pages[1][..., : case.dv], *rest)

    return call


def torchs(case: Case, backend: SDPBackend) -> Call:
    q = normal(case.batch, case.heads, case.queries, case.d)

    def call(k: Tensor, v: Tensor) -> object:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def calls(case: Case) -> Iterator[tuple[str, Call]]:
    yield "opkit", ours(case)
    if not case.paged and case.d == case.dv:
        yield "cuDNN", torchs(case, SDPBackend.CUDNN_ATTENTION)
        yield "flash", torchs(case, SDPBackend.FLASH_ATTENTION)


def microseconds(call: Call, pairs: list[tuple[Tensor, Tensor]], rounds: int) -> float:
    """Of one call, in a graph of calls on each of the pairs, of at least six."""
    pairs = pairs * -(-6 // len(pairs))
    for _ in range(2):
        call(*pairs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pair in pairs:
            call(*pair)
    return statistics.median(_replayed(graph) for _ in range(rounds)) / len(pairs)


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def host(case: Case, rounds: int) -> dict[str, float]:
    """Microseconds until a call of 256 keys returns."""
    small = dataclasses.replace(case, keys=256)
    pair = caches(small)[0]
    found: dict[str, list[float]] = {}
    named = list(calls(small))
    for name, call in [*named[:1], *named[1:]] * (rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call(*pair)
        found.setdefault(name, []).append((time.perf_counter() - start) / 50 * 1e6)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def measure(case: Case, rounds: int) -> dict[str, float]:
    pairs = caches(case)
    found = {f"{name}_us": microseconds(call, pairs, rounds) for name, call in calls(case)}
    if len(pairs) > 1:
        found["opkit_warm_us"] = microseconds(ours(case), pairs[:1] * 12, rounds)
    return found


def line(case: Case, found: dict[str, float]) -> str:
    us = found["opkit_us"]
    peers = "".join(f"{found[n]:9.1f}" if (n := f"{name}_us") in found else f"{'-':>9s}" for name in ("cuDNN", "flash"))
    warm = f"{found['opkit_warm_us']:9.1f}" if "opkit_warm_us" in found else f"{'-':>9s}"
    return f"{case.name:34s}{us:9.1f}{case.bytes / us / 1e6:7.2f}{case.flops / us / 1e6:7.0f}{warm}{peers}"


def registered() -> CustomOp[Any, Any]:
    """The attention operator with the decoding kernel."""
    op = attention_operator()
    if decoding.NAME not in {kernel.name for kernel in op._operator.kernels.kernels}:
        decoding.register(op)
    return op


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="letters of cases, such as A,P")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds a call, keys from memory")
    print(f"{'case':34s}{'opkit':>9s}{'TB/s':>7s}{'TF/s':>7s}{'warm':>9s}{'cuDNN':>9s}{'flash':>9s}")
    results: list[dict[str, object]] = []
    registered()
    for case in CASES:
        if options.only and case.name[0] not in options.only.split(","):
            continue
        found = measure(case, options.rounds)
        print(line(case, found), flush=True)
        results.append({**dataclasses.asdict(case), **{name: round(us, 2) for name, us in found.items()}})
    times = host(CASES[0], options.rounds) | {"opkit paged": host(CASES[3], options.rounds)["opkit"]}
    print("host time, microseconds: " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()))
    print(json.dumps({"benchmark": "attention_gpu_decode", "host_us": times, "results": results}))


if __name__ == "__main__":
    main()
