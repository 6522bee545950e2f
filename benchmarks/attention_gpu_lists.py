"""Measure lists of live tiles on a GPU: what they cost, and the rate of attention's kernels under masks that need them.

``lists``: microseconds of the GPU for building the lists of a call, from CUDA graphs of many: those of the forward for Hopper,
those of its backward, which has lists the other way round, and the order of its accumulation where it is deterministic, or the
visits, which the one in CUDA C++ has instead; and where there are segments, those of the forward in CUDA C++ with its spans of
keys. Microseconds of the processor to find a list in the cache, and to build one. Milliseconds of calls whose lists are
found, and of calls that build theirs.

``shares``: the rate of live tiles, 128 queries by 128 keys that see at least one another in part, as the lists count them,
compared with the rate without a mask at the same length; FlexAttention (``--flex``) and FlashAttention-4 (windows;
its function for packed sequences) by time. Bfloat16, a dense mask being one of bools::

    python benchmarks/attention_gpu_lists.py [--what lists,shares] [--rounds 5] [--flex] [--only TEXT,TEXT]
        [--quick] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import attention_gpu as gpu
import torch
from attention_gpu import DEVICE, OWN, Call
from attention_hopper import medians
from torch import Tensor

import opkit
from opkit.attn import calls as attention_calls
from opkit.attn.gpu import plans, tile_lists
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.hopper import backward as hopper_backward
from opkit.attn.gpu.hopper import forward_kinds, library
from opkit.attn.masks.lowering import lower
from opkit.attn.masks.program_builder import CallSizes
from opkit.masks import Causal, Dense, Mask, Segments, SlidingWindow

SIZE: gpu.Size = (2, 16, 16384, 128)
SMALL: gpu.Size = (1, 1, 256, 32)
UNEQUAL = (6000, 200, 3100, 1500, 450, 2400, 900, 1834)  # lengths of packed sequences
DENSE = "opkit, no mask"
TILE = 128  # queries and keys of the tiles that are counted
_SHARE = 0.25  # of the blocks of a mask of blocks that are seen


class Case(NamedTuple):
    """A mask, and what FlashAttention-4 gets for it: options, and the lengths of packed sequences."""

    mask: Mask
    flash_options: dict[str, Any] | None = None
    packed: Sequence[int] | None = None


# ---- the masks -------------------------------------------------------------------------------------------------------


def equal(length: int) -> list[int]:
    """The lengths of eight packed sequences."""
    return [length // 8] * 8


def unequal(length: int) -> list[int]:
    """The lengths of eight packed sequences, from 200 keys to 6000 of 16384."""
    found = [n * length // sum(UNEQUAL) for n in UNEQUAL]
    return [*found[:-1], length - sum(found[:-1])]


def ids(lengths: Sequence[int]) -> Tensor:
    """The number of each key's sequence, int32, (1, keys)."""
    counts = torch.tensor(lengths, device=DEVICE)
    return torch.arange(len(lengths), device=DEVICE).repeat_interleave(counts).int()[None]


def blocks(length: int, heads: int = 1) -> Tensor:
    """Bools, (1, heads, queries, keys): a quarter of the blocks of 128 by 128, and the diagonal ones."""
    count = length // TILE
    seen = (torch.rand(1, heads, count, count, device=DEVICE) < _SHARE) | torch.eye(count, device=DEVICE).bool()
    return seen.repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)


def cases(length: int) -> dict[str, Case]:
    """Masks of one length, by name."""
    window, of_equal, of_unequal = length // 16, ids(equal(length)), ids(unequal(length))
    options = {"causal": True, "window_size": (window, 0)}
    return {
        f"window {window}": Case(Causal() & SlidingWindow(window, 0), options),
        f"packed sequences of {length // 8}": Case(Segments(of_equal), {}, equal(length)),
        f"causal packed sequences of {length // 8}": Case(
            Causal() & Segments(of_equal), {"causal": True}, equal(length)
        ),
        "unequal packed sequences": Case(Segments(of_unequal), {}, unequal(length)),
        "unequal causal packed sequences": Case(Causal() & Segments(of_unequal), {"causal": True}, unequal(length)),
        "unequal packed sequences as bools": Case(Dense((of_unequal.mT == of_unequal)[None, None])),
        "a quarter of blocks, bools": Case(Dense(blocks(length))),
    }


