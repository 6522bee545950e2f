"""This module has tables of the numbers in a tensor (fills), of memory layouts, and of layouts of incoming gradients."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

_SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0)
_WIDE = torch.float64
_MIN_DIMS = {"transposed": 2, "reversed": 2, "padded": 2, "channels_last": 4, "overlapping": 2}

Fill = Callable[[int, torch.dtype, int], torch.Tensor]


# ---- numbers -----------------------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=_generator(seed), dtype=_WIDE if dtype == _WIDE else torch.float32)


def _scaled(factor: Callable[[torch.dtype], float]) -> Fill:
    """Return a fill of normal numbers times a factor that depends on the dtype."""
    return lambda n, dtype, seed: _normal(n, _WIDE, seed) * factor(dtype)


def _mixed(values: Callable[[torch.finfo], Sequence[float]]) -> Fill:
    """Return a fill of normal numbers, about a third of which are replaced by ``values``."""

    def mixed(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        generator, others = _generator(seed), values(torch.finfo(dtype))
        ordinary = torch.randn(n, generator=generator, dtype=_WIDE)
        chosen = torch.tensor(others, dtype=_WIDE)[torch.randint(len(others), (n,), generator=generator)]
        return torch.where(torch.rand(n, generator=generator) < 0.35, chosen, ordinary)

    return mixed


def _whole(low: int, high: int) -> Fill:
    return lambda n, dtype, seed: torch.randint(low, high + 1, (n,), generator=_generator(seed)).to(_WIDE)


def _equal(value: Callable[[torch.finfo, int], float]) -> Fill:
    """Return a fill of equal numbers, which depend on the dtype and the seed."""
    return lambda n, dtype, seed: torch.full((n,), value(torch.finfo(dtype), seed), dtype=_WIDE)


def _distinct(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a permutation of numbers a small step apart: no two are equal, if the dtype has that many numbers."""
    return (torch.randperm(n, generator=_generator(seed)).to(_WIDE) - n // 2) / 64


def _shifted(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _normal(n, _WIDE, seed) + {torch.float64: 1e5, torch.float32: 1e3}.get(dtype, 32.0)


def _level(info: torch.finfo, seed: int) -> float:
    """Return a number so large that adding the logarithm of a count changes nothing, or near the dtype's limits."""
    return (8 / info.eps, -8 / info.eps, info.min, info.max / 16)[seed % 4]


FILLS: dict[str, Fill] = {
    "normal": _normal,
    "positive": lambda n, dtype, seed: 0.5 + torch.rand(n, generator=_generator(seed), dtype=_WIDE),
    "integers": _whole(-4, 4),
    "ones": _equal(lambda info, seed: 1.0),
    "zeros": _equal(lambda info, seed: 0.0),
    "halves": lambda n, dtype, seed: _whole(-9, 9)(n, dtype, seed) / 2,
    "constant": _equal(lambda info, seed: 0.75 + seed / 2),
    "distinct": _distinct,
    "small": _scaled(lambda dtype: 1e-3),
    "shifted": _shifted,
    "large": _scaled(lambda dtype: 1000 if dtype == torch.float64 else 100),
    "signed_zeros": _mixed(lambda info: [0.0, -0.0]),
    "infinite": _mixed(lambda info: [float("inf"), -float("inf")]),
    "nan": _mixed(lambda info: [float("nan")]),
    "special": _mixed(lambda info: [*_SPECIAL, info.smallest_normal / 4, info.tiny, info.max, info.min]),
    "denormal": _scaled(lambda dtype: torch.finfo(dtype).smallest_normal / 4),
    "tiny": _scaled(lambda dtype: torch.finfo(dtype).smallest_normal * 16),
    "huge": lambda n, dtype, seed: _normal(n, _WIDE, seed).clamp(-4, 4) * (torch.finfo(dtype).max / 8),
    "level": _equal(_level),
    "edges": _normal,
}
"""The fills by name, the simplest first. Each gives ``n`` float numbers for a seed, for tensors of floating dtypes."""

ORDINARY = ("normal", "positive", "integers")
"""Fills on which two correct kernels agree up to rounding."""

NUMERIC = ("normal", "positive", "integers", "halves", "constant", "distinct", "small", "shifted", "zeros")
"""Fills for comparing numbers: long sums, ties of rounding, no ties at all, means smaller and larger than the deviation."""

CONSTANT = ("ones", "constant", "zeros")
"""Fills whose elements are all equal, so that rounding errors of a sum do not cancel."""

EXTREME = ("signed_zeros", "infinite", "nan", "special", "denormal", "tiny", "huge", "large", "level")
"""Fills of numbers that kernels often handle wrongly."""


def fill(
    n: int, dtype: torch.dtype, name: str, seed: int, low: float | None = None, high: float | None = None
) -> torch.Tensor:
    """Return ``n`` elements of ``dtype``; ``low`` and ``high``, both inclusive, are bounds.

    Integers are drawn from ``low`` to ``high`` (-4 to 4 by default; 0 to 8 where the dtype has no sign), whatever the fill;
    ``edges`` without bounds takes them from either end of the dtype.

    >>> fill(4, torch.int64, "normal", seed=0, low=2, high=2)
    tensor([2, 2, 2, 2])
    """
    if dtype == torch.bool:
        return torch.randint(2, (n,), generator=_generator(seed), dtype=torch.bool)
    if not (dtype.is_floating_point or dtype.is_complex):
        return _integers(n, dtype, name, seed, low, high)
    if dtype.is_complex:
        part = torch.empty((), dtype=dtype).real.dtype
        both = [fill(n, part, name, 2 * seed + side, low, high) for side in (0, 1)]
        return (
            torch.complex(*(each.float() for each in both)).to(dtype)
            if dtype == torch.complex32
            else torch.complex(*both)
        )
    drawn = FILLS[name](n, dtype, seed)
    if low is not None or high is not None:
        drawn = _bounded(drawn, name, seed, low, high)
    return drawn.to(dtype)


def _integers(n: int, dtype: torch.dtype, name: str, seed: int, low: float | None, high: float | None) -> torch.Tensor:
    info = torch.iinfo(dtype)
    signed = info.min < 0
    if name == "edges" and low is None and high is None:  # without the least number: dividing it by -1 raises a trap
        edges = torch.tensor([0, 1, 2, info.max, info.min + 1, info.max - 1, info.max // 2], dtype=torch.int64)
        return edges[torch.randint(len(edges), (n,), generator=_generator(seed))].to(dtype)
    first = int(low) if low is not None else (-4 if signed else 0)
    last = int(high) if high is not None else max(first + 8, 4)
    if last < first:  # no number is allowed: an index into nothing
        return torch.zeros(n, dtype=dtype)
    return torch.randint(first, last + 1, (n,), generator=_generator(seed)).to(dtype)


def _bounded(drawn: torch.Tensor, name: str, seed: int, low: float | None, high: float | None) -> torch.Tensor:
    if name in ("normal", "positive") and low is not None and high is not None:
        return low + (high - low) * torch.rand(drawn.numel(), generator=_generator(seed), dtype=_WIDE)
    return drawn.clamp(low, high)


# ---- memory layouts ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MemoryLayout:
    """Strides and an offset, in elements, and the extent of memory that they need."""

    strides: tuple[int, ...]
    offset: int
    elements: int
    negated: bool = False


def _packed(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions are in ``order`` in memory, the slowest first."""
    order = range(len(shape)) if order is None else order
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _layout(shape: Sequence[int], strides: Sequence[int], offset: int = 0, negated: bool = False) -> MemoryLayout:
    empty = 0 in shape
    reach = 0 if empty else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return MemoryLayout(tuple(strides), offset, offset + reach, negated)


LAYOUTS: dict[str, Callable[[Sequence[int]], MemoryLayout]] = {
    "contiguous": lambda shape: _layout(shape, _packed(shape)),
    "offset": lambda shape: _layout(shape, _packed(shape), offset=1),
    "transposed": lambda shape: _layout(
        shape, _packed(shape, [*range(len(shape))[:-2], len(shape) - 1, len(shape) - 2])
    ),
    "strided": lambda shape: _layout(shape, [2 * stride for stride in _packed(shape)], offset=1),
    "padded": lambda shape: _layout(shape, _packed([*shape[:-1], shape[-1] + 3]), offset=2),
    "reversed": lambda shape: _layout(shape, _packed(shape, range(len(shape))[::-1])),
    "expanded": lambda shape: _layout(shape, (0, *_packed((1, *shape[1:]))[1:])),
    "expanded_last": lambda shape: _layout(shape, (*_packed((*shape[:-1], 1))[:-1], 0)),
    "channels_last": lambda shape: _layout(shape, _packed(shape, [0, *range(2, len(shape)), 1])),
    "overlapping": lambda shape: _layout(shape, [*_packed(shape)[:-2], 1, *_packed(shape)[-1:]]),
    "negated": lambda shape: _layout(shape, _packed(shape), negated=True),
}
"""The layouts by name, the simplest first. ``negated`` is torch's lazy minus: the numbers in memory have the other sign."""

WRITABLE = ("contiguous", "offset", "transposed", "strided", "padded", "reversed", "channels_last")
"""Layouts in which no two elements share memory, so that a kernel may write to the tensor."""


def fits(name: str, shape: Sequence[int]) -> bool:
    """Return whether tensors of this shape can have the layout, and differ from a contiguous one then.

    >>> fits("transposed", (2, 3)), fits("transposed", (3,))
    (True, False)
    """
    return name in ("contiguous", "offset", "negated") or len(shape) >= _MIN_DIMS.get(name, 1)


def layout_of(name: str, shape: Sequence[int]) -> MemoryLayout:
    """Return the strides, offset and extent of a tensor of ``shape``; one of too few dimensions is contiguous.

    >>> layout_of("transposed", (2, 3)).strides
    (1, 2)
    """
    return LAYOUTS[name if fits(name, shape) else "contiguous"](shape)


# ---- incoming gradients ------------------------------------------------------------------------------------------------


def _transposed(g: torch.Tensor) -> torch.Tensor:
    order = [*range(g.dim())][::-1]
    return g.permute(order).contiguous().permute(order)


INCOMING: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "expanded from one number, as by sum().backward()": (0, lambda g: g.reshape(-1)[:1].reshape(()).expand(g.shape)),
    "expanded in the last dimension": (1, lambda g: g[..., :1].expand(g.shape)),
    "transposed": (2, _transposed),
    "strided": (0, lambda g: torch.stack([g, g + 1], -1).select(-1, 0)),
    "offset in its memory": (0, lambda g: torch.cat([g.new_ones(1), g.reshape(-1)])[1:].view(g.shape)),
}
"""Layouts of an incoming gradient: the smallest number of dimensions, and a function of a contiguous gradient."""
