"""What a call of an operator costs, compared with ``torch.library.custom_op`` on the same function.

Tensors have four elements, so that the calls themselves are what takes time. Annotations are checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.bench.topics import Case, Setting, Ways

_CALLS = 100

_IN_C = """
void sine(const T* x, T* out, int64_t x_numel) {
    for (int64_t i = 0; i < x_numel; i++) out[i] = sin(x[i]);
}
"""


def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return torch.sin(x)


def three(x: Float[Tensor, "n"], y: Float[Tensor, "n"], z: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return torch.sin(x)


def scaled(x: Float[Tensor, "n"], factor: float, bias: Float[Tensor, "n"] | None = None) -> Float[Tensor, "n"]:
    return torch.sin(x)


def listed(xs: Sequence[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
    return torch.sin(xs[0])


@dataclasses.dataclass
class Pair:
    x: Float[Tensor, "n"]
    y: Float[Tensor, "n"]


def paired(pair: Pair, factor: float) -> Float[Tensor, "n"]:
    return torch.sin(pair.x)


# What torch.library.custom_op takes: the same without sizes in the annotations.


def plain_one(x: Tensor) -> Tensor:
    return torch.sin(x)


def plain_three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.sin(x)


def plain_scaled(x: Tensor, factor: float, bias: Tensor | None = None) -> Tensor:
    return torch.sin(x)


def plain_listed(xs: Sequence[Tensor]) -> Tensor:
    return torch.sin(xs[0])


def plain_paired(x: Tensor, y: Tensor, factor: float) -> Tensor:
    return torch.sin(x)


_PAIRS = {
    "paired": (paired, plain_paired),
    "one": (one, plain_one),
    "three": (three, plain_three),
    "scaled": (scaled, plain_scaled),
    "listed": (listed, plain_listed),
}


@functools.cache
def _operators(function: str, case: str) -> tuple[Any, Any]:
    """Return opkit's operator of a case and torch's; neither's backward is run."""
    ours, theirs = _PAIRS[function]
    name = _name(case)
    op = opkit.custom_op(f"opkit_bench::{name}", ours, mutates_args=())
    peer = torch.library.custom_op(f"opkit_bench_peer::{name}", theirs, mutates_args=())
    peer.register_autograd(lambda ctx, grad: (grad, None, None))
    return op, peer


def _name(case: str) -> str:
    return "call_" + case.replace(" ", "_")


@functools.cache
def _in_c() -> Any:
    op = opkit.custom_op("opkit_bench::in_c", one, mutates_args=())
    op.register_kernel("cpu", opkit.c_kernel(_IN_C, name="sine", dtypes=["float32"]))
    return op


def cases(setting: Setting) -> Iterator[Case]:
    """Yield a case for each kind of call."""
    make = functools.partial(torch.randn, 4, device=setting.device)
    x, y, z, tracked, whole = make(), make(), make(), make(requires_grad=True), torch.randn(12, device=setting.device)
    shapes = [torch.randn(n, device=setting.device) for n in range(1, 17)]
    no_context: Callable[[], Any] = contextlib.nullcontext
    autocast = functools.partial(torch.autocast, torch.device(setting.device).type, torch.bfloat16)
    kinds: dict[str, tuple[str, list[tuple[tuple[Any, ...], dict[str, Any]]], Callable[[], Any]]] = {
        "one tensor": ("one", [((x,), {})], no_context),
        "three tensors": ("three", [((x, y, z), {})], no_context),
        "one tensor three times": ("three", [((x, x, x), {})], no_context),
        "three views of one tensor": ("three", [((whole[:4], whole[4:8], whole[8:]), {})], no_context),
        "16 shapes in turn": ("one", [((each,), {}) for each in shapes], no_context),
        "keyword arguments": ("three", [((), {"x": x, "y": y, "z": z})], no_context),
        "a float": ("scaled", [((x, 0.5), {})], no_context),
        "a float and None": ("scaled", [((x, 0.5, None), {})], no_context),
        "a list": ("listed", [(([x, y, z],), {})], no_context),
        "inference mode": ("one", [((x,), {})], torch.inference_mode),
        "autocast": ("one", [((x,), {})], autocast),
        "with gradient": ("one", [((tracked,), {})], no_context),
        "one of three with gradient": ("three", [((x, tracked, y), {})], no_context),
    }
    for name, (function, arguments, context) in kinds.items():
        for through in (False, True):
            title = f"{name}, through torch.ops" if through else name
            yield Case(title, functools.partial(_ways, function, name, arguments, context, through), _CALLS)
    pair = Pair(x, y)
    yield Case("a dataclass", functools.partial(_dataclass, pair), _CALLS)
    yield Case("4 threads", functools.partial(_threads, x), 4 * _CALLS)
    if setting.device == "cpu":
        yield Case("a kernel in C", functools.partial(_kernel_in_c, x), _CALLS)


def _ways(
    function: str,
    case: str,
    arguments: list[tuple[Any, dict[str, Any]]],
    context: Callable[[], Any],
    through: bool,
) -> Ways:
    pair = _operators(function, case)
    if through:
        name = _name(case)
        pair = getattr(torch.ops.opkit_bench, name), getattr(torch.ops.opkit_bench_peer, name)
    ours, theirs = (_repeated(op, arguments, context) for op in pair)
    return {"opkit": ours, "custom_op": theirs}


def _repeated(op: Any, arguments: list[tuple[Any, dict[str, Any]]], context: Callable[[], Any]) -> Callable[[], None]:
    calls = [*itertools.islice(itertools.cycle(arguments), _CALLS)]

    def run() -> None:
        with context():
            for args, named in calls:
                op(*args, **named)

    return run


def _dataclass(pair: Pair) -> Ways:
    op, peer = _operators("paired", "a dataclass")

    def theirs(pair: Pair, factor: float) -> Any:  # custom_op takes the fields
        return peer(pair.x, pair.y, factor)

    arguments: list[tuple[Any, dict[str, Any]]] = [((pair, 0.5), {})]
    ways = {"opkit": op, "custom_op": theirs}
    return {name: _repeated(way, arguments, contextlib.nullcontext) for name, way in ways.items()}


def _threads(x: Tensor) -> Ways:
    def together(op: Any) -> Callable[[], None]:
        calls = _repeated(op, [((x,), {})], contextlib.nullcontext)

        def run() -> None:
            threads = [threading.Thread(target=calls) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return run

    ours, theirs = _operators("one", "4 threads")
    return {"opkit": together(ours), "custom_op": together(theirs)}


def _kernel_in_c(x: Tensor) -> Ways:
    arguments: list[tuple[Any, dict[str, Any]]] = [((x,), {})]
    ops = {"opkit": _in_c(), "torch.sin": torch.sin, "opkit, torch.ops": torch.ops.opkit_bench.in_c}
    return {name: _repeated(op, arguments, contextlib.nullcontext) for name, op in ops.items()}
