"""Forward attention on a Hopper GPU in bfloat16: opkit's kernel in CUDA C++ against torch's cuDNN, in TFLOP/s.

    python benchmarks/attention_hopper.py

All are captured into CUDA graphs of several calls, which alternate; the table has medians over rounds. A causal call counts
half the operations, a window those of its width. A second table has calls of other kinds (caps, sinks, lengths, masks, other
heads, few queries) next to the portable kernel, in microseconds; graphs build the lists of tiles of masks each time. At last,
what a small call costs the host.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from opkit.attn.gpu import kernels as portable
from opkit.attn.gpu.hopper import forward_cuda
from opkit.attn.masks import program

SHAPES = {  # batch, heads, sequence, head, and how many keys back a query sees: None for all, -1 for all before it
    "8x16x2048x128 causal": (8, 16, 2048, 128, -1),
    "2x16x8192x128 causal": (2, 16, 8192, 128, -1),
    "1x16x16384x128 causal": (1, 16, 16384, 128, -1),
    "8x16x2048x128": (8, 16, 2048, 128, None),
    "2x16x8192x128": (2, 16, 8192, 128, None),
    "16x16x1024x64 causal": (16, 16, 1024, 64, -1),
    "1x16x16384x64 causal": (1, 16, 16384, 64, -1),
    "2x16x8192x64": (2, 16, 8192, 64, None),
    "16x16x512x128 causal": (16, 16, 512, 128, -1),
    "2x8x8192x256 causal": (2, 8, 8192, 256, -1),
    "2x16x16384x128 window": (2, 16, 16384, 128, 1024),
}
KERNELS = ("opkit", "cudnn")
CAUSAL, LENGTHS, SEGMENTS = (program.BAND, -program.UNLIMITED, 0), (program.LENGTH, 0), (program.SEGMENTS, 0, 1)
KINDS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    # batch, heads of queries and of keys, length, head, columns; and what else: a mask, what its tensors are, a cap, sinks
    "128x32x128x64": ((128, 32, 32, 128, 64, 64), {}),
    "64x16x256x128": ((64, 16, 16, 256, 128, 128), {}),
    "128x8x128x256": ((128, 8, 8, 128, 256, 256), {}),
    "2x16x8192x128 causal, cap": ((2, 16, 16, 8192, 128, 128), {"mask": CAUSAL, "softcap": 50.0}),
    "2x8x8192x256 causal, cap": ((2, 8, 8, 8192, 256, 256), {"mask": CAUSAL, "softcap": 50.0}),
    "2x64x8192x64 window of 128, sinks": ((2, 64, 8, 8192, 64, 64), {"mask": (program.BAND, -127, 0), "sinks": True}),
    "8x16x2048x128 lengths": ((8, 16, 16, 2048, 128, 128), {"mask": LENGTHS, "masks": "lengths"}),
    "2x8x8192x256 packed, causal": (
        (2, 8, 8, 8192, 256, 256),
        {"mask": (*CAUSAL, *SEGMENTS, program.AND), "masks": "segments"},
    ),
    "4x16x4096x128 prefix or causal": (
        (4, 16, 16, 4096, 128, 128),
        {"mask": (*LENGTHS, *CAUSAL, program.OR), "masks": "lengths"},
    ),
    "2x16x4096x128 blocks of bools": ((2, 16, 16, 4096, 128, 128), {"mask": (program.DENSE, 0), "masks": "bools"}),
    "2x25x8192x80 causal": ((2, 25, 25, 8192, 80, 80), {"mask": CAUSAL}),
    "2x21x8192x96 causal": ((2, 21, 21, 8192, 96, 96), {"mask": CAUSAL}),
    "2x10x8192x192 and 128 causal": ((2, 10, 10, 8192, 192, 128), {"mask": CAUSAL}),
}
_MILLISECONDS = 8.0  #: of a graph
_WIDTH = 13  #: of a column
Call = Callable[[], object]


def mask_of(back: int | None) -> list[int]:
    if back is None:
        return []
    return [program.BAND, -program.UNLIMITED if back < 0 else -back, 0]


def calls(batch: int, heads: int, length: int, head: int, back: int | None) -> dict[str, Call]:
    """The kernels, on the same tensors; cuDNN has no windows here."""
    q, k, v = (torch.randn(batch, heads, length, head, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    arguments = (q, k, v, [], [], None, None, mask_of(back), [], head**-0.5, 0.0, 0.0, False)
    run = forward_cuda.forward.prepare(*arguments)
    found: dict[str, Call] = {"opkit": lambda: run(*arguments)}

    def cudnn() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=back is not None)

    return found if back is not None and back >= 0 else {**found, "cudnn": cudnn}


def masks_of(what: str, batch: int, length: int) -> list[torch.Tensor]:
    """The tensors of a mask: lengths from a quarter on, eight sequences, or half of the blocks of 128 by 128."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    if what == "lengths":
        return [torch.randint(length // 4, length + 1, (batch,), generator=generator, device="cuda").int()]
    if what == "segments":
        starts = torch.rand(batch, length, generator=generator, device="cuda") < 8 / length
        return [starts.cumsum(1).int()] * 2
    if what == "bools":
        blocks = torch.rand(1, 1, -(-length // 128), -(-length // 128), generator=generator, device="cuda") < 0.5
        blocks[..., 0] = True
        return [blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :length, :length].contiguous()]
    return []


def calls_of_kind(sizes: tuple[int, ...], what: dict[str, Any]) -> dict[str, Call]:
    """The kernel and the portable one, on the same tensors."""
    batch, heads, key_heads, length, head, columns = sizes
    shapes = (heads, head), (key_heads, head), (key_heads, columns)
    q, k, v = (torch.randn(batch, n, length, size, device="cuda", dtype=torch.bfloat16) for n, size in shapes)
    sinks = torch.randn(heads, device="cuda") if what.get("sinks") else None
    masks, cap = masks_of(what.get("masks", ""), batch, length), what.get("softcap", 0.0)
    arguments = (q, k, v, masks, [], sinks, None, list(what.get("mask", ())), [], head**-0.5, cap, 0.0, False)
    kernels = {"opkit": forward_cuda.forward, "portable": portable.forward}
    return {name: functools.partial(each.prepare(*arguments), *arguments) for name, each in kernels.items()}


def operations(batch: int, heads: int, length: int, head: int, back: int | None) -> float:
    seen = length if back is None else length / 2 if back < 0 else back
    return 4.0 * batch * heads * head * length * seen


def graph_of(call: Call, times: int) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def medians(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Milliseconds of each call, in graphs that alternate."""
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, call in calls.items():
        first = graph_of(call, 2)
        milliseconds(first)
        times = max(2, round(2 * _MILLISECONDS / milliseconds(first)))
        graphs[name] = graph_of(call, times), times
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds):
        for name in list(graphs) if number % 2 == 0 else list(graphs)[::-1]:
            graph, times = graphs[name]
            found[name].append(milliseconds(graph) / times)
    return {name: statistics.median(each) for name, each in found.items()}


def measure(shape: tuple[int, int, int, int, int | None], rounds: int) -> dict[str, float]:
    """TFLOP/s of each kernel."""
    return {name: operations(*shape) / each / 1e9 for name, each in medians(calls(*shape), rounds).items()}


def print_table(rows: dict[str, dict[str, float]], kernels: Sequence[str]) -> None:
    """A row for each case; a kernel that does not take it has none."""
    print(f"{'batch x heads x length x head':32}", *(f"{kernel:>{_WIDTH}}" for kernel in kernels), "  TFLOP/s")
    for name, row in rows.items():
        print(f"{name:32}", *(f"{row.get(kernel, math.nan):{_WIDTH}.0f}" for kernel in kernels))


def host(call: Call) -> float:
    """Microseconds of a call that is not waited for."""
    found: list[float] = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(50):
            call()
        found.append((time.perf_counter() - begin) / 50 * 1e6)
        torch.cuda.synchronize()
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    rows = {name: measure(shape, rounds) for name, shape in SHAPES.items()}
    print_table(rows, KERNELS)
    kinds = {name: medians(calls_of_kind(*of), rounds) for name, of in KINDS.items()}
    print(f"{'of other kinds':36} {'opkit':>10} {'portable':>10}  us")
    for name, row in kinds.items():
        print(f"{name:36} {row['opkit'] * 1e3:10.1f} {row['portable'] * 1e3:10.1f}")
    small = {name: host(call) for name, call in calls(1, 4, 128, 128, -1).items()}
    print("host, us:", ", ".join(f"{name} {each:.1f}" for name, each in small.items()))
    print(json.dumps({"tflops": rows, "kinds_ms": kinds, "host_us": small}))


if __name__ == "__main__":
    main()
