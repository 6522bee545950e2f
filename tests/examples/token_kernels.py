"""The operators of examples/kernels that work on tokens, and calls of them: imported by tests, and by the interpreter."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from row_kernels import Case, normal  # puts the examples on the path

import glu  # isort: skip
import linear_cross_entropy  # isort: skip
import quantize  # isort: skip
import rotary  # isort: skip
import router  # isort: skip

MODULES = (glu, linear_cross_entropy, quantize, rotary, router)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
Shape = tuple[int, ...]
Given = tuple[Any, ...]


def gates(count: int) -> Callable[[Shape, torch.dtype], Given]:
    """So many tensors, of both signs and some far from zero."""
    return lambda shape, dtype: tuple((3 * torch.randn(shape)).to(dtype) for _ in range(count))


def heads(shape: Shape, dtype: torch.dtype) -> Given:
    """Queries, keys with half as many heads, and angles, of which the two halves differ."""
    batch, seq, count, d = shape
    q, k = normal(*shape, dtype=dtype), normal(batch, seq, (count + 1) // 2, d, dtype=dtype)
    return q, k, *(torch.rand(seq, d).to(dtype) for _ in range(2))


def classes(shape: Shape, dtype: torch.dtype) -> Given:
    """Logits, and targets of which some are ignored."""
    return (3 * torch.randn(shape)).to(dtype), targets(*shape), -100


def targets(n: int, count: int) -> torch.Tensor:
    """Classes, every third row's ignored but for the first."""
    chosen = torch.randint(count, (n,))
    chosen[2::3] = -100
    return chosen


def classes_and_sums(shape: Shape, dtype: torch.dtype) -> Given:
    """What the backward of the cross-entropy takes."""
    logits, chosen, ignored = classes(shape, dtype)
    _, sums, count = linear_cross_entropy.cross_entropy.reference(logits.double(), chosen, ignored)
    return torch.tensor(0.7), logits, chosen, sums.float(), count.float(), ignored


def layer(shape: Shape, dtype: torch.dtype) -> Given:
    """Hidden states, a weight with 37 classes a row of them, targets; both gradients."""
    n, d = shape
    hidden, weight = (torch.randn(n, d) / d**0.5).to(dtype), torch.randn(37 * n, d).to(dtype)
    return hidden, weight, targets(n, 37 * n), -100, True, True


def scores(k: int, renormalize: bool) -> Callable[[Shape, torch.dtype], Given]:
    """Logits of experts, many of them equal."""
    return lambda shape, dtype: ((2 * torch.randn(shape)).to(torch.bfloat16).to(dtype), k, renormalize)


def chosen(k: int, renormalize: bool) -> Callable[[Shape, torch.dtype], Given]:
    """What the backward of the router takes."""

    def arguments(shape: Shape, dtype: torch.dtype) -> Given:
        logits, *_ = scores(k, renormalize)(shape, dtype)
        weights, index = router.router.reference(logits, k, renormalize)
        return torch.randn(weights.shape).to(dtype), logits, weights, index, renormalize

    return arguments


ROUTES = {f"{k}{'' if share else ' of all'}": (k, share) for k, share in ((1, True), (2, False), (7, True), (8, False))}
CASES = {
    "swiglu": Case(glu.swiglu, gates(2), True),
    "swiglu_backward": Case(glu.swiglu_backward, gates(3)),
    "geglu": Case(glu.geglu, gates(2), True),
    "geglu_backward": Case(glu.geglu_backward, gates(3)),
    "rotary": Case(rotary.rotary, heads),
    "rotary_backward": Case(rotary.rotary_backward, heads),
    "cross_entropy": Case(linear_cross_entropy.cross_entropy, classes),
    "cross_entropy_backward": Case(linear_cross_entropy.cross_entropy_backward, classes_and_sums),
    "linear_cross_entropy": Case(linear_cross_entropy.linear_cross_entropy_parts, layer),
    **{f"router {name}": Case(router.router, scores(*route)) for name, route in ROUTES.items()},
    **{f"router_backward {name}": Case(router.router_backward, chosen(*route)) for name, route in ROUTES.items()},
}

GLU = ("swiglu", "swiglu_backward", "geglu", "geglu_backward")
ROTARY = ("rotary", "rotary_backward")
LOSS = ("cross_entropy", "cross_entropy_backward")
LAYER = ("linear_cross_entropy",)
ROUTER = tuple(name for name in CASES if name.startswith("router"))


def by_name(*rows: tuple[tuple[str, ...], list[Shape]]) -> dict[str, list[Shape]]:
    """The shapes for each case."""
    return {name: shapes for names, shapes in rows for name in names}


SHAPES = by_name(
    (GLU, [(1, 1), (3, 5), (2, 3, 64), (7, 1000), (0, 8), (5, 0), (9,), (3, 4100)]),
    (ROTARY, [(1, 1, 1, 2), (2, 3, 4, 64), (1, 5, 7, 80), (3, 1, 2, 6), (0, 2, 2, 8)]),
    (LOSS, [(1, 1), (5, 37), (4, 4096), (2, 20001)]),
    (LAYER, [(1, 8), (5, 64), (40, 16)]),
    (ROUTER, [(3, 8), (1, 9), (2, 5, 64), (70, 60), (4, 256), (0, 16), (11,)]),
)
LARGE = by_name(
    (GLU, [(1000, 14336), (64, 33, 513), (3, 0), (5,)]),
    (ROTARY, [(2, 1000, 32, 128), (3, 100, 28, 80), (0, 2, 2, 8), (1, 3, 71, 64)]),
    (LOSS, [(1000, 32000), (9, 128256), (17, 50257)]),
    (LAYER, [(300, 256), (1, 64)]),
    (ROUTER, [(10000, 128), (1000, 60), (333, 8), (4, 5, 256), (9,)]),
)
