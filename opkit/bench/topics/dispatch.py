"""What a call of an operator costs, compared with ``torch.library.custom_op`` on the same function.

Tensors have four elements, so that the calls themselves are what takes time. Annotations are checked.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
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


# What torch.library.custom_op takes: the same without sizes in the annotations.


def plain_one(x: Tensor) -> Tensor:
    return torch.sin(x)


def plain_three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.sin(x)


def plain_scaled(x: Tensor, factor: float, bias: Tensor | None = None) -> Tensor:
    return torch.sin(x)


def plain_listed(xs: Sequence[Tensor]) -> Tensor:
    return torch.sin(xs[0])


_PAIRS = {
    "one": (one, plain_one),
    "three": (three, plain_three),
    "scaled": (scaled, plain_scaled),
    "listed": (listed, plain_listed),
}


@functools.cache
def _operators(name: str) -> tuple[Any, Any]:
    """Return opkit's operator and torch's; neither's backward is run."""
    function, plain = _PAIRS[name]
    ours = opkit.custom_op(f"opkit_bench::{name}", function, mutates_args=())
    theirs = torch.library.custom_op(f"opkit_bench_peer::{name}", plain, mutates_args=())
    theirs.register_autograd(lambda ctx, grad: (grad, None, None))
    return ours, theirs


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
    for name, (operator, arguments, context) in kinds.items():
        for through in (False, True):
            title = f"{name}, through torch.ops" if through else name
            yield Case(title, functools.partial(_ways, operator, arguments, context, through), _CALLS)
    if setting.device == "cpu":
        yield Case("a kernel in C", functools.partial(_kernel_in_c, x), _CALLS)


def _ways(
    operator: str, arguments: list[tuple[Any, dict[str, Any]]], context: Callable[[], Any], through: bool
) -> Ways:
    pair = _operators(operator)
    if through:
        pair = getattr(torch.ops.opkit_bench, operator), getattr(torch.ops.opkit_bench_peer, operator)
    ours, theirs = (_repeated(op, arguments, context) for op in pair)
    return {"opkit": ours, "custom_op": theirs}


def _repeated(op: Any, arguments: list[tuple[Any, dict[str, Any]]], context: Callable[[], Any]) -> Callable[[], None]:
    calls = [*itertools.islice(itertools.cycle(arguments), _CALLS)]

    def run() -> None:
        with context():
            for args, named in calls:
                op(*args, **named)

    return run


def _kernel_in_c(x: Tensor) -> Ways:
    arguments: list[tuple[Any, dict[str, Any]]] = [((x,), {})]
    ops = {"opkit": _in_c(), "torch.sin": torch.sin, "opkit, torch.ops": torch.ops.opkit_bench.in_c}
    return {name: _repeated(op, arguments, contextlib.nullcontext) for name, op in ops.items()}
