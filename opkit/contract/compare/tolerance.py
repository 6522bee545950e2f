"""This module derives the tolerance of each result from the case; it is never a fixed number.

Four terms add up, for each element:

- rounding of the result, and of a step or two before it, in the result's dtype;
- the error of the reference in that dtype, at this element and elsewhere in the same result;
- the change of the result when every step is off by a rounding (see :mod:`opkit.contract.compare.exact`), with as many roundings
  for a sum as it has terms: this accounts for conditioning and cancellation;
- for the 16-bit dtypes, the change when the arguments are off by a rounding, up to a bound: a kernel may round between its steps.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from opkit.contract.compare.exact import unit, widened

_HALF, _FULL = 2.5, 12.0  # roundings of a result: 16-bit ones are computed in float32, others by a chain of functions
_JUMP = 32.0  # a result that moves by more roundings than this, for one in its arguments, has a jump there
_SAFETY = 2.0
_ABSOLUTE = 4.0
Spread = Callable[[], torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Goal:
    """The values with which one result is compared.

    Attributes:
        own: the reference's result in its dtype.
        exact: the result in float64; ``own`` if there is none.
        spread: computes how far the result moves when every step is off by a rounding.
        moved: the same for one rounding of each argument.
        floor: differences below this do not count.
        extreme: whether any result is correct where the reference in its own dtype breaks down.
    """

    own: torch.Tensor
    exact: torch.Tensor
    spread: Spread = lambda: None
    moved: Spread = lambda: None
    floor: float = 0.0
    extreme: bool = False


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor, 0.0, 0.0, 0.0)


def rounding(dtype: torch.dtype) -> float:
    """Return the relative distance of two correct results through rounding alone."""
    return unit(dtype) * (_HALF if dtype.itemsize <= 2 else _FULL)


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return 2 * info.smallest_normal * info.eps


def allowed(goal: Goal) -> torch.Tensor:
    """Return the difference that rounding and the reference's own error explain, for each element."""
    dtype, size = goal.own.dtype, _finite(goal.exact.abs())
    error = _finite((widened(goal.own) - goal.exact).abs())
    step = unit(dtype) * _JUMP * (size + (size.mean() if size.numel() else 0.0))
    usual = error[error <= step]
    elsewhere = usual.max() if usual.numel() else error.new_zeros(())
    if error.numel() and usual.numel() < 0.9 * error.numel():  # the reference itself is not more accurate
        elsewhere = error.quantile(0.95) if error.numel() < 2**20 else error.max()
    slack = torch.clamp(_SAFETY * elsewhere - unit(dtype) * size, min=0.0)
    near_zero = _ABSOLUTE * min(unit(dtype), unit(torch.float32))  # intermediate numbers are about as large as 1
    floor = max(_smallest(dtype), near_zero, goal.floor)
    return rounding(dtype) * size + torch.maximum(slack, _SAFETY * error) + floor


def widest(goal: Goal) -> torch.Tensor:
    """Return the difference that rounding, the reference's own error and conditioning explain, for each element."""
    found, size = allowed(goal), _finite(goal.exact.abs())
    spread, moved = goal.spread(), goal.moved()
    if spread is not None:
        found = found + _SAFETY * _finite(spread)
    if moved is not None:
        step = unit(goal.own.dtype) * _JUMP * (size + (size.mean() if size.numel() else 0.0))
        found = found + torch.where(moved <= step, _SAFETY * _finite(moved), 0.0)
    return found


def wrong(got: torch.Tensor, goal: Goal) -> torch.Tensor:
    """Return a mask of the elements that differ by more than rounding explains.

    >>> one = torch.ones(2)
    >>> wrong(torch.tensor([1.0, 1.1]), Goal(one, one.double()))
    tensor([False,  True])
    """
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        return _wrong_integers(got, goal)
    if got.dtype.is_complex:
        return _wrong_complex(got, goal)
    bad = _outside(got, goal, allowed(goal))
    return _outside(got, goal, widest(goal)) if bool(bad.any()) else bad


def _outside(got: torch.Tensor, goal: Goal, tolerance: torch.Tensor) -> torch.Tensor:
    value, own = widened(got), widened(goal.own)
    largest = torch.finfo(goal.own.dtype).max
    exact = torch.where(goal.exact.abs() > largest, goal.exact.sign() * float("inf"), goal.exact)
    same = (value == own) | (value == exact) | (value.isnan() & (own.isnan() | exact.isnan()))
    near = ((value - goal.exact).abs() <= tolerance) | ((value - own).abs() <= tolerance)
    at_the_edge = value.isinf() & (goal.exact.abs() + tolerance >= largest) & (value.sign() == goal.exact.sign())
    fragile = _fragile(own, exact) & (goal.extreme | ~value.isfinite())
    return ~(same | near | at_the_edge | fragile)


def _fragile(own: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return where the reference in its dtype and the exact one are of different kinds, or far apart, after an overflow."""
    kinds = (own.isfinite() != exact.isfinite()) | (own.isnan() != exact.isnan())
    largest = _finite(exact).abs().max() if exact.numel() else 0.0
    return kinds | (((own - exact).abs() > 0.5 * exact.abs()) & ((own - exact).abs() > 1e-3 * largest))


def _wrong_integers(got: torch.Tensor, goal: Goal) -> torch.Tensor:
    bad = (got != goal.own) & (got.to(torch.float64) != goal.exact.to(torch.float64))
    spread = goal.spread() if bool(bad.any()) and got.dtype != torch.bool else None
    return bad if spread is None else bad & ((got.double() - goal.exact.double()).abs() > spread)


def _wrong_complex(got: torch.Tensor, goal: Goal) -> torch.Tensor:
    """Compare both parts, with a tolerance by the magnitude of the complex number."""
    found = []
    reach = widest(dataclasses.replace(goal, own=goal.own.abs(), exact=goal.exact.abs()))
    for part in (torch.real, torch.imag):
        one = dataclasses.replace(goal, own=part(goal.own), exact=part(goal.exact))
        error = _SAFETY * _finite((widened(one.own) - one.exact).abs())
        found.append(_outside(part(got), one, reach + error))
    return found[0] | found[1]
