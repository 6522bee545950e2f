"""Compare ``opkit.attention`` with users' functions as masks and scores with torch's compiled FlexAttention.

Twelve masks and scores, written with FlexAttention's signatures; both sides get the same functions. FlexAttention also gets
the block mask that ``create_block_mask`` computes of it, once and outside of the rounds. The sides alternate, round by round,
in one process; a figure is the median of the rounds, a ratio the median of the rounds' own. On a GPU a round launches a call
several times before it waits, and ``launch`` is what the processor takes for a call. ``first`` is the first call of a
new function with empty caches: tracing and compiling for both, and the block mask for FlexAttention; ``first training`` is
that of the first forward and backward that follow. On a CPU FlexAttention has no backward; ``backward / forward`` are opkit's
own. ``built-in`` is the time with opkit's own mask for the same thing, where there is one. ``memory`` is by how much a call of
65,536 queries and keys increases the peak memory of the process, on a GPU the memory that torch has allocated. ``rows`` is
attention with functions of rows, next to the same in torch operations around it, in eager mode and compiled; columns without a
unit are multiples of attention alone::

    python benchmarks/attention_functions.py [--device cpu] [--what calls,memory,rows] [--rounds 7] [--length 2048] [--quick]
        [--batch 1] [--heads 8] [--head 64] [--cases causal,window] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OPKIT_CACHE_DIR"] = tempfile.mkdtemp(prefix="opkit-benchmark-")  # so that first calls compile

import torch
from torch import Tensor
from torch._inductor.exc import InductorError
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import opkit
from opkit.masks import ALiBi, Causal, PrefixLM, Segments, SlidingWindow

_QUEUED = 4e-3  # seconds of work that a round launches on a GPU
Function = Callable[..., Tensor]


class Case(NamedTuple):
    """A mask and a score function, opkit's own arguments for the same, and captured tensors with gradients."""

    mask: Function | None = None
    score: Function | None = None
    own: dict[str, Any] | None = None
    learned: tuple[Tensor, ...] = ()


