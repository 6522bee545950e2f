"""Derived gradients, compared with the reference's own.

The kernel of every operator is its reference, so that only the rule of the gradient differs. A derived backward computes the
forward again, which the operator's kernel does not leave behind: the second way is the reference, and one forward more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import opkit
from opkit.bench.topics import Case, Setting, Ways


def rms_norm(x: Float[Tensor, "*batch d"], w: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def layer_norm(x: Float[Tensor, "*batch d"], w: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
    return F.layer_norm(x, w.shape, w)


def softmax(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    return torch.softmax(x, -1)


def swiglu(x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    return F.silu(x) * y


def cross_entropy(x: Float[Tensor, "n c"], t: Int[Tensor, "n"]) -> Float[Tensor, ""]:
    return F.cross_entropy(x, t)


def attention(
    q: Float[Tensor, "b n d"], k: Float[Tensor, "b m d"], v: Float[Tensor, "b m d"]
) -> Float[Tensor, "b n d"]:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


_REFERENCES = (rms_norm, layer_norm, softmax, swiglu, cross_entropy, attention)


def cases(setting: Setting) -> Iterator[Case]:
    """Yield forward and backward of each operator."""
    rows, d = (64, 128) if setting.quick else (2048, 1024)
    make = functools.partial(torch.randn, device=setting.device)
    x, w, heads = make(rows, d), make(d), make(8, rows // 8, 64)
    targets = torch.randint(d, (rows,), device=setting.device)
    arguments = [(x, w), (x, w), (x,), (x, x.clone()), (x, targets), (heads, heads.clone(), heads.clone())]
    for reference, each in zip(_REFERENCES, arguments, strict=True):
        yield Case(reference.__name__, functools.partial(_ways, reference, each))


@functools.cache
def _operator(reference: Callable[..., Tensor]) -> Any:
    op = opkit.custom_op(f"opkit_bench_gradients::{reference.__name__}", reference, mutates_args=())
    op.register_kernel(None, reference)
    return op


def _ways(reference: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> Ways:
    args = [each.detach().requires_grad_(each.is_floating_point()) for each in arguments]

    def own_and_forward() -> None:
        _step(reference, args)
        with torch.no_grad():
            reference(*args)

    return {"opkit": functools.partial(_step, _operator(reference), args), "reference and a forward": own_and_forward}


def _step(function: Callable[..., Tensor], args: list[Tensor]) -> None:
    output = function(*args)
    torch.autograd.grad(output, [each for each in args if each.requires_grad], torch.ones_like(output))
