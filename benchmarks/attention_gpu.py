"""Compare ``opkit.attention`` on a GPU with torch's flash kernel, cuDNN, FlexAttention and FlashAttention-4.

All alternate on the same inputs, round by round, in one process; a figure is the median of the rounds, a ratio the
median of the rounds' own, to the fastest other. The time of a round is that of the GPU for enough calls to fill 20 ms, by events.
FlashAttention-4 takes part where its package is installed; FlexAttention is compiled by Inductor (``--flex``). ``--quick`` has
small sizes, and is all that runs without a GPU, in Triton's interpreter and for no figures (``TRITON_INTERPRET=1``); with
``--only`` there are the cases alone whose names hold one of the texts::

    python benchmarks/attention_gpu.py [--what forward,backward,masks,host,numerics] [--rounds 5] [--kernel NAME] [--flex]
        [--only TEXT,TEXT] [--quick] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import opkit
from opkit.masks import Causal, Segments, SlidingWindow

Call = Callable[[], Any]
Size = tuple[int, int, int, int]  # batch, heads, sequence, head
OWN = "opkit"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # which Triton's interpreter can multiply
SIZES = [  # batch, heads, sequence, head, causal
    (8, 16, 2048, 128, True), (2, 16, 8192, 128, True), (1, 16, 16384, 128, True), (8, 16, 2048, 128, False),
    (2, 16, 8192, 128, False), (16, 16, 1024, 64, True), (1, 16, 16384, 64, True), (2, 8, 8192, 256, True),
    (16, 16, 512, 128, True),
]  # fmt: skip
QUICK = [(1, 2, 256, 64, True)]
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
_FILL = 0.02  # seconds of calls in a round


def seconds(call: Call) -> float:
    """The GPU's time of a call, over enough of them; without a GPU the clock's, of one."""
    call()
    alone = host_seconds(call, 1)
    if DEVICE == "cpu":
        return alone
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = max(1, min(200, int(_FILL / max(alone, 1e-6))))
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def waited() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def host_seconds(call: Call, count: int = 200) -> float:
    """The processor's time of a call, over many that the GPU is not waited for; over one, until its results are there."""
    waited()
    start = time.perf_counter()
    for _ in range(count):
        call()
    if count == 1:
        waited()
    found = (time.perf_counter() - start) / count
    waited()
    return found


