"""The functions of ``opkit.nn.functional`` compared with torch's, as they are and compiled, and with Liger's on GPUs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opkit.bench.topics import Case, Setting, Ways
from opkit.nn import functional

Function = Callable[..., Tensor]


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


_PAIRS: dict[str, tuple[Function, Function]] = {
    "rms_norm": (functional.rms_norm, _rms_norm),
    "swiglu": (functional.swiglu, _swiglu),
    "cross_entropy": (functional.cross_entropy, F.cross_entropy),
}


def _liger(name: str) -> Function:
    ops = importlib.import_module("liger_kernel.transformers.functional")
    return {"rms_norm": lambda x, w: ops.liger_rms_norm(x, w, 1e-6), "swiglu": ops.liger_swiglu,
            "cross_entropy": ops.liger_cross_entropy}[name]  # fmt: skip


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the forward, and the forward and backward, of each function."""
    rows, width = (64, 256) if setting.quick else (2048, 1024) if setting.device == "cpu" else (8192, 4096)
    for name in _PAIRS:
        for dtype in (torch.float32, torch.bfloat16):
            for training in (False, True):
                title = (
                    f"{name}, {'forward and backward' if training else 'forward'}, {rows} x {width} {str(dtype)[6:]}"
                )
                yield Case(title, functools.partial(_ways, setting.device, name, rows, width, dtype, training))


def _ways(device: str, name: str, rows: int, width: int, dtype: torch.dtype, training: bool) -> Ways:
    ours, theirs = _PAIRS[name]
    make = functools.partial(torch.randn, device=device, dtype=dtype, requires_grad=training)
    x = make(rows, width)
    other = {
        "rms_norm": lambda: make(width),
        "swiglu": lambda: make(rows, width),
        "cross_entropy": lambda: torch.randint(width, (rows,), device=device),
    }[name]()
    torch.compiler.reset()
    functions = {"opkit": ours, "Inductor": torch.compile(theirs, dynamic=False), "torch": theirs}
    if torch.device(device).type == "cuda" and importlib.util.find_spec("liger_kernel"):
        functions["Liger"] = _liger(name)
    return {key: functools.partial(_call, each, (x, other), training) for key, each in functions.items()}


def _call(function: Function, tensors: Sequence[Tensor], training: bool) -> Any:
    if not training:
        with torch.no_grad():
            return function(*tensors)
    result = function(*tensors)
    return torch.autograd.grad(result, [x for x in tensors if x.requires_grad], torch.ones_like(result))