def more(length: int, heads: int) -> dict[str, Case]:
    """Masks that are for lists alone: of ids without a batch dimension, which are other tensors in each call; of all heads."""
    return {
        f"packed sequences of {length // 8}, ids (keys,)": Case(Segments(ids(equal(length))[0])),
        f"bools of {heads} heads": Case(Dense(blocks(length, heads))),
    }


# ---- lists -----------------------------------------------------------------------------------------------------------


def chosen(options: argparse.Namespace, named: dict[str, Case]) -> dict[str, Case]:
    """The selected cases."""
    return {name: case for name, case in named.items() if gpu.wanted(options, name)}


def call_of(mask: Mask, inputs: Sequence[Tensor]) -> attention_calls.AttentionCall:
    """The operator's arguments."""
    q, k, v = inputs
    batch, heads, queries, head = q.shape
    said = lower(mask, CallSizes(batch, heads, queries, k.shape[2], q.device))
    return attention_calls.AttentionCall(
        q, k, v, said.tensors, [], None, None, said.program, [], head**-0.5, 0.0, 0.0, False
    )


def size_of(quick: bool) -> gpu.Size:
    return SMALL if quick else SIZE


def tiles_of(call: attention_calls.AttentionCall) -> tuple[BlockSizes, BlockSizes]:
    """The tiles of the forward for Hopper and of its backward."""
    size = next(each for each in hopper_backward.TILES if call.q.shape[3] <= each)
    forward, backward = forward_kinds.layout_of(call), hopper_backward.TILES[size]
    rows = forward.groups * forward_kinds.ROWS
    return BlockSizes(rows, forward.keys, 0, 0), BlockSizes(backward.rows, backward.keys, 0, 0)


def forget() -> None:
    """Release the cached lists."""
    tile_lists._lists_cache.clear()
    tile_lists._spans_cache.clear()


def built(*arguments: Any) -> tile_lists.TileLists:
    """The lists of a call, never the cached ones."""
    forget()
    return tile_lists.lists_of(*arguments)


def building(call: attention_calls.AttentionCall) -> dict[str, Call]:
    """The calls that build lists, by what they are for."""
    shape = plans.shape_of(tuple(call.mask), ())
    forward, backward = tiles_of(call)
    lists = [built(call, shape, backward, by_keys) for by_keys in (True, False)]
    with_spans = functools.partial(library.lists_of, call, TILE, TILE, False)
    return {
        "forward, us": lambda: built(call, shape, forward, False),
        "backward, us": lambda: built(call, shape, backward, True),
        "its other way, us": lambda: built(call, shape, backward, False),
        "order, us": lambda: tile_lists.turns_of(lists[0], lists[1]),
        "visits, us": lambda: tile_lists.visits_of(lists[0], lists[1]),
        **({"with spans, us": lambda: forgetting(with_spans)} if library.of_segments(shape) else {}),
    }


