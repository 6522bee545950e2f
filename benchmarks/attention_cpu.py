"""Compare ``opkit.attention`` on the CPU with torch's SDPA and FlexAttention and with the rate of multiply-adds.

Forward and backward in float32 and bfloat16, causal and windowed masks, short sequences, and errors compared with float64
(``errors`` of lengths, ``numerics`` of head sizes). FlexAttention is compiled by Inductor, with opkit's masks and biases.
All alternate, round by round, in one process, on two threads; a figure is the median of the rounds, a ratio the median of
the rounds' own. The peak is what a loop of independent multiply-adds reaches in the same rounds, in the widest
instructions that opkit uses (VDPBF16PS for bfloat16; those of float32 where there is no such instruction)::

    python benchmarks/attention_cpu.py [--what forward,backward,cases,masks,flex,short,call,errors,numerics] [--rounds 7]
        [--threads 2] [--quick] [--markdown FILE]

``cases`` has head sizes, masks and lengths of many kinds. With ``OPKIT_ISA=avx2 ATEN_CPU_CAPABILITY=avx2
ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2`` set, both sides use AVX2 (MKL ignores the last one on AMD's
processors, but has nothing wider for them).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import opkit
import opkit.nn.functional
from opkit.masks import ALiBi, Causal, Mask, SlidingWindow, Softcap, VarLen

Call = Callable[[], Any]
DTYPES = (torch.float32, torch.bfloat16)
SIZES = [  # batch, heads, sequence, head
    (8, 8, 128, 64), (2, 16, 512, 64), (1, 16, 1024, 64), (1, 16, 1024, 96), (1, 16, 1024, 128), (1, 8, 1024, 256),
    (1, 8, 4096, 64), (1, 8, 4096, 128), (1, 2, 16384, 128),
]  # fmt: skip
QUICK = [(1, 2, 128, 64)]

CASES = [  # batch, heads, heads of keys, sequence, head, mask
    (8, 8, 8, 32, 64, ""), (4, 8, 8, 64, 64, "causal"), (8, 8, 8, 128, 64, ""), (2, 8, 8, 512, 40, ""),
    (2, 8, 8, 512, 80, "causal"), (1, 8, 8, 1024, 64, ""), (1, 8, 8, 1024, 96, ""), (1, 8, 2, 1024, 128, "causal"),
    (1, 4, 4, 1024, 256, ""), (1, 4, 4, 2048, 64, "window"), (1, 4, 4, 4096, 64, ""), (1, 2, 2, 4096, 128, "causal"),
]  # fmt: skip
WINDOW = 256

PEAK = r"""
#include <immintrin.h>
#include <stdint.h>
// %(sums)s sums are enough for two instructions a cycle with a latency of four.
__attribute__((target("%(target)s"))) static void loop(float* out, int64_t n) {
    __m%(bits)s sum[%(sums)s];
    const __m%(bits)s a = _mm%(bits)s_set1_ps(1.0f);
    for (int i = 0; i < %(sums)s; i++) sum[i] = a;
    for (int64_t k = 0; k < n; k++) {
        #pragma GCC unroll 24
        for (int i = 0; i < %(sums)s; i++) sum[i] = %(step)s;
    }
    for (int i = 0; i < %(sums)s; i++) _mm%(bits)s_storeu_ps(out + 16 * i, sum[i]);
}
void %(name)s(const float* seed, float* out, int64_t n) { (void)seed; loop(out, n); }
"""
KINDS = {  # by the kernel's ISA: the target, bits, sums, a step, its FLOPs
    "avx2": ("avx2,fma", "256", 12, "_mm256_fmadd_ps(a, a, sum[i])", 16),
    "avx512": ("avx512f", "512", 24, "_mm512_fmadd_ps(a, a, sum[i])", 32),
    "avx512_bf16": ("avx512f,avx512bf16", "512", 24, "_mm512_dpbf16_ps(sum[i], (__m512bh)a, (__m512bh)a)", 64),
}


def peak(dtype: torch.dtype) -> tuple[Callable[[int], Any], int] | None:
    """A function that makes n steps on one thread, and the FLOPs of a step; None for ISAs without a loop here."""
    from opkit import _core

    isa = _core.isa_table()["attention_bf16" if dtype == torch.bfloat16 else "attention_f32"]
    if isa not in KINDS:
        return None
    target, bits, sums, step, flops = KINDS[isa]
    name = f"peak_{str(dtype)[6:]}"

    @opkit.custom_op(f"benchmark::{name}", inline=False)
    def op(seed: Tensor, n: int) -> Tensor:
        return seed.new_zeros(24 * 16)

    source = PEAK % {"target": target, "bits": bits, "sums": sums, "step": step, "name": name}
    op.register_kernel("cpu", opkit.c_kernel(source, name=name))
    seed = torch.zeros(24)
    return lambda n: op(seed, n), sums * flops


def interleaved(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, round by round; of CPU time on one thread, which other processes disturb less."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return times


def row(label: str, times: dict[str, list[float]], flops: float, ceiling: float | None) -> dict[str, Any]:
    """Rates in GFLOP/s, the share of the peak, and the ratios to the others."""
    median = {name: statistics.median(found) for name, found in times.items()}
    found = {"case": label, **{name: round(flops / found / 1e9, 1) for name, found in median.items()}}
    others = {f"{name} / opkit": ratio_to(times, name) for name in times if name != "opkit"}
    share = None if ceiling is None else round(flops / median["opkit"] / 1e9 / ceiling, 2)
    return {**found, "of peak": share, **others}


def ratio_to(times: dict[str, list[float]], name: str) -> float:
    """How many times as long as opkit another takes."""
    return round(statistics.median(b / a for a, b in zip(times["opkit"], times[name], strict=True)), 2)


def tensors(size: tuple[int, int, int, int], dtype: torch.dtype, count: int = 3) -> list[Tensor]:
    """Normal ones, (batch, heads, sequence, head)."""
    return [torch.randn(size).to(dtype) for _ in range(count)]


def ceilings(threads: int) -> dict[torch.dtype, float | None]:
    """GFLOP/s of each dtype: one thread's, times the threads, which is what a machine that is alone gives."""
    found: dict[torch.dtype, float | None] = {}
    for dtype in DTYPES:
        loop = peak(dtype)
        if loop is None:
            found[dtype] = None
            continue
        call, flops = loop
        call(1000)
        best = min(_timed(lambda call=call: call(200_000)) for _ in range(9))
        found[dtype] = threads * 200_000 * flops / best / 1e9
    return found


