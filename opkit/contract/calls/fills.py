"""This module has a table of fills, the numbers in a tensor: from ordinary ones to those that kernels often handle wrongly."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable

import torch

_SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0)
_WIDE = torch.float64
_ORDINARY_INTEGERS = (-4, 5)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=_generator(seed), dtype=torch.float64 if dtype == torch.float64 else torch.float32)


def _positive(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return 0.5 + torch.rand(n, generator=_generator(seed), dtype=_WIDE)


def _small_integers(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(*_ORDINARY_INTEGERS, (n,), generator=_generator(seed)).to(_WIDE)


def _mixed(n: int, seed: int, values: list[float]) -> torch.Tensor:
    """Return ordinary numbers, about a third of which are replaced by ``values``."""
    generator = _generator(seed)
    ordinary = torch.randn(n, generator=generator, dtype=_WIDE)
    chosen = torch.tensor(values, dtype=_WIDE)[torch.randint(len(values), (n,), generator=generator)]
    return torch.where(torch.rand(n, generator=generator) < 0.35, chosen, ordinary)


def _special(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    info = torch.finfo(dtype)
    return _mixed(n, seed, [*_SPECIAL, info.smallest_normal / 4, info.tiny, info.max, info.min])


def _infinite(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _mixed(n, seed, [float("inf"), -float("inf")])


def _nan(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _mixed(n, seed, [float("nan")])


def _signed_zeros(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _mixed(n, seed, [0.0, -0.0])


def _denormal(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _normal(n, _WIDE, seed) * (torch.finfo(dtype).smallest_normal / 4)


def _huge(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _normal(n, _WIDE, seed).clamp(-4, 4) * (torch.finfo(dtype).max / 8)


def _halves(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(-9, 10, (n,), generator=_generator(seed)).to(_WIDE) / 2


def _constant(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.full((n,), 0.75 + seed / 2, dtype=_WIDE)


def _small(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _normal(n, _WIDE, seed) * 1e-3


def _shifted(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _normal(n, _WIDE, seed) + {torch.float64: 1e5, torch.float32: 1e3}.get(dtype, 32.0)


def _distinct(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a permutation of numbers a small step apart: no two are equal, if the dtype has that many numbers."""
    return (torch.randperm(n, generator=_generator(seed)).to(_WIDE) - n // 2) / 64


def _large(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _normal(n, _WIDE, seed) * (1000 if dtype == torch.float64 else 100)


def _tiny(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _normal(n, _WIDE, seed) * (torch.finfo(dtype).smallest_normal * 16)


def _level(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return equal numbers, so large that adding the logarithm of a count changes nothing, or near the dtype's limits."""
    info = torch.finfo(dtype)
    return torch.full((n,), (8 / info.eps, -8 / info.eps, info.min, info.max / 16)[seed % 4], dtype=_WIDE)


def _ones(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.ones(n, dtype=_WIDE)


def _zeros(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.zeros(n, dtype=_WIDE)


FILLS: dict[str, Callable[[int, torch.dtype, int], torch.Tensor]] = {
    "normal": _normal,
    "positive": _positive,
    "integers": _small_integers,
    "ones": _ones,
    "zeros": _zeros,
    "halves": _halves,
    "constant": _constant,
    "distinct": _distinct,
    "small": _small,
    "shifted": _shifted,
    "large": _large,
    "signed_zeros": _signed_zeros,
    "infinite": _infinite,
    "nan": _nan,
    "special": _special,
    "denormal": _denormal,
    "tiny": _tiny,
    "huge": _huge,
    "level": _level,
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
