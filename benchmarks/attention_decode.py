"""Compare decoding attention with the bandwidth at which keys and values can be read, and with torch.

One query (in bfloat16 also 4, 8 and 16) of 32 heads for each sequence, 8 KV heads of size 128, in the cache's layout: token,
head, size. Calls rotate through several caches, four times the last-level cache in all, so that nothing is warm. In each round a
sum over a buffer of that size, opkit contiguous and paged (pages of 16 in a random order), opkit with users' functions (a mask
that hides one key, and a gate of the logits), and torch's SDPA follow each other; figures are medians over rounds.
``python benchmarks/attention_decode.py`` takes minutes, ``--quick`` seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import opkit
from opkit.attn.paged.cpu import decode

HEADS, KV_HEADS, D, PAGE = 32, 8, 128, 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
COLUMNS = ("read", "decode", "functions", "paged", "sdpa")


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: str
    batch: int
    keys: int
    queries: int

    @property
    def bytes(self) -> int:
        """Of the keys and values of one call."""
        return 2 * self.batch * self.keys * KV_HEADS * D * DTYPES[self.dtype].itemsize


def last_level() -> int:
    """Bytes of the last level of cache; 32 MiB where Linux does not report it."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return max((int(path.read_text().strip().rstrip("K")) << 10 for path in sizes), default=32 << 20)


class Caches:
    """Keys and values, and the calls that rotate through them."""

    def __init__(self, case: Case, total: int) -> None:
        self.case = case
        self.count = max(2, -(-total // case.bytes))
        self.kv = [(self._tensor(), self._tensor()) for _ in range(self.count)]
        dtype = torch.float32 if case.dtype == "float32" else torch.bfloat16
        self.q = torch.randn(case.batch, HEADS, case.queries, D).to(dtype)
        self.table = torch.randperm(case.batch * case.keys // PAGE).int().reshape(case.batch, -1)
        self.lengths = torch.full((case.batch,), case.keys)
        self.scale = torch.full((case.batch * case.keys // PAGE, PAGE, KV_HEADS), 1 / 64) if self.quantised else None

    @property
    def quantised(self) -> bool:
        return self.case.dtype == "int8"

    def _tensor(self) -> Tensor:
        shape = (self.case.batch, self.case.keys, KV_HEADS, D)
        return torch.randint(-128, 128, shape, dtype=torch.int8) if self.quantised else self._floats(shape)

    def _floats(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=DTYPES[self.case.dtype]).uniform_(-1, 1)

    def contiguous(self, k: Tensor, v: Tensor) -> Tensor:
        return decode(self.q, k.transpose(1, 2), v.transpose(1, 2))[0]

    def functions(self, k: Tensor, v: Tensor) -> Tensor:
        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return j * 2 != 1001 * 2

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s * torch.sigmoid(s)

        return opkit.attention(self.q, k.transpose(1, 2), v.transpose(1, 2), mask=mask, bias=score)

    def paged(self, k: Tensor, v: Tensor) -> Tensor:
        pages = [x.view(-1, PAGE, KV_HEADS, D) for x in (k, v)]
        q = self.q.transpose(1, 2)
        return opkit.paged_attention(q, *pages, self.table, self.lengths, k_scale=self.scale, v_scale=self.scale)

    def sdpa(self, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)


def seconds(call: Callable[[Tensor, Tensor], Tensor], caches: Caches) -> float:
    start = time.perf_counter()
    for k, v in caches.kv:
        call(k, v)
    return (time.perf_counter() - start) / caches.count


def measure(case: Case, buffer: Tensor, rounds: int) -> dict[str, float]:
    caches = Caches(case, buffer.nbytes)
    calls = {"decode": caches.contiguous, "paged": caches.paged}
    calls |= {} if caches.quantised else {"functions": caches.functions, "sdpa": caches.sdpa}
    for call in calls.values():
        call(*caches.kv[0])
    found: dict[str, list[float]] = {name: [] for name in ("read", *calls)}
    for _ in range(rounds):
        start = time.perf_counter()
        buffer.sum()
        found["read"].append((time.perf_counter() - start) * case.bytes / buffer.nbytes)
        for name, call in calls.items():
            found[name].append(seconds(call, caches))
    return {name: statistics.median(times) for name, times in found.items()}


def cases(quick: bool, most: int) -> Iterator[Case]:
    for dtype in DTYPES:
        for batch, keys in [(1, 2048)] if quick else [(b, n) for b in (1, 8) for n in (2048, 16384, 65536)]:
            for queries in (1, 4, 8, 16) if dtype == "bfloat16" else (1,):
                case = Case(dtype, batch, keys, queries)
                if 2 * case.bytes <= most:
                    yield case
                else:
                    print(f"{dtype} {batch} x {keys}: left out, its caches exceed --most-gib")


def row(case: Case, found: dict[str, float]) -> str:
    name = f"{case.dtype:9s}{case.batch:3d} x{case.keys:6d}{case.queries:3d}"
    times = "".join(f"{found[n] * 1e6:11.0f}" if n in found else f"{'-':>11s}" for n in COLUMNS)
    return f"{name}{times}{found['read'] / found['decode']:11.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three small cases, three rounds")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--most-gib", type=float, default=5.0, help="leave out cases whose caches are larger")
    options = parser.parse_args()
    buffer = torch.ones(4 * last_level() // 8, dtype=torch.int64)
    print(f"{torch.get_num_threads()} threads; microseconds a call; read: that many bytes at the bandwidth of a sum")
    print(f"{'dtype':9s}{'batch x keys':>11s}{'q':>3s}{''.join(f'{n:>11s}' for n in COLUMNS)}{'read/decode':>12s}")
    results: list[dict[str, object]] = []
    for case in cases(options.quick, int(options.most_gib * 2**30)):
        found = measure(case, buffer, 3 if options.quick else options.rounds)
        print(row(case, found), flush=True)
        results.append({**dataclasses.asdict(case), **{f"{name}_us": round(t * 1e6, 1) for name, t in found.items()}})
    print(json.dumps({"benchmark": "attention_decode", "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