def interleaved(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, round by round; another's call that cannot be made is left out."""
    able = {name: call for name, call in calls.items() if runs(name, call)}
    times: dict[str, list[float]] = {name: [] for name in able}
    for number in range(rounds):
        for name in list(able) if number % 2 == 0 else list(able)[::-1]:
            times[name].append(seconds(able[name]))
    return times


def runs(name: str, call: Call) -> bool:
    """Whether a call can be made; why another's cannot is printed, and opkit's own must."""
    try:
        call()
    except Exception as error:
        if name.startswith(OWN):
            raise
        first = (str(error).splitlines() or [""])[0][:150]
        print(f"{name}: {type(error).__name__}: {first}", file=sys.stderr)
        return False
    return True


def row(label: str, times: dict[str, list[float]], flops: float) -> dict[str, Any]:
    """TFLOP/s of each, and the ratio to the fastest other."""
    rates = {name: round(flops / statistics.median(found) / 1e12) for name, found in times.items()}
    others = [name for name in times if name != "opkit"]
    if not others:
        return {"case": label, **rates}
    best = max(others, key=lambda name: rates[name])
    return {"case": label, **rates, "opkit / best": f"{ratio(times, OWN, best):.2f} ({best})"}


def ratio(times: dict[str, list[float]], name: str, other: str) -> float:
    """How many times as fast as another a call is: the median of the rounds' own."""
    return statistics.median(theirs / mine for mine, theirs in zip(times[name], times[other], strict=True))


def tensors(batch: int, heads: int, length: int, head: int, count: int = 3) -> list[Tensor]:
    """Normal ones in bfloat16, (batch, heads, length, head)."""
    return [torch.randn(batch, heads, length, head, device=DEVICE, dtype=DTYPE) for _ in range(count)]


def torch_forward(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's SDPA by one of its backends."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


@functools.cache
def flash_attention_4() -> Callable[..., Any] | None:
    """FlashAttention-4's function, where the package is there."""
    try:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return flash_attn_func


def forwards(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: argparse.Namespace) -> dict[str, Call]:
    """The calls of a forward, by name, each of its result."""
    mask = Causal() if causal else None
    found: dict[str, Call] = {"opkit": lambda: opkit.attention(q, k, v, mask=mask, kernel=options.kernel)}
    for name, backend in PEERS.items():
        found[name] = functools.partial(torch_forward, backend, q, k, v, causal)
    if options.flex:
        found["Flex"] = flex(q, k, v, mask)
    if (fa4 := flash_attention_4()) is not None:
        inside = [x.transpose(1, 2).contiguous().detach().requires_grad_(x.requires_grad) for x in (q, k, v)]
        found["FA4"] = lambda: first(fa4(*inside, causal=causal))
    return found


def first(x: Any) -> Tensor:
    """The result itself, of a function that may return more."""
    return x[0] if isinstance(x, tuple) else x


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Call:
    """FlexAttention, compiled, with a mask of :mod:`opkit.masks` or without one."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 100  # of all shapes
    torch._functorch.config.donated_buffer = False  # backwards are repeated
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    blocks = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=DEVICE) if mask is not None else None
    return lambda: compiled(q, k, v, block_mask=blocks)


def forward(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """TFLOP/s of the forward."""
    for size, causal in sizes(options, SIZES):
        batch, heads, length, head = size
        q, k, v = tensors(*size)
        flops = 4 * batch * heads * length * length * head * (0.5 if causal else 1)
        with torch.no_grad():
            yield row(label(size, causal), interleaved(forwards(q, k, v, causal, options), options.rounds), flops)


def backward(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """TFLOP/s of the backward, by the five products that it needs at least."""
    for size, causal in sizes(options, SIZES):
        batch, heads, length, head = size
        q, k, v, gradient = tensors(*size, count=4)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        calls: dict[str, Call] = {}
        for name, call in forwards(q, k, v, causal, options).items():
            if runs(name, call):
                calls[name] = backward_of(call(), (q, k, v), gradient)
        flops = 10 * batch * heads * length * length * head * (0.5 if causal else 1)
        yield row(label(size, causal), interleaved(calls, options.rounds), flops)


def backward_of(out: Tensor, inputs: tuple[Tensor, ...], gradient: Tensor) -> Call:
    """A call of a result's backward; the gradient is (batch, heads, sequence, head), or is laid out as the result is."""
    if out.shape != gradient.shape or out.grad_fn is None:
        gradient = gradient.transpose(1, 2).reshape(out.shape)
    inputs = tuple(_leaves(out)) or inputs
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _leaves(out: Tensor) -> list[Tensor]:
    """The tensors that a result was computed of."""
    found: list[Tensor] = []
    pending = [out.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and hasattr(node, "variable"):
            found.append(node.variable)
        pending += [] if node is None else [each for each, _ in node.next_functions]
    return found


def sizes(options: argparse.Namespace, known: Sequence[tuple[int, ...]]) -> list[tuple[Size, bool]]:
    """Batch, heads, sequence and head, and whether a call is causal: of those that are known the wanted ones."""
    split = [((each[0], each[1], each[2], each[3]), bool(each[4])) for each in (QUICK if options.quick else known)]
    return [(size, causal) for size, causal in split if wanted(options, label(size, causal))]


def wanted(options: argparse.Namespace, name: str) -> bool:
    """Whether a case is selected."""
    return not options.only or any(text in name for text in options.only.split(","))


def label(size: Size, causal: bool) -> str:
    """A case's name."""
    return f"{'x'.join(map(str, size))}{' causal' if causal else ''}"


def masks(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Milliseconds of a window and of packed sequences, forward and backward, and of the others that have such masks."""
    size = (1, 2, 1024, 128) if options.quick else (2, 16, 16384, 128)
    length = size[2]
    q, k, v, gradient = tensors(*size, count=4)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    segment_ids = (torch.arange(length, device=DEVICE) // (length // 8)).int()
    window = length // 16
    cases: dict[str, tuple[Any, dict[str, Any] | None]] = {  # masks, and FlashAttention's options for them
        "none": (None, {}),
        "causal": (Causal(), {"causal": True}),
        f"window {window}": (Causal() & SlidingWindow(window, 0), {"causal": True, "window_size": (window, 0)}),
        "8 causal packed sequences": (Causal() & Segments(segment_ids, segment_ids), None),
        "8 packed sequences": (Segments(segment_ids, segment_ids), None),
    }
    for name, (mask, flash_options) in cases.items():
        if not wanted(options, name):
            continue
        calls = _masked((q, k, v), mask, flash_options, options)
        inputs = [x.detach() for x in (q, k, v)]
        yield milliseconds(
            f"{name}, forward", interleaved(_masked(inputs, mask, flash_options, options), options.rounds)
        )
        back = {kind: backward_of(call(), (q, k, v), gradient) for kind, call in calls.items() if runs(kind, call)}
        yield milliseconds(f"{name}, backward", interleaved(back, options.rounds))


def _masked(
    inputs: Sequence[Tensor], mask: Any, flash_options: dict[str, Any] | None, options: argparse.Namespace
) -> dict[str, Call]:
    """The calls with a mask, by name, each of its result."""
    q, k, v = inputs
    found: dict[str, Call] = {"opkit": lambda: opkit.attention(q, k, v, mask=mask, kernel=options.kernel)}
    if options.flex:
        found["Flex"] = flex(q, k, v, mask)
    if flash_options is not None and (fa4 := flash_attention_4()) is not None:
        inside = [x.transpose(1, 2).contiguous().detach().requires_grad_(x.requires_grad) for x in inputs]
        found["FA4"] = lambda: first(fa4(*inside, **flash_options))
    return found


def milliseconds(case: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds of each, and how many times as fast as the fastest other opkit is."""
    found = {name: statistics.median(each) for name, each in times.items()}
    others = {name: each for name, each in found.items() if name != "opkit"}
    best = min(others, key=lambda name: others[name]) if others else None
    ratio = {"opkit / best": f"{found[best] / found['opkit']:.2f} ({best})"} if best else {}
    return {"case": case, **{name: round(each * 1e3, 3) for name, each in found.items()}, **ratio}


def host(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Microseconds of the processor for a call, of a shape so small that the GPU does not matter."""
    count = 2 if options.quick else 200
    q, k, v = tensors(1, 2, 64, 64)
    for name, grad in (("forward", False), ("forward that records a gradient", True)):
        q, k, v = (x.detach().requires_grad_(grad) for x in (q, k, v))
        calls: dict[str, Call] = {
            "opkit": lambda q=q, k=k, v=v: opkit.attention(q, k, v, mask=Causal(), kernel=options.kernel),
            "SDPA": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        }
        found = {
            name: statistics.median(_warm(call, count) for _ in range(options.rounds)) for name, call in calls.items()
        }
        microseconds = {name: round(value * 1e6, 1) for name, value in found.items()}
        yield {"case": name, **microseconds, "opkit / SDPA": round(found["opkit"] / found["SDPA"], 2)}


def _warm(call: Call, count: int) -> float:
    for _ in range(min(20, count)):
        call()
    return host_seconds(call, count)


def numerics(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Greatest errors compared with float64, of the result and of the gradients, and those of torch's kernels."""
    for head in (64,) if options.quick else (64, 128, 256):
        for length, causal in ((512, False), (512, True), (2048, True)):
            q, k, v, gradient = tensors(1, 4, length, head, count=4)
            exact = _gradients(
                functools.partial(_exact, causal=causal), [x.double() for x in (q, k, v)], gradient.double()
            )
            ways: dict[str, Callable[..., Tensor]] = {
                "opkit": lambda *x, causal=causal: opkit.attention(
                    *x, mask=Causal() if causal else None, kernel=options.kernel
                )
            }
            for name, backend in PEERS.items():
                ways[name] = lambda *x, backend=backend, causal=causal: torch_forward(backend, *x, causal)
            made = {name: functools.partial(_gradients, way, [q, k, v], gradient) for name, way in ways.items()}
            found = {name: _errors(call(), exact) for name, call in made.items() if runs(name, call)}
            yield {"case": label((1, 4, length, head), causal), **found}


def _exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1) @ v


def _gradients(way: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = way(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def _errors(found: list[Tensor], exact: list[Tensor]) -> str:
    pairs = zip(found, exact, strict=True)
    return " ".join(f"{(a.double() - b).abs().max().item() / b.abs().max().item():.1e}" for a, b in pairs)


TABLES = {"forward": forward, "backward": backward, "masks": masks, "host": host, "numerics": numerics}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    names = list(dict.fromkeys(name for each in rows for name in each))
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(str(each.get(name, "")) for name in names) + " |" for each in rows)])


def see_to_device(quick: bool) -> None:
    """Stop where there is nothing to measure, or nothing to try."""
    if DEVICE == "cpu" and not (quick and os.environ.get("TRITON_INTERPRET") == "1"):
        sys.exit(
            "This measures a GPU, and torch finds none. To try it in Triton's interpreter: TRITON_INTERPRET=1, and --quick."
        )


def named() -> str:
    """The GPU's name."""
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "Triton's interpreter"


def main(tables: dict[str, Callable[..., Iterator[dict[str, Any]]]] = TABLES, about: str | None = __doc__) -> None:
    """Print the tables, and one line of JSON."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default=",".join(tables))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernel", default=None)
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    see_to_device(options.quick)
    torch.manual_seed(0)
    found: dict[str, list[dict[str, Any]]] = {}
    for what in options.what.split(","):
        found[what] = list(tables[what](options))
        print(f"\n## {what}\n\n{table(found[what])}", flush=True)
    print(json.dumps({"gpu": named(), "torch": torch.__version__, "tables": found}))
    if options.markdown:
        options.markdown.write_text("\n\n".join(f"## {what}\n\n{table(rows)}" for what, rows in found.items()) + "\n")


if __name__ == "__main__":
    main()