def on_gpu(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Microseconds of the GPU for each; without a GPU, those of the clock."""
    if DEVICE == "cuda":
        return {name: round(1e3 * each, 1) for name, each in medians(calls, rounds).items()}
    return {name: round(1e6 * gpu.seconds(call), 1) for name, call in calls.items()}


def on_host(call: attention_calls.AttentionCall, rounds: int, count: int) -> dict[str, float]:
    """Microseconds of the processor, for a list that is found and for one that is built."""
    arguments = call, plans.shape_of(tuple(call.mask), ()), tiles_of(call)[0], False
    ways: dict[str, Call] = {
        "found, host us": lambda: tile_lists.lists_of(*arguments),
        "built, host us": lambda: built(*arguments),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in [*ways.items()] * rounds:
        way()
        times[name].append(gpu.host_seconds(way, count) * 1e6)
    return {name: round(statistics.median(each), 1) for name, each in times.items()}


def lists(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What it takes to build lists, and calls that find theirs or build them."""
    size = size_of(options.quick)
    *inputs, gradient = gpu.tensors(*size, count=4)
    _, heads, length, _ = size
    for name, case in chosen(options, {**cases(length), **more(length, heads)}).items():
        call = call_of(case.mask, inputs)
        yield {
            "case": name,
            **on_gpu(building(call), options.rounds),
            **on_host(call, options.rounds, 2 if options.quick else 100),
            **cached_or_built(case.mask, inputs, gradient, options),
        }


def cached_or_built(
    mask: Mask, inputs: Sequence[Tensor], gradient: Tensor, options: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of calls one after another, with their lists in the cache, and each building its own."""
    attention = functools.partial(opkit.attention, mask=mask, kernel=options.kernel)
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    calls = {
        "forward": functools.partial(attention, *inputs),
        "backward": gpu.backward_of(attention(*leaves), leaves, gradient),
    }
    found: dict[str, float] = {}
    for name, call in calls.items():
        ways = {f"{OWN} {name}, found, ms": call, f"{OWN} {name}, built, ms": functools.partial(forgetting, call)}
        times = gpu.interleaved(ways, options.rounds)
        found |= {way.removeprefix(f"{OWN} "): round(statistics.median(each) * 1e3, 3) for way, each in times.items()}
    return found


def forgetting(call: Call) -> Any:
    """A call that finds no lists."""
    forget()
    return call()


# ---- shares ----------------------------------------------------------------------------------------------------------


def shares(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rate of live tiles compared with the rate without a mask."""
    batch, heads, length, head = size = size_of(options.quick)
    *inputs, gradient = gpu.tensors(*size, count=4)
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    dense = batch * heads * length * length * head
    for name, case in chosen(options, cases(length)).items():
        part = live_tiles(call_of(case.mask, inputs)) / (batch * heads * (-(-length // TILE)) ** 2)
        forward = gpu.interleaved(ways_of(case, inputs, options), options.rounds)
        yield share(f"{name}, forward", forward, 4 * dense, part)
        able = {kind: call for kind, call in ways_of(case, leaves, options).items() if gpu.runs(kind, call)}
        back = {kind: gpu.backward_of(gpu.first(call()), leaves, gradient) for kind, call in able.items()}
        yield share(f"{name}, backward", gpu.interleaved(back, options.rounds), 10 * dense, part)


def live_tiles(call: attention_calls.AttentionCall) -> int:
    """How many tiles of 128 by 128 are seen at least in part, in all batches and heads."""
    found = tile_lists.lists_of(call, plans.shape_of(tuple(call.mask), ()), BlockSizes(TILE, TILE, 0, 0), False)
    return int(found.counts[..., 1].sum())


def ways_of(case: Case, inputs: Sequence[Tensor], options: argparse.Namespace) -> dict[str, Call]:
    """The calls, by name, each of its result: opkit's with the mask and without one, and others'."""
    attention = functools.partial(opkit.attention, *inputs, kernel=options.kernel)
    found: dict[str, Call] = {OWN: functools.partial(attention, mask=case.mask), DENSE: attention}
    if options.flex:
        q, k, v = inputs
        found["Flex"] = gpu.flex(q, k, v, case.mask)
    if case.flash_options is not None and gpu.flash_attention_4() is not None:
        found["FA4"] = (windowed if case.packed is None else packed)(case, inputs)
    return found


def windowed(case: Case, inputs: Sequence[Tensor]) -> Call:
    """FlashAttention-4 with a window."""
    function: Any = gpu.flash_attention_4()
    own = [x.transpose(1, 2).contiguous().detach().requires_grad_(x.requires_grad) for x in inputs]
    flash_options = case.flash_options or {}
    return lambda: gpu.first(function(*own, **flash_options))


def packed(case: Case, inputs: Sequence[Tensor]) -> Call:
    """FlashAttention-4 on packed sequences: the sequences of all batches, (total, heads, head)."""
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    lengths = [*(case.packed or ())] * inputs[0].shape[0]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE, dtype=torch.int32)
    of_both = {"cu_seqlens": starts, "max_seqlen": max(lengths)}
    own = [x.transpose(1, 2).flatten(0, 1).detach().requires_grad_(x.requires_grad) for x in inputs]
    flash_options = {f"{name}_{which}": value for name, value in of_both.items() for which in "qk"} | (
        case.flash_options or {}
    )
    return lambda: gpu.first(flash_attn_varlen_func(*own, **flash_options))


def share(case: str, times: dict[str, list[float]], flops: float, part: float) -> dict[str, Any]:
    """Milliseconds, TFLOP/s of live tiles and of all without a mask, and the one in percent of the other.

    Args:
        case: the row's name.
        times: seconds of each call in each round.
        flops: without a mask.
        part: of the tiles that is live.
    """
    masked, dense = (flops / statistics.median(times[name]) / 1e12 for name in (OWN, DENSE))
    own = {name: each for name, each in times.items() if name != DENSE}
    return {
        **gpu.milliseconds(case, own),
        "tiles": f"{part:.1%}",
        "TFLOP/s": round(part * masked),
        "dense": round(dense),
        "share": f"{part * gpu.ratio(times, OWN, DENSE):.0%}",
    }


if __name__ == "__main__":
    gpu.main({"lists": lists, "shares": shares}, __doc__)
