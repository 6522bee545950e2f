"""The formulas of docs/distributed_cost.md, and steps of processes against them, which ``test_distributed_cost`` starts."""

import functools
import math
import runpy
from collections import Counter
from pathlib import Path

import processes
import torch
import torch.distributed as dist
from processes import case


@functools.cache
def cost():
    """The names of benchmarks/distributed_cost.py."""
    return runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "distributed_cost.py"))


def plan(**fields):
    return cost()["Plan"](**fields)


def sizes(vocabulary, width, heads, layers, tokens, batch):
    return cost()["EXAMPLE"]["Sizes"](vocabulary, width, heads, layers, tokens, batch)


def ring_messages(tokens, processes, rank, balanced=True, window=None):
    """How many others see a rank's keys under a causal mask, with a window if any, and the keys of how many it sees."""
    part = tokens // processes // (2 if balanced else 1)

    def starts(rank):
        return [part * n for n in ([rank, 2 * processes - 1 - rank] if balanced else [rank])]

    def sees(a, b):
        pairs = [(q, k) for q in starts(a) for k in starts(b)]
        return any(k <= q and (window is None or q - (k + part - 1) <= window) for q, k in pairs)

    others = [r for r in range(processes) if r != rank]
    return sum(sees(r, rank) for r in others), sum(sees(rank, r) for r in others)


def predicted(plan, sizes, element=2):
    """The count and the bytes of each kind of communication of a step, and its floating point operations."""
    width, layers, shards = sizes.width, sizes.layers, plan.fsdp * plan.cp
    part, heads = width // plan.tp, sizes.heads // plan.tp
    rows = sizes.batch // plan.fsdp * sizes.tokens // plan.cp
    count, size = Counter(), Counter()

    def add(kind, times, each):
        count[kind] += times
        size[kind] += times * each

    def padded(rows, columns=1):
        return element * math.ceil(rows / shards) * shards * columns

    block = 3 * padded(part, width) + padded(width, part) + 2 * padded(4 * part, width) + padded(width, 4 * part)
    block, root = block + 2 * padded(width), 2 * padded(sizes.vocabulary, width) + padded(width)
    if shards > 1:
        add("all_gather", 2 * layers, block)
        add("all_gather", 1, root)
        add("reduce_scatter", layers, block)
        add("reduce_scatter", 1, root)
    if plan.tp > 1:
        add("all_reduce", 7 * layers, element * rows * width)
    if plan.cp > 1 and plan.method == "ring":  # balanced: every other process sees a process's keys
        for kind in ("send", "recv"):
            add(kind, 3 * (plan.cp - 1) * layers, element * 2 * rows * part)
    elif plan.cp > 1:
        add("all_to_all", 8 * layers, element * rows * part)
        add("all_to_all", layers, max(4, element) * rows * heads)
    products = 6 * rows * (16 * width * part * layers + sizes.vocabulary * width)
    attention = 7 * sizes.batch // plan.fsdp * part * sizes.tokens**2 // plan.cp * layers
    return {kind: (count[kind], size[kind]) for kind in cost()["KINDS"] if count[kind]}, products + attention


def check(plan, sizes, **options):
    program = cost()["recorded"](plan, sizes, **options)
    element = torch.empty(0, dtype=options.get("dtype", torch.bfloat16)).element_size()
    assert (program.totals(), program.flops) == predicted(plan, sizes, element)


def _check_real(**fields):
    check(plan(**fields), sizes(50, 32, 4, 2, 32, 4), fake=False, dtype=torch.float32)


@case
def fsdp(mesh):
    _check_real(fsdp=mesh.size())


@case
def tensors(mesh):
    _check_real(tp=mesh.size())


@case
def ring(mesh):
    _check_real(cp=mesh.size(), method="ring")


@case
def exchange(mesh):
    _check_real(cp=mesh.size(), method="all_to_all")


@case
def fsdp_and_tensors(mesh):
    _check_real(fsdp=2, tp=2)


@case
def ring_and_tensors(mesh):
    _check_real(cp=2, tp=2, method="ring")


@case
def pipeline(mesh):
    """The first step of torch's schedules also sends four bytes to each neighbour."""
    count, rank = mesh.size(), dist.get_rank()
    program = cost()["recorded"](
        plan(pp=count, microbatches=3), sizes(50, 32, 4, count, 16, 3), fake=False, dtype=torch.float32
    )
    neighbours = (rank > 0) + (rank < count - 1)
    expected = neighbours * (3 + 1), neighbours * (3 * 16 * 32 * 4 + 4)
    assert program.totals() == {"send": expected, "recv": expected}


if __name__ == "__main__":
    processes.main()
