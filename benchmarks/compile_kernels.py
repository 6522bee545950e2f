"""Single kernels, compared with the memory bandwidth that a copy reaches in the same rounds."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from compile_backends import compiled
from torch import Tensor

_ROWS, _COLUMNS = 4096, 1792  # results of less than 32 MiB, which malloc can be made to reuse: see ``MEMORY``
_CLASSES = 32000
_PARAMETERS = ((1024, 1024),) * 12 + ((4096, 1024),) * 4 + ((1024,),) * 32
_WARM = 3

MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""What the process's environment needs so that memory which is freed is used again, as a training loop's is.

Else each large result is new memory from the kernel, whose page faults take longer than the kernels that are measured.
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel to measure.

    Attributes:
        make: of a dtype, the function to compile and its arguments.
        touched: of the arguments, the bytes that no implementation can avoid to read or to write.
    """

    make: Callable[[torch.dtype], tuple[Callable[..., Any], tuple[Any, ...]]]
    touched: Callable[..., int]


def measure(name: str, dtype: str, backends: Sequence[str], rounds: int) -> dict[str, Any]:
    """Seconds of each round for each backend and for a copy that touches as many bytes, and how many those are."""
    torch.manual_seed(0)
    kernel = KERNELS[name]
    function, args = kernel.make(getattr(torch, dtype))
    touched = kernel.touched(*args)
    source = torch.ones(touched // 8, dtype=torch.float32)
    target = torch.zeros_like(source)
    steps: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}
    for backend in backends:
        own = copy.deepcopy(args)  # Adam writes to its own
        steps[backend] = _bound(compiled(backend, function), own)
    return {"bytes": touched, "seconds": _rounds(steps, rounds)}


def _bound(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*args)


def _rounds(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-_WARM, rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number >= 0:
                found[name].append(time.perf_counter() - start)
    return found


def _matrix(dtype: torch.dtype) -> Tensor:
    return torch.randn(_ROWS, _COLUMNS, dtype=dtype)


def _size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def chain(x: Tensor, y: Tensor) -> Tensor:
    """Ten pointwise operators: two tensors read, one written."""
    z = F.gelu(x, approximate="tanh") * torch.sigmoid(y) + 0.5 * x
    return torch.where(z > 0, z, z.expm1()).clamp(-4.0, 4.0)


@torch.no_grad()
def softmax(x: Tensor) -> Tensor:
    """Over the last dimension: one tensor read, one written."""
    return torch.softmax(x, -1)


@torch.no_grad()
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Over the last dimension: one tensor read, one written."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@torch.no_grad()
def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The mean loss: the logits read once."""
    return F.cross_entropy(logits, target)


@torch.no_grad()
def adam(parameters: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor]) -> None:
    """A step of Adam by foreach operators: gradients read, parameters and both moments read and written."""
    torch._foreach_lerp_(first, grads, 0.1)
    torch._foreach_mul_(second, 0.999)
    torch._foreach_addcmul_(second, grads, grads, 0.001)
    root = torch._foreach_sqrt(second)
    torch._foreach_div_(root, 0.5)
    torch._foreach_add_(root, 1e-8)
    torch._foreach_addcdiv_(parameters, first, root, -1e-3)


@torch.no_grad()
def rotary(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotary position embedding by complex products: one tensor read, one written."""
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * rotations[:, None]).flatten(-2).type_as(x)


def _adam(dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    lists = [[torch.rand(shape, dtype=dtype) for shape in _PARAMETERS] for _ in range(4)]
    return adam, tuple(lists)


def _normed(dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return layer_norm, (_matrix(dtype), torch.rand(_COLUMNS, dtype=dtype), torch.rand(_COLUMNS, dtype=dtype))


def _logits(dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rows = 1024
    return cross_entropy, (torch.randn(rows, _CLASSES, dtype=dtype), torch.randint(0, _CLASSES, (rows,)))


def _rotated(dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rotations = torch.polar(torch.ones(_ROWS, 32), torch.randn(_ROWS, 32))
    return rotary, (_matrix(dtype).view(_ROWS, -1, 64), rotations)


KERNELS: dict[str, Kernel] = {
    "pointwise chain": Kernel(lambda dtype: (chain, (_matrix(dtype), _matrix(dtype))), lambda x, y: 3 * _size(x)),
    "softmax": Kernel(lambda dtype: (softmax, (_matrix(dtype),)), lambda x: 2 * _size(x)),
    "layer norm": Kernel(_normed, lambda x, *_: 2 * _size(x)),
    "cross-entropy": Kernel(_logits, lambda logits, _: _size(logits)),
    "rotary embedding": Kernel(_rotated, lambda x, _: 2 * _size(x)),
    "Adam step": Kernel(_adam, lambda parameters, *_: 7 * _size(*parameters)),
}
