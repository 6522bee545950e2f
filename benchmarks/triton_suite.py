"""What ``benchmarks/triton_kernels.py`` measures: a kernel, its peers, and what it must move."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STEPS = {torch.float32: 2.0**-16, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float8_e4m3fn: 2.0**-3}
"""How far a result may be from the exact one, in terms of itself and of the mean size of all; sums are long."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator to measure, and what to measure it against.

    Attributes:
        name: as the table has it.
        sizes: the sizes that ``inputs`` accepts, from small to large.
        inputs: the tensors that every function takes, for a size, dtype and device.
        ours: an operator of examples/kernels.
        plain: the same in torch's functions, which torch.compile gets.
        liger: the same by Liger-Kernel, or None. It may overwrite its inputs, which are its own.
        bytes: what must be read and written at the least, for a size and dtype.
        random: whether results are compared with nothing, as they depend on random numbers.
        slack: how many times further off a result may be than one rounding makes it.
    """

    name: str
    sizes: tuple[int, ...]
    inputs: Callable[[int, torch.dtype, Any], tuple[Tensor, ...]]
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    liger: Callable[..., Any] | None
    bytes: Callable[[int, torch.dtype], int]
    random: bool = False
    slack: float = 1.0


def tensors(result: Any) -> list[Tensor]:
    """What a function returned, as a list."""
    return [result] if isinstance(result, Tensor) else [part for part in result if isinstance(part, Tensor)]


def widened(inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The inputs with those of ``dtype`` in float32."""
    return tuple(x.float() if x.dtype == dtype else x for x in inputs)


def difference(result: Any, expected: Any, slack: float = 1.0) -> str:
    """How a result differs from the exact one; empty where it is as near as its dtype allows."""
    pairs = list(zip(tensors(result), tensors(expected), strict=False))
    found = [_difference(a, b, slack) for a, b in pairs]
    return "; ".join(f"output {i}: {text}" for i, text in enumerate(found) if text)


def _difference(a: Tensor, b: Tensor, slack: float) -> str:
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    if not a.is_floating_point():
        wrong = (a != b).float().mean().item()
        near = a.dtype is torch.int8 and (a.int() - b.int()).abs().max() <= 1  # ties fall as the last bit before does
        return "" if wrong < (1e-3 if near else 1e-4) else f"{wrong:.2%} are not equal"
    step, wide = STEPS[a.dtype], b.float()
    room = step * (2 * wide.abs() + wide.square().mean().sqrt())
    excess = ((a.float() - wide).abs() / room).nan_to_num(math.inf).max().item() if wide.numel() else 0.0
    return "" if excess <= slack else f"{excess:.1f} times as far off as {a.dtype} allows"
