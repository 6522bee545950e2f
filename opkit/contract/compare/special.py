"""This module finds where correct kernels may differ on extreme numbers: flushed denormals, overflow, invalid operations."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.compare.compared import ComparedPair
from opkit.contract.compare.exact import widened
from opkit.contract.observed.outcome import CallOutcome, same_values
from opkit.contract.prop import CallRefused, Violation
from opkit.contract.subject import Subject

_SIGNS = ("signed_zeros", "special")
_NEAR = 4  # a sum that comes this close to the largest number overflows in some order
_ORDINARY = 3.0
_MIN_NONZERO = 3  # so many nonzero numbers show that nothing is added up


def _of_changed(subject: Subject, case: Case, change: Callable[[torch.Tensor], torch.Tensor]) -> CallOutcome:
    """Return the reference's results for changed floats."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return change(tensor) if tensor.dtype.is_floating_point else tensor

    return subject.call(case.make(subject.device).map(changed), subject.reference)


def flushed(subject: Subject, case: Case) -> CallOutcome:
    """Return the reference's results if denormal arguments are flushed to zero."""

    def flush(tensor: torch.Tensor) -> torch.Tensor:
        small = tensor.abs() < torch.finfo(tensor.dtype).smallest_normal
        return torch.where(small, torch.zeros_like(tensor).copysign(tensor), tensor)

    return _of_changed(subject, case, flush)


def excused(subject: Subject, case: Case, pair: ComparedPair) -> torch.Tensor | None:
    """Return a mask of the elements at which correct kernels may differ, or None."""
    got, own = pair.got, pair.own
    if not got.dtype.is_floating_point:
        return None
    found = _invalid(subject, case, pair)
    if got.numel() < max((t.make().numel() for t in case.tensors()), default=0):
        found |= own.isinf() & got.isnan()  # infinity less infinity in a sum
    odd = ~got.isfinite() | ~own.isfinite()
    if bool(odd.any()) and _overflows(subject, case, pair):
        found |= odd
    return found


def _invalid(subject: Subject, case: Case, pair: ComparedPair) -> torch.Tensor:
    """Return where the reference gives NaN because of numbers that are infinite or too large to be squared: others need not."""

    def calmed(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(tensor.abs() > torch.finfo(tensor.dtype).max ** 0.5, tensor.sign() * _ORDINARY, tensor)

    try:
        calm = pair.of(_of_changed(subject, case, calmed))
    except CallRefused:
        return torch.zeros_like(pair.got, dtype=torch.bool)
    found = pair.own.isnan() & ~calm.isnan()
    widest = pair.got.dtype == torch.float64  # for narrower dtypes the correct result is known
    return found | (pair.got.isnan() & (calm != pair.own)) if widest else found


def _overflows(subject: Subject, case: Case, pair: ComparedPair) -> bool:
    """Return whether terms of one sign would overflow: then an overflow of these terms depends on their order."""
    try:
        largest = pair.of(_of_changed(subject, case, lambda t: widened(torch.where(t.isfinite(), t, 0.0).abs())))
    except CallRefused:
        return False
    limit = torch.finfo(pair.own.dtype).max / _NEAR
    return bool((largest.double().abs() > limit).any()) or bool((~largest.isfinite()).any())


def zero_signs(subject: Subject, case: Case) -> None:
    """Check the signs of zeros if an operator does nothing but change signs.

    Raises:
        Violation: one has another sign.
    """
    floats = [t for t in case.tensors() if t.fill in _SIGNS and t.dtype.is_floating_point]
    scalars = [value for value in (*case.args, *dict(case.kwargs).values()) if isinstance(value, (int, float))]
    if not floats or scalars or len(case.tensors()) > 1:  # 0 * b may be added to a
        return
    got, own = subject.run(case), subject.expect(case)
    inputs = [t for t in case.make(subject.device).tensors() if t.dtype.is_floating_point]
    for ours, theirs in zip(got.results, own.results, strict=False):
        if _only_signs(ours, theirs, inputs) and bool((_negative_zero(ours) != _negative_zero(theirs)).any()):
            raise Violation(
                "a zero of the result has another sign than the reference's, and everything else is bitwise equal"
            )


def _only_signs(ours: Any, theirs: Any, inputs: list[torch.Tensor]) -> bool:
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor) or not theirs.is_floating_point():
        return False
    if not bool((theirs != 0).sum() >= _MIN_NONZERO):
        return False
    only_signs = any(same_values(theirs.abs(), each.abs()) for each in inputs)
    return only_signs and same_values(ours.abs(), theirs.abs())


def _negative_zero(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor == 0) & tensor.signbit()