def cases(n: int, heads: int, device: str) -> dict[str, Case]:
    """Return the twelve cases for ``n`` queries and keys."""
    window, prefix, width = max(n // 8, 2), n // 4, int(n**0.5)
    reach = max(width // 8, 1)
    slopes = torch.rand(heads, device=device)
    starts = torch.arange(0, n + 1, max(1, n // 8), dtype=torch.int32, device=device)
    ids = torch.bucketize(torch.arange(n, device=device), starts.long(), right=True).to(torch.int32) - 1
    within = torch.arange(n, device=device, dtype=torch.int32) - starts[ids.long()]
    buckets = torch.randn(32, heads, device=device)
    temperature = torch.rand(heads, device=device) + 0.5

    def causal(b, h, i, j):
        return i >= j

    def of_document(b, h, i, j):
        return ids[i] == ids[j]

    def t5(score, b, h, i, j):
        distance = (i - j).abs()
        far = 8 + (torch.log(distance.clamp(min=1) / 8) / 2.7725887 * 8).to(torch.int32)
        bucket = torch.where(distance < 8, distance, far.clamp(max=15)) + torch.where(j > i, 16, 0)
        return score + buckets[bucket, h]

    return {
        "causal": Case(causal, own={"mask": Causal()}),
        "window": Case(
            lambda b, h, i, j: (i >= j) & (i - j < window), own={"mask": Causal() & SlidingWindow(window - 1)}
        ),
        "ALiBi": Case(
            causal,
            lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
            own={"mask": Causal(), "bias": ALiBi(slopes)},
        ),
        "soft cap": Case(causal, lambda s, b, h, i, j: 20 * torch.tanh(s / 20), {"mask": Causal(), "softcap": 20.0}),
        "documents": Case(
            lambda b, h, i, j: of_document(b, h, i, j) & (i >= j), own={"mask": Segments(ids) & Causal()}
        ),
        "prefix": Case(
            lambda b, h, i, j: (j < prefix) | (i >= j), own={"mask": PrefixLM(torch.tensor([prefix]).to(device))}
        ),
        "dilated": Case(lambda b, h, i, j: (i >= j) & (i - j < 4 * window) & ((i - j) % 4 == 0)),
        "2-D neighbourhood": Case(
            lambda b, h, i, j: ((i // width - j // width).abs() <= reach) & ((i % width - j % width).abs() <= reach)
        ),
        "PrefixLM of documents": Case(
            lambda b, h, i, j: of_document(b, h, i, j) & ((within[j] < window // 4) | (i >= j))
        ),
        "T5 bias": Case(None, t5, learned=(buckets,)),
        "tanh gate": Case(causal, lambda s, b, h, i, j: s * torch.sigmoid(s) + torch.tanh(s / 8)),
        "temperature": Case(causal, lambda s, b, h, i, j: s * temperature[h], learned=(temperature,)),
    }


def seconds(call: Callable[[], Any], device: str) -> float:
    """Return the time of a call; of one thread on a CPU the time that it computes, of which other processes take nothing."""
    if device != "cpu":
        torch.accelerator.synchronize()
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    if device != "cpu":
        torch.accelerator.synchronize()
    return clock() - start


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of each call, round by round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = dict.fromkeys(calls, 1)
    for name, call in calls.items():
        seconds(call, device)
        if device != "cpu":
            repeats[name] = max(1, min(50, int(_QUEUED / seconds(call, device))))
    for _ in range(rounds):
        for name, call in calls.items():
            repeated = functools.partial(repeat, call, repeats[name])
            times[name].append(seconds(repeated, device) / repeats[name])
    return times


def repeat(call: Callable[[], Any], times: int) -> None:
    """Call several times."""
    for _ in range(times):
        call()


def launch_time(call: Callable[[], Any]) -> int:
    """Return the microseconds until a call on a GPU returns, which is before the GPU has finished."""
    found: list[float] = []
    for _ in range(20):
        torch.accelerator.synchronize()
        found.append(seconds(call, "cpu"))
    return round(statistics.median(found) * 1e6)


def ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    """Return the median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(times[over], times[under], strict=True)), 2)


def flex(case: Case, n: int, device: str) -> Callable[..., Tensor]:
    """Return FlexAttention of a case: compiled at its first call, with nothing in its caches."""
    torch.compiler.reset()
    block_mask = None if case.mask is None else create_block_mask(case.mask, None, None, n, n, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score_mod=case.score, block_mask=block_mask)


def measure(name: str, case: Case, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the table."""
    n, device = options.length, options.device
    shape = options.batch, options.heads, n, options.head
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    how = {"mask": case.mask, "bias": case.score}
    other: list[Callable[..., Tensor]] = []

    def first_of_flex():
        other.append(flex(case, n, device))
        other[0](q, k, v)

    with torch.no_grad():
        first = {
            "opkit": seconds(lambda: opkit.attention(q, k, v, **how), device),
            "flex": seconds(first_of_flex, device),
        }
        calls = {"opkit": lambda: opkit.attention(q, k, v, **how), "flex": lambda: other[0](q, k, v)}
        if case.own is not None:
            own = case.own
            calls["built-in"] = lambda: opkit.attention(q, k, v, **own)
        error = (calls["opkit"]().float() - calls["flex"]().float()).abs().max().item()
        times = interleaved(calls, options.rounds, device)
        launch = {side: launch_time(call) for side, call in calls.items()} if device != "cpu" else {}
    backward, training = backwards(case, (q, k, v), how, other[0], device)
    backward["forward"] = calls["opkit"]
    with torch.no_grad():
        learning = interleaved(backward, options.rounds, device)
    median = {each: statistics.median(found) * 1e3 for each, found in times.items()}
    row = {
        "case": f"{name}, {str(dtype)[6:]}",
        "opkit, ms": round(median["opkit"], 2),
        "flex, ms": round(median["flex"], 2),
        "flex / opkit": ratio(times, "flex", "opkit"),
        "built-in / opkit": ratio(times, "built-in", "opkit") if case.own is not None else None,
        "backward, ms": round(statistics.median(learning["opkit"]) * 1e3, 2),
        "backward / forward": ratio(learning, "opkit", "forward"),
    }
    if device != "cpu":
        row |= {"launch, us": launch["opkit"], "flex's, us": launch["flex"]}
        row["backward, flex / opkit"] = ratio(learning, "flex", "opkit") if "flex" in learning else None
    row |= {
        "first, s": round(first["opkit"], 2),
        "flex, s": round(first["flex"], 2),
        "first training, s": round(training["opkit"], 2),
    }
    if device != "cpu":
        row["flex's, s"] = round(training["flex"], 2) if "flex" in training else None
    return row | {"largest difference": f"{error:.0e}"}


def backwards(
    case: Case, inputs: tuple[Tensor, ...], how: dict[str, Any], other: Callable[..., Tensor], device: str
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Return the backward of each side that has one, of a stored forward, and the seconds of the first forward and backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    wanted = [*leaves, *(x.requires_grad_() for x in case.learned)]
    gradient = torch.randn_like(inputs[0])
    forward = {"opkit": lambda: opkit.attention(*leaves, **how)}
    if device != "cpu":
        forward["flex"] = lambda: other(*leaves)
    backward: dict[str, Callable[[], Any]] = {}

    def trained(side: str) -> None:
        out = forward[side]()
        backward[side] = lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True)
        backward[side]()

    first: dict[str, float] = {}
    for side in forward:
        try:
            first[side] = seconds(lambda side=side: trained(side), device)
        except Exception as error:  # what FlexAttention generates may take more shared memory than there is
            if side == "opkit":
                raise
            backward.pop(side, None)
            print(f"{side}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return backward, first


def calls(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure each case in each dtype."""
    warm = Case(lambda b, h, i, j: (i + j) % 3 == 0, lambda s, b, h, i, j: s * 2 + torch.sin(s))
    dtypes = [torch.float32, torch.bfloat16] if options.device == "cpu" else [torch.bfloat16]
    measure("a first one", warm, dtypes[0], options)  # imports, and whatever a first compilation costs
    for dtype in dtypes:
        for name, case in cases(options.length, options.heads, options.device).items():
            if not options.cases or name in options.cases:
                try:
                    yield measure(name, case, dtype, options)
                except InductorError as error:  # FlexAttention's, as in `backwards`
                    print(f"{name}: {str(error)[:200]}", file=sys.stderr)


def memory(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the peak memory of calls of many queries and keys, of which each query sees few."""
    n = 1024 if options.quick else 65536
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    shape = 1, 1, n, options.head
    q, k, v = (torch.randn(shape, device=options.device).to(dtype).requires_grad_() for _ in range(3))
    own = sum(x.numel() * x.element_size() for x in (q, k, v)) / 2**20
    for name, case in cases(n, 1, options.device).items():
        if name not in ("dilated", "2-D neighbourhood", "PrefixLM of documents") and not options.cases:
            continue
        if options.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        before = _peak(options.device)
        out = opkit.attention(q, k, v, mask=case.mask, bias=case.score)
        forward = _peak(options.device) - before
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        yield {
            "case": f"{name}, {n} queries and keys",
            "q, k and v, MB": round(own),
            "forward, MB": round(forward),
            "and backward, MB": round(_peak(options.device) - before),
            "scores would be, MB": round(4 * n * n / 2**20),
        }


def _peak(device: str) -> float:
    """Return the peak memory so far in MB."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def halves_turned(x: Tensor) -> Tensor:
    """Return the halves of the last dimension exchanged, one of them negative, as rotary embeddings need it."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure functions of rows, and the same in torch operations around attention, in eager mode."""
    dtypes = [torch.float32, torch.bfloat16] if options.device == "cpu" else [torch.bfloat16]
    for dtype in dtypes:
        for n in (options.length // 4, options.length):
            shape = options.batch, options.heads, n, options.head
            q, k, v, gate = (torch.randn(shape, device=options.device).to(dtype) for _ in range(4))
            inverse = 10000.0 ** -torch.arange(0, 1, 2 / options.head)
            angles = torch.outer(torch.arange(n), inverse).repeat(1, 2).to(options.device)
            alone = functools.partial(opkit.attention, mask=Causal())
            leaves, gradient = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(q)
            for name, (inside, around) in transforms(angles.cos(), angles.sin(), gate).items():
                sides = {"alone": alone, "torch": around, "functions": inside}
                forward = {side: functools.partial(function, q, k, v) for side, function in sides.items()}
                both = {
                    side: functools.partial(gradients, function, leaves, gradient) for side, function in sides.items()
                }
                start = time.perf_counter()
                both["functions"]()
                first = time.perf_counter() - start
                with torch.no_grad():
                    times = interleaved(forward, options.rounds, options.device)
                    error = (forward["functions"]().float() - forward["torch"]().float()).abs().max().item()
                training = interleaved(both, options.rounds, options.device)
                yield {
                    "case": f"{name}, {n} positions, {str(dtype)[6:]}",
                    "alone, ms": round(statistics.median(times["alone"]) * 1e3, 2),
                    "torch": ratio(times, "torch", "alone"),
                    "functions": ratio(times, "functions", "alone"),
                    "with backward, alone, ms": round(statistics.median(training["alone"]) * 1e3, 2),
                    "and torch": ratio(training, "torch", "alone"),
                    "and functions": ratio(training, "functions", "alone"),
                    "first, s": round(first, 2),
                    "largest difference": f"{error:.0e}",
                }


def gradients(function: Callable[..., Tensor], leaves: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a function of queries, keys and values."""
    return torch.autograd.grad(function(*leaves), leaves, gradient)


def transforms(
    cos: Tensor, sin: Tensor, gate: Tensor
) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
    """Return attention with functions of rows, and with the same in torch operations around it, both in float32."""
    weight = torch.rand(cos.shape[1], device=cos.device)

    def rotary(x, b, h, at):
        return x * cos[at] + halves_turned(x) * sin[at]

    def normed(x, b, h, at):
        return rotary(x * torch.rsqrt(x.square().mean() + 1e-6) * weight, b, h, at)

    def all_rotary(x):
        wide = x.float()
        return (wide * cos + halves_turned(wide) * sin).to(x.dtype)

    def all_normed(x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight
        return (wide * cos + halves_turned(wide) * sin).to(x.dtype)

    def attention(q, k, v, **how):
        return opkit.attention(q, k, v, mask=Causal(), **how)

    return {
        "rotary": (
            lambda q, k, v: attention(q, k, v, query=rotary, key=rotary),
            lambda q, k, v: attention(all_rotary(q), all_rotary(k), v),
        ),
        "norm and rotary": (
            lambda q, k, v: attention(q, k, v, query=normed, key=normed),
            lambda q, k, v: attention(all_normed(q), all_normed(k), v),
        ),
        "gate": (
            lambda q, k, v: attention(q, k, v, output=lambda x, b, h, i: x * torch.sigmoid(gate[b, h, i].float())),
            lambda q, k, v: (attention(q, k, v).float() * torch.sigmoid(gate.float())).to(q.dtype),
        ),
    }


PARTS = {"calls": calls, "memory": memory, "rows": rows}


def markdown(title: str, rows: list[dict[str, Any]]) -> str:
    """Return a table of rows that have the same columns."""
    columns = list(rows[0])
    lines = [f"| {' | '.join([title, *columns[1:]])} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    lines += [f"| {' | '.join('-' if row[c] is None else str(row[c]) for c in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print tables and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--what", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--cases", type=lambda text: text.split(","), default=[])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head", type=int, default=64, help="channels of a head")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, which say nothing of speed")
    parser.add_argument("--markdown", type=Path, help="where the tables go")
    options = parser.parse_args()
    options.length = 256 if options.quick else options.length
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch._inductor.config.force_disable_caches = True
    found: dict[str, Any] = {}
    text = ""
    for what in options.what:
        found[what] = []
        for each in PARTS[what](options):
            found[what].append(each)
            print(what, each, file=sys.stderr, flush=True)
        text += markdown(what, found[what]) + "\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
