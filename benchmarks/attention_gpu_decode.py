"""Compare decoding attention on a GPU with the memory's bandwidth and with torch's kernels.

Bfloat16, batch x heads/heads of keys x keys x head size. Kernel times are those of CUDA graphs of several calls, so that no
host time is in them, each on other keys and values where these would fit the cache (60 MB on an H200): keys come from memory.
"warm" are calls on the same keys. "split" are calls by the kernel in Triton, where the one in CUDA C++ takes them too, which on
Hopper is what most of them get, where there is nvcc. Host times are those of calls on 256 keys, which wait for nothing. Peers run
in the same process, alternating: torch's SDPA by cuDNN and by FlashAttention; and FlashAttention-4 where its package is
installed, on keys in its layout, (batch, keys, heads of keys, head), or in pages. On Hopper it cannot divide keys among programs.
Figures are medians over rounds, the ratio to the fastest peer that of the rounds' own.
``python benchmarks/attention_gpu_decode.py`` takes a minute, and some more with FlashAttention-4, which compiles; ``--only A,P``
some cases; ``--quick`` small ones, which run without a GPU too, in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attention_gpu as gpu
import torch
import torch.nn.functional as F
from attention_gpu import DEVICE, DTYPE, OWN
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.hopper.decode_cuda import MOST_ROWS
from opkit.attn.operator import attention_operator
from opkit.attn.paged.api import paged_attention_operator
from opkit.op.forcing import use_kernel
from opkit.op.operator import CustomOp

CACHE = 512 << 20  # bytes of keys and values that calls rotate through
PEERS = ("cuDNN", "flash", "FA4")
TRITON = decoding.NAME


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
    Case("I 1x32/8x2048x128", 1, 32, 8, 1, 2048),
    Case("J 8x32/8x2048x128, pages of 16", 8, 32, 8, 1, 2048, paged=True),
    Case("K 32x32/8x2048x128", 32, 32, 8, 1, 2048),
    Case("L 2x64/8x4096x64", 2, 64, 8, 1, 4096, 64, 64),
    Case("M 8x32/1x16384x128, pages of 16", 8, 32, 1, 1, 16384, paged=True),
    Case("N 8x64/2x16384x64", 8, 64, 2, 1, 16384, 64, 64),
    Case("O 4x32/1x8192x256", 4, 32, 1, 1, 8192, 256, 256),
    Case("Q 8x64/1x16384x128", 8, 64, 1, 1, 16384),
    Case("R 8x512/8x2048x128, pages of 16", 8, 512, 8, 1, 2048, paged=True),
]
Call = Callable[[Tensor, Tensor], object]


def small(case: Case) -> Case:
    """As the case, with so few keys and heads that an interpreter can try it."""
    heads = min(case.heads // case.kv_heads, 4)
    return dataclasses.replace(case, batch=1, heads=heads, kv_heads=1, queries=min(case.queries, 4), keys=256)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def caches(case: Case) -> list[tuple[Tensor, Tensor]]:
    count = -(-CACHE // case.bytes) if DEVICE == "cuda" else 1
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


def by_triton(case: Case) -> Call:
    op, call = paged_attention_operator() if case.paged else attention_operator(), ours(case)

    def forced(k: Tensor, v: Tensor) -> object:
        with use_kernel(op, TRITON):
            return call(k, v)

    return forced


def paged(case: Case) -> Call:
    op, q = paged_attention_operator(), normal(case.batch, case.heads, case.d)
    lengths = torch.full((case.batch,), case.keys, device=DEVICE)
    starts = torch.arange(case.batch + 1, device=DEVICE)
    numbers = -(2**62), 0, case.d**-0.5, 0.0
    rest = (page_table(case), lengths, starts, *numbers, None, None, None, [], [], [], [])
    return lambda k, v: op(q, *inside(case, k, v), *rest)


def page_table(case: Case) -> Tensor:
    """Pages in any order, int32, (batch, pages of a sequence)."""
    return torch.randperm(case.batch * case.keys // case.page, device=DEVICE).int().reshape(case.batch, -1)


def inside(case: Case, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory as (batch or pages, keys of one, heads of keys, head)."""
    shape = (-1, case.page if case.paged else case.keys, case.kv_heads, case.d)
    return k.view(shape), (v if case.d == case.dv else k).view(shape)[..., : case.dv]


def flash_attention_4(case: Case) -> Call:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    q = normal(case.batch, case.queries, case.heads, case.d)
    splits = 1 if torch.cuda.get_device_capability() == (9, 0) else 0  # of the keys; 0: as many as it finds best
    if not case.paged:
        return lambda k, v: gpu.first(flash_attn_func(q, *inside(case, k, v), num_splits=splits))
    lengths = torch.full((case.batch,), case.keys, device=DEVICE, dtype=torch.int32)
    flash_options = {"page_table": page_table(case), "seqused_k": lengths, "num_splits": splits}
    return lambda k, v: gpu.first(flash_attn_varlen_func(q, *inside(case, k, v), **flash_options))