def _timed(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention, which is compiled at its first call; code compiled before is discarded, since Dynamo caches few versions."""
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


# ---- what is measured ---------------------------------------------------------------------------------------------------


def forward(options: argparse.Namespace, ceiling: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The forward without a mask, over sizes."""
    for dtype in DTYPES:
        for size in options.sizes:
            q, k, v = tensors(size, dtype)
            other = compiled_flex()
            calls = {
                "opkit": lambda q=q, k=k, v=v: opkit.attention(q, k, v),
                "torch": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
                "flex": lambda q=q, k=k, v=v, other=other: other(q, k, v),
            }
            batch, heads, length, head = size
            flops = 4.0 * batch * heads * length * length * head
            with torch.no_grad():
                times = interleaved(calls, options.rounds)
            yield row(f"{size} {str(dtype)[6:]}", times, flops, ceiling[dtype])


def backward(options: argparse.Namespace, ceiling: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The backward alone, of a stored forward."""
    for dtype in DTYPES:
        for size in [each for each in options.sizes if each[2] <= 4096]:
            *leaves, gradient = tensors(size, dtype, 4)
            leaves = [each.requires_grad_() for each in leaves]
            results = {"opkit": opkit.attention(*leaves), "torch": F.scaled_dot_product_attention(*leaves)}
            calls = {
                name: lambda out=out, leaves=leaves, gradient=gradient: torch.autograd.grad(
                    out, leaves, gradient, retain_graph=True
                )
                for name, out in results.items()
            }
            batch, heads, length, head = size
            flops = 10.0 * batch * heads * length * length * head
            yield row(f"{size} {str(dtype)[6:]}", interleaved(calls, options.rounds), flops, ceiling[dtype])


def cases(options: argparse.Namespace, ceiling: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The forward and the backward of calls of many kinds; what a mask hides is no work. A window is a bool mask of torch's."""
    for training in (False, True):
        for dtype in DTYPES:
            for case in [(1, 2, 1, 128, 64, "window")] if options.quick else CASES:
                batch, heads, kv_heads, length, head, kind = case
                seen = torch.ones(length, length, dtype=torch.bool).tril()
                if kind == "window":
                    seen = seen.triu(1 - WINDOW)
                flops = (10.0 if training else 4.0) * batch * heads * head * (int(seen.sum()) if kind else length**2)
                name = f"{'backward' if training else 'forward'} {str(dtype)[6:]}, "
                name += f"{batch} x {heads} x {length} x {head}"
                name += (f", {kv_heads} heads of keys" if heads != kv_heads else "") + (kind and f", {kind}")
                rounds = options.rounds * (10 if flops < 1e9 else 1)  # of short calls more
                times = interleaved(_case(case, dtype, training, seen), rounds)
                yield row(name, times, flops, ceiling[dtype])


def _case(case: tuple[Any, ...], dtype: torch.dtype, training: bool, seen: Tensor) -> dict[str, Call]:
    batch, heads, kv_heads, length, head, kind = case
    q, gradient = tensors((batch, heads, length, head), dtype, 2)
    leaves = [each.requires_grad_(training) for each in (q, *tensors((batch, kv_heads, length, head), dtype, 2))]
    mask = {"": None, "causal": Causal(), "window": Causal() & SlidingWindow(WINDOW - 1)}[kind]
    how: dict[str, Any] = {"attn_mask": seen} if kind == "window" else {"is_causal": kind == "causal"}
    how["enable_gqa"] = heads != kv_heads
    calls: dict[str, Call] = {
        "opkit": functools.partial(opkit.attention, *leaves, mask=mask),
        "torch": functools.partial(F.scaled_dot_product_attention, *leaves, **how),
    }
    if not training:
        return calls
    backwards = {name: (call(), leaves, gradient) for name, call in calls.items()}
    return {name: functools.partial(torch.autograd.grad, *each, retain_graph=True) for name, each in backwards.items()}


def masks(options: argparse.Namespace, ceiling: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The time under a mask as a share of the time without."""
    length = 256 if options.quick else 16384
    starts = torch.arange(0, length + 1, max(1, length // 16), dtype=torch.int32)
    for dtype in DTYPES:
        for name, mask, n in (
            ("causal", Causal(), length // 8),
            ("window 1024", Causal() & SlidingWindow(1024), length),
            ("16 packed sequences", VarLen(starts, starts), length),
        ):
            q, k, v = tensors((1, 2, n, 128), dtype)
            calls = {
                "full": lambda q=q, k=k, v=v: opkit.attention(q, k, v),
                "masked": lambda q=q, k=k, v=v, mask=mask: opkit.attention(q, k, v, mask=mask),
            }
            times = interleaved(calls, max(3, options.rounds // 2))
            share = statistics.median(b / a for a, b in zip(times["full"], times["masked"], strict=True))
            yield {"case": f"{name}, {n}, {str(dtype)[6:]}", "of the time without": round(share, 3)}


def flex(options: argparse.Namespace, ceiling: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Milliseconds under masks and biases, and FlexAttention's with the same ones; both are created before."""
    n = 256 if options.quick else 2048
    starts = torch.arange(0, n + 1, max(1, n // 8), dtype=torch.int32)
    cases: list[tuple[str, Mask | None, Any]] = [
        ("causal", Causal(), None), ("window 256", Causal() & SlidingWindow(256), None),
        ("8 packed sequences", VarLen(starts), None),
        ("causal, ALiBi", Causal(), ALiBi(torch.rand(8))), ("causal, soft cap", Causal(), Softcap(20.0)),
    ]  # fmt: skip
    for dtype in DTYPES:
        for name, mask, mod in cases:
            q, k, v = tensors((1, 8, n, 64), dtype)
            other = compiled_flex()
            how = {"score_mod": mod, "block_mask": create_block_mask(mask, None, None, n, n, device="cpu")}
            calls = {
                "opkit": lambda q=q, k=k, v=v, how=how: opkit.nn.functional.flex_attention(q, k, v, **how),
                "flex": lambda q=q, k=k, v=v, how=how, other=other: other(q, k, v, **how),
            }
            with torch.no_grad():
                times = interleaved(calls, options.rounds)
            median = {each: round(statistics.median(found) * 1e3, 2) for each, found in times.items()}
            yield {"case": f"{name}, {str(dtype)[6:]}", **median, "flex / opkit": ratio_to(times, "flex")}


def short(options: argparse.Namespace, ceiling: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Microseconds of a call of short sequences."""
    for dtype in DTYPES:
        for size in ((1, 1, 1, 8), (1, 8, 16, 64), (1, 8, 64, 64), (8, 8, 64, 64)):
            q, k, v = tensors(size, dtype)
            calls = {
                "opkit": lambda q=q, k=k, v=v: [opkit.attention(q, k, v) for _ in range(20)],
                "torch": lambda q=q, k=k, v=v: [F.scaled_dot_product_attention(q, k, v) for _ in range(20)],
            }
            times = interleaved(calls, 3 * options.rounds)
            micro = {name: round(statistics.median(found) / 20 * 1e6, 1) for name, found in times.items()}
            ratio = statistics.median(b / a for a, b in zip(times["opkit"], times["torch"], strict=True))
            yield {"case": f"{size} {str(dtype)[6:]}", **micro, "torch / opkit": round(ratio, 2)}


def call(options: argparse.Namespace, ceiling: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Microseconds of a call of so little that it is the call which takes time."""
    for size in ((1, 1, 1, 8), (1, 1, 8, 16), (1, 2, 16, 32)):
        for name, calls in _calls(size).items():
            many = {side: lambda each=each: [each() for _ in range(50)] for side, each in calls.items()}
            for warm in many.values():
                warm()
            times = interleaved(many, 15 * options.rounds)
            micro = {side: round(statistics.median(found) / 50 * 1e6, 1) for side, found in times.items()}
            ratio = statistics.median(a / b for a, b in zip(times["opkit"], times["torch"], strict=True))
            yield {"case": f"{size} {name}", **micro, "opkit / torch": round(ratio, 2)}


def _calls(size: tuple[int, int, int, int]) -> dict[str, dict[str, Call]]:
    """What is called, of float32: opkit's and torch's."""
    ours, torchs = opkit.nn.functional.scaled_dot_product_attention, F.scaled_dot_product_attention
    (q, k, v, gradient), mask = tensors(size, torch.float32, 4), Causal()
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    plain, causal = lambda: torchs(q, k, v), lambda: torchs(q, k, v, is_causal=True)
    seen = torch.ones(size[2], size[2], dtype=torch.bool).tril()

    def both(attend: Callable[..., Any]) -> Call:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, gradient)

    return {
        "": {"opkit": lambda: opkit.attention(q, k, v), "torch": plain},
        "causal": {"opkit": lambda: opkit.attention(q, k, v, mask=mask), "torch": causal},
        "drop-in": {"opkit": lambda: ours(q, k, v), "torch": plain},
        "drop-in, causal": {"opkit": lambda: ours(q, k, v, is_causal=True), "torch": causal},
        "drop-in, mask": {"opkit": lambda: ours(q, k, v, seen), "torch": lambda: torchs(q, k, v, seen)},
        "for a gradient": {"opkit": lambda: opkit.attention(*leaves), "torch": lambda: torchs(*leaves)},
        "and backward": {"opkit": both(opkit.attention), "torch": both(torchs)},
        "paged, one query": _paged_calls(size),
    }


def _paged_calls(size: tuple[int, int, int, int]) -> dict[str, Call]:
    """One query of each sequence to 16 keys in pages of 4; torch's to as many that lie together."""
    batch, heads, _, head = size
    q, pages = torch.randn(batch, heads, head), torch.randn(4 * batch, 4, heads, head)
    table, lengths = torch.arange(4 * batch, dtype=torch.int32).reshape(batch, 4), torch.full((batch,), 16)
    keys = pages.reshape(batch, 16, heads, head).transpose(1, 2).contiguous()
    query, values, other = q.unsqueeze(2), keys.clone(), pages.clone()
    return {
        "opkit": lambda: opkit.paged_attention(q, pages, other, table, lengths),
        "torch": lambda: F.scaled_dot_product_attention(query, keys, values),
    }


def errors(options: argparse.Namespace, ceiling: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Root mean square errors compared with float64, of the result and of the gradients."""
    for dtype in (*DTYPES, torch.float16):
        for length in (128,) if options.quick else (128, 1024, 4096):
            for causal in (False, True):
                yield {
                    "case": f"{length}{', causal' if causal else ''}, {str(dtype)[6:]}",
                    **_errors(length, 64, dtype, causal),
                }


def numerics(options: argparse.Namespace, ceiling: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The same over head sizes."""
    for dtype in (*DTYPES, torch.float16):
        for head in (64, 96, 128, 256):
            for length in (128,) if options.quick else (512, 2048):
                for causal in (False, True):
                    case = f"head {head}, {length}{', causal' if causal else ''}, {str(dtype)[6:]}"
                    yield {"case": case, **_errors(length, head, dtype, causal)}


def _errors(length: int, head: int, dtype: torch.dtype, causal: bool) -> dict[str, Any]:
    *arguments, gradient = tensors((1, 1, length, head), dtype, 4)

    def run(call: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in inputs]
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]

    def torchs(*x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*x, is_causal=causal)

    exact = run(torchs, [each.double() for each in arguments])
    found = {
        "opkit": run(lambda *x: opkit.attention(*x, mask=Causal() if causal else None), arguments),
        "torch": run(torchs, arguments),
    }
    names = ("result", "dq", "dk", "dv")
    rms = {
        side: [(a.double() - b).square().mean().sqrt().item() for a, b in zip(values, exact, strict=True)]
        for side, values in found.items()
    }
    return {name: f"{a:.1e} / {b:.1e}" for name, a, b in zip(names, rms["opkit"], rms["torch"], strict=True)}


PARTS = {
    "forward": forward, "backward": backward, "cases": cases, "masks": masks, "flex": flex, "short": short, "call": call,
    "errors": errors, "numerics": numerics,
}  # fmt: skip


def markdown(title: str, rows: list[dict[str, Any]]) -> str:
    """A table of rows that have the same columns."""
    columns = list(rows[0])
    lines = [f"| {' | '.join([title, *columns[1:]])} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    lines += [f"| {' | '.join('-' if row[c] is None else str(row[c]) for c in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print tables and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, which say nothing of speed")
    parser.add_argument("--markdown", type=Path, help="where the tables go")
    options = parser.parse_args()
    options.sizes = QUICK if options.quick else SIZES
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ceiling = ceilings(options.threads)
    found: dict[str, Any] = {"peak, GFLOP/s": {str(dtype)[6:]: each and round(each) for dtype, each in ceiling.items()}}
    text = ""
    for what in options.what:
        found[what] = []
        for each in PARTS[what](options, ceiling):
            found[what].append(each)
            print(what, each, file=sys.stderr, flush=True)
        text += markdown(what, found[what]) + "\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
