"""Measure the host time of one Triton launch: an elementwise add, compared with torch.add and other ways to launch it.

    python benchmarks/triton_launch.py

Every way adds the same two small tensors. Calls are not waited for: what is timed is the host, and the GPU is never behind. The
ways alternate within each round; the table has medians over rounds, and the ratio to torch.add in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

import opkit
from opkit.op.native import compiled

_ELEMENTS = 1024
_CALLS = 2000
_WARM = 200


@triton.jit
def _add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@opkit.custom_op("bench::add")
def ours(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


ours.register_kernel(
    "cuda", opkit.triton_kernel(_add, grid=lambda n: triton.cdiv(n, 1024), n=lambda out: out.numel, BLOCK=1024)
)


def raw(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    n = out.numel()
    _add[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    return out


@torch.library.triton_op("bench_peer::triton_op", mutates_args=())
def triton_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    n = out.numel()
    torch.library.wrap_triton(_add)[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    return out


@torch.library.custom_op("bench_peer::custom_op", mutates_args=())
def custom_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return raw(x, y)


by_hand = opkit.triton_kernel(_add, grid=lambda n: triton.cdiv(n, 1024), n=lambda out: out.numel, BLOCK=1024)


def launched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    by_hand(x=x, y=y, out=out)
    return out


def ways() -> dict[str, Callable[..., torch.Tensor]]:
    """What is compared, by name."""
    return {
        "torch.add": torch.add,
        "opkit: op(x, y)": ours,
        "opkit: torch.ops": torch.ops.bench.add,
        "opkit: torch.ops .default": torch.ops.bench.add.default,
        "opkit: launched by hand": launched,
        "raw Triton launch": raw,
        "torch.library.triton_op": triton_op,
        "torch.library.custom_op": custom_op,
    }


def host_time(call: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> float:
    """Microseconds of the host for one call."""
    for _ in range(_WARM):
        call(x, y)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        call(x, y)
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / _CALLS * 1e6


def compare(rounds: int) -> list[dict[str, object]]:
    """One row a way: median microseconds, and the median of its ratios to torch.add."""
    x, y = (torch.randn(_ELEMENTS, device="cuda") for _ in range(2))
    with torch.no_grad():
        for call in ways().values():
            torch.testing.assert_close(call(x, y), x + y)
        times = [{name: host_time(call, x, y) for name, call in ways().items()} for _ in range(rounds)]
    return [
        {
            "way": name,
            "us": round(statistics.median(row[name] for row in times), 2),
            "ratio": round(statistics.median(row[name] / row["torch.add"] for row in times), 2),
        }
        for name in ways()
    ]


def new_sizes() -> dict[str, float]:
    """Microseconds of a first call at a size whose guard is known, less those of a second one."""
    tensors = [(torch.randn(n, device="cuda"), torch.randn(n, device="cuda")) for n in range(1600, 1600 + 16 * 400, 16)]
    add = torch.ops.bench.add.default
    for x, y in tensors[:20]:
        add(x, y)
    spent: list[list[float]] = []
    for _ in range(2):
        torch.cuda.synchronize()
        spent.append([])
        for x, y in tensors[20:]:
            start = time.perf_counter()
            add(x, y)
            spent[-1].append((time.perf_counter() - start) * 1e6)
    first, second = map(statistics.median, spent)
    return {"first call": round(first, 1), "second call": round(second, 1), "new size": round(first - second, 1)}


def main() -> None:
    """Print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("It measures launches on a GPU, and torch finds none.")
    compiled.build_bridge()
    rows = compare(arguments.rounds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    print(f"{'way':28} {'us':>8} {'ratio to torch.add':>20}")
    for row in rows:
        print(f"{row['way']:28} {row['us']:8.2f} {row['ratio']:20.2f}")
    sizes = new_sizes()
    print("a size that was not seen before: " + ", ".join(f"{name} {us} us" for name, us in sizes.items()))
    print(json.dumps({"launch": rows, "sizes": sizes}))


if __name__ == "__main__":
    main()
