"""Functions of a few kernels on a GPU, in bfloat16: eager, Inductor and opkit, in microseconds, with cold caches.

    python benchmarks/compile_triton.py

The contenders alternate, and a time is the median. "copy" is the time of a copy that reads and writes as many bytes as the
arguments and results have. Backward passes are operators of their own, so that no time is autograd's; only that of the
cross-entropy is autograd's, which takes much less time than the kernels.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import opkit  # noqa: F401  (the backend)

ROUNDS = 15
FLUSHED = (
    1 << 29
)  # bytes that are written before a call: more than the caches, and longer than it takes to launch a call
VOCABULARY = 50257
ROWS, WIDTH = 8192, 4096
aten = torch.ops.aten


def layer_norm_backward(dy: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Any:
    _, mean, rstd = aten.native_layer_norm(x, [x.shape[-1]], w, b, 1e-5)
    return aten.native_layer_norm_backward(dy, x, [x.shape[-1]], mean, rstd, w, b, [True, True, True])


def gelu_backward(dy: Tensor, x: Tensor, b: Tensor) -> Any:
    dx = aten.gelu_backward(dy, x + b)
    return dx, dx.sum(0)


def embedding_backward(dy: Tensor, places: Tensor) -> Tensor:
    return aten.embedding_dense_backward(dy, places, VOCABULARY, -1, False)


def cross_entropy(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), labels)


def foreach_adam(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the parameters, averages and squares after a step; the arguments are these, and gradients."""
    count = len(tensors) // 4
    parameters, averages, squares, gradients = (list(tensors[k * count : (k + 1) * count]) for k in range(4))
    averages = torch._foreach_lerp(averages, gradients, 0.1)
    squares = torch._foreach_mul(torch._foreach_abs(squares), 0.999)
    squares = torch._foreach_addcmul(squares, gradients, gradients, 0.001)
    divisors = torch._foreach_add(torch._foreach_sqrt(squares), 1e-8)
    return (*torch._foreach_addcdiv(parameters, averages, divisors, -1e-3), *averages, *squares)


Shapes = list[tuple[int, ...]]
CASES: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "pointwise chain": (lambda x, y: torch.relu(x * y + 1) * torch.sigmoid(x), [(ROWS, WIDTH), (WIDTH,)]),
    "bias and gelu": (lambda x, b: F.gelu(x + b), [(ROWS, WIDTH), (WIDTH,)]),
    "softmax of 512": (lambda x: torch.softmax(x, -1), [(32768, 512)]),
    "softmax of 32768": (lambda x: torch.softmax(x, -1), [(1024, 32768)]),
    "softmax of 50257": (lambda x: torch.softmax(x, -1), [(1024, VOCABULARY)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), [(ROWS, WIDTH), (WIDTH,), (WIDTH,)]),
    "layer norm, backward": (layer_norm_backward, [(ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,), (WIDTH,)]),
    "sum of columns": (lambda x: x.sum(0), [(ROWS, WIDTH)]),
    "bias and gelu, backward": (gelu_backward, [(ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)]),
    "transpose": (lambda x: x.t().contiguous() + 1, [(ROWS, WIDTH)]),
    "embedding, backward": (embedding_backward, [(ROWS, 768)]),
    "foreach Adam": (foreach_adam, 4 * 8 * [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,)]),
    "cross-entropy and gradient": (cross_entropy, [(ROWS, VOCABULARY)]),
}
"""Functions and the shapes of their arguments; ``INDEXED`` take a vector of indices into the vocabulary as well."""
INDEXED = (embedding_backward, cross_entropy)


def arguments(name: str, device: str) -> list[Tensor]:
    function, shapes = CASES[name]
    args = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    if function is cross_entropy:
        args[0].requires_grad_()
    if function in INDEXED:
        args.append(torch.randint(VOCABULARY, shapes[0][:1], device=device))
    return args


def call(function: Callable[..., Any], args: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the results, and the gradient of the first argument if that requires one."""
    found = function(*args)
    if args[0].requires_grad:
        return found.detach(), *torch.autograd.grad(found, args[0])
    return found if isinstance(found, tuple) else (found,)


def microseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median time of each call."""
    large = torch.empty(FLUSHED, device="cuda", dtype=torch.uint8)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, each in calls.items():
            large.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            each()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    """Return the norms of the differences relative to those of what is expected."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def main() -> None:
    print(f"{'':27s}{'copy':>9s}{'eager':>9s}{'Inductor':>9s}{'opkit':>9s}  opkit / Inductor")
    for name, (function, _) in CASES.items():
        torch.compiler.reset()
        args = arguments(name, "cuda")
        contenders = {"eager": function, "inductor": torch.compile(function, dynamic=False)}
        contenders["opkit"] = torch.compile(function, backend="opkit", dynamic=False)
        calls = {each: functools.partial(call, made, args) for each, made in contenders.items()}
        expected = calls["eager"]()
        for each in calls.values():
            for _ in range(3):
                found = each()
            assert max(errors(found, expected)) < 2e-2, name
        size = sum(x.nbytes for x in [*args, *expected]) // 2
        source, target = (torch.empty(size, device="cuda", dtype=torch.uint8) for _ in range(2))
        times = microseconds({"copy": functools.partial(target.copy_, source), **calls})
        cells = "".join(f"{each:9.1f}" for each in times.values())
        print(f"{name:27s}{cells}  {times['opkit'] / times['inductor']:.2f}", flush=True)


if __name__ == "__main__":
    main()