def torchs(case: Case, backend: SDPBackend) -> Call:
    q = normal(case.batch, case.heads, case.queries, case.d)

    def call(k: Tensor, v: Tensor) -> object:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def calls(case: Case) -> Iterator[tuple[str, Call]]:
    yield OWN, ours(case)
    if case.d == case.dv and case.heads // case.kv_heads * case.queries <= MOST_ROWS.get(case.d, 0):
        yield TRITON, by_triton(case)
    if not case.paged and case.d == case.dv:
        yield "cuDNN", torchs(case, SDPBackend.CUDNN_ATTENTION)
        yield "flash", torchs(case, SDPBackend.FLASH_ATTENTION)
    if gpu.flash_attention_4() is not None:
        yield "FA4", flash_attention_4(case)


def timer(call: Call, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], float]:
    """A function that gives microseconds of one call, in a graph of calls on each of the pairs, of at least six."""
    pairs = pairs * -(-6 // len(pairs))
    for _ in range(2):
        call(*pairs[0])
    if DEVICE == "cpu":
        return lambda: gpu.seconds(functools.partial(call, *pairs[0])) * 1e6
    return Captured(call, pairs, captured(call, pairs)).microseconds


def captured(call: Call, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls; that it has none, since they ran on another stream, is an error."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA Graph is empty")
        with torch.cuda.graph(graph):
            for pair in pairs:
                call(*pair)
    return graph


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph of calls, and what it reads: queries and tables of pages are the call's, and must be there as long as the graph."""

    call: Call
    pairs: list[tuple[Tensor, Tensor]]
    graph: torch.cuda.CUDAGraph

    def microseconds(self) -> float:
        """Of one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / len(self.pairs)


def host(case: Case, rounds: int, count: int) -> dict[str, float]:
    """Microseconds until a call of 256 keys returns."""
    few = dataclasses.replace(case, keys=256)
    pair = caches(few)[0]
    named = {name: functools.partial(call, *pair) for name, call in calls(few) if name != TRITON}
    able = {name: call for name, call in named.items() if gpu.runs(name, call)}
    found: dict[str, list[float]] = {name: [] for name in able}
    for name, call in [*able.items()] * (rounds + 1):
        found[name].append(gpu.host_seconds(call, count) * 1e6)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call in each round."""
    pairs = caches(case)
    timers = able(case, pairs)
    if len(pairs) > 1:
        timers[f"{OWN}_warm"] = timer(ours(case), pairs[:1] * 12)
    found: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(rounds):
        for name in list(timers) if number % 2 == 0 else list(timers)[::-1]:
            found[name].append(timers[name]())
    return found


def able(case: Case, pairs: list[tuple[Tensor, Tensor]]) -> dict[str, Callable[[], float]]:
    """The timers of the calls that can be made."""
    found: dict[str, Callable[[], float]] = {}

    def make(name: str, call: Call) -> None:
        found[name] = timer(call, pairs)

    for name, call in calls(case):
        gpu.runs(name, functools.partial(make, name, call))
    return found


def line(case: Case, times: dict[str, list[float]]) -> str:
    found = {name: statistics.median(each) for name, each in times.items()}
    us, columns = found[OWN], (f"{OWN}_warm", TRITON, *PEERS)
    others = "".join(f"{found[name]:9.1f}" if name in found else f"{'-':>9s}" for name in columns)
    peers = [name for name in PEERS if name in found]
    best = min(peers, key=lambda name: found[name]) if peers else ""
    ratio = f"  {gpu.ratio(times, OWN, best):.2f} ({best})" if best else ""
    return f"{case.name:34s}{us:9.1f}{case.bytes / us / 1e6:7.2f}{case.flops / us / 1e6:7.0f}{others}{ratio}"


def registered() -> CustomOp[Any, Any]:
    """The attention operator with the decoding kernel."""
    op = attention_operator()
    if decoding.NAME not in {kernel.name for kernel in op._operator.kernels.kernels}:
        decoding.register(op)
    return op


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="letters of cases, such as A,P")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    gpu.see_to_device(options.quick)
    torch.manual_seed(0)
    registered()
    print(f"{gpu.named()}, torch {torch.__version__}; microseconds a call, keys from memory")
    print(
        f"{'case':34s}{'opkit':>9s}{'TB/s':>7s}{'TF/s':>7s}{'warm':>9s}"
        + "".join(f"{name:>9s}" for name in (TRITON, *PEERS))
    )
    cases = [small(case) if options.quick else case for case in CASES]
    results: list[dict[str, object]] = []
    for case in cases:
        if options.only and case.name[0] not in options.only.split(","):
            continue
        found = measure(case, options.rounds)
        print(line(case, found), flush=True)
        medians = {f"{name}_us": round(statistics.median(each), 2) for name, each in found.items()}
        results.append({**dataclasses.asdict(case), **medians})
    count = 2 if options.quick else 50
    times = host(cases[0], options.rounds, count) | {"opkit paged": host(cases[3], options.rounds, count)[OWN]}
    print("host time, microseconds: " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()))
    print(json.dumps({"benchmark": "attention_gpu_decode", "host_us": times, "results": results}))


if __name__ == "__main__":
    main()
