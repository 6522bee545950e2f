"""Compare attention with biases on a GPU in bfloat16: ``opkit.attention`` and torch's ``scaled_dot_product_attention``.

torch gets each bias as the tensor that it is on the whole, ``attn_mask``, made outside of the rounds, with a causal mask as -inf
in it. The sides alternate, round by round; a round launches a call several times before it waits. Figures are microseconds,
medians of rounds, and a ratio is the median of the rounds' own::

    python benchmarks/attention_biases.py [--rounds 7] [--heads 16]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attention_functions import interleaved, ratio
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import opkit
from opkit.masks import ALiBi, Causal

SIZES = ((2, 4096), (16, 512), (32, 256))  # batches and positions


def cases(batch: int, heads: int, n: int) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
    """Return opkit's arguments of each case, and the tensor that torch adds."""
    dense = torch.randn(1, heads, n, n, device="cuda", dtype=torch.bfloat16)
    future = torch.ones(n, n, device="cuda", dtype=torch.bool).triu(1)
    yield "of heads", {"bias": dense}, dense
    yield "of heads, causal", {"bias": dense, "mask": Causal()}, dense.masked_fill(future, -torch.inf)
    keys = torch.randn(batch, 1, 1, n, device="cuda", dtype=torch.bfloat16)
    yield "of keys", {"bias": keys}, keys.expand(-1, -1, n, -1)
    slopes = torch.rand(heads, device="cuda")
    distance = (torch.arange(n, device="cuda")[:, None] - torch.arange(n, device="cuda")).abs()
    whole = (-slopes[:, None, None] * distance).bfloat16().masked_fill(future, -torch.inf)
    yield "ALiBi, causal", {"bias": ALiBi(slopes), "mask": Causal()}, whole[None]


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return a row for each case."""
    for head in (64, 128):
        for batch, n in SIZES:
            shape = batch, options.heads, n, head
            leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
            gradient = torch.randn_like(leaves[0])
            for name, own, added in cases(batch, options.heads, n):
                sides: dict[str, Callable[[], Tensor]] = {
                    "opkit": functools.partial(opkit.attention, *leaves, **own),
                    "torch": functools.partial(scaled_dot_product_attention, *leaves, attn_mask=added),
                }
                results = {side: call() for side, call in sides.items()}
                difference = (results["opkit"] - results["torch"]).abs().max().item()
                backward = {
                    side: functools.partial(torch.autograd.grad, out, leaves, gradient, retain_graph=True)
                    for side, out in results.items()
                }
                with torch.no_grad():
                    row: dict[str, Any] = {"case": f"{'x'.join(map(str, shape))} {name}"}
                    for what, calls in (("forward", sides), ("backward", backward)):
                        times = interleaved(calls, options.rounds, "cuda")
                        row |= {f"{what}, {side}": round(statistics.median(times[side]) * 1e6, 1) for side in calls}
                        row[f"{what}, torch / opkit"] = ratio(times, "torch", "opkit")
                yield row | {"largest difference": f"{difference:.0e}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, default=16)
    for row in measure(parser.parse_args()):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
