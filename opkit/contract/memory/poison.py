"""This module compares the same call bit by bit under several contents of memory that must not matter."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable

import torch

from opkit.contract.calls.arguments import places
from opkit.contract.calls.cases import Case
from opkit.contract.observed.outcome import CallOutcome, described, first_difference, same_bits

FRESH = (0x00, 0x7F, 0xC1)
"""Bytes for fresh memory: zeros, numbers near the largest, small negative ones; as bools false, true and true."""

AROUND = (0x00, 0xFF, 0x7F)
"""Bytes for memory next to tensors: zeros, NaN, numbers near the largest."""


def difference(case: Case, one: CallOutcome, other: CallOutcome) -> str:
    """Describe where two outcomes of a case first differ bitwise, or return ""."""
    if len(one.results) != len(other.results):
        return f"there are {len(one.results)} and {len(other.results)} results"
    pairs = [(f"result {i}", a, b) for i, (a, b) in enumerate(zip(one.results, other.results, strict=True))]
    tensors = zip(places(case), one.call.tensors(), other.call.tensors(), strict=True)
    pairs += [(f"{place} afterwards", a, b) for place, a, b in tensors]
    return next((f"{place}: {_apart(a, b)}" for place, a, b in pairs if not same_bits(a, b)), "")


def _apart(a: object, b: object) -> str:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return first_difference(a, b)
    return f"{described(a)} and {described(b)}"


def dependence(case: Case, bytes_: tuple[int, ...], run: Callable[[int], CallOutcome]) -> str:
    """Describe how results depend on which of ``bytes_`` memory contains, or return ""; also "" if equal calls differ."""
    first = run(bytes_[0])
    found = next(filter(None, (difference(case, first, run(byte)) for byte in bytes_[1:])), "")
    varies = found and difference(case, first, run(bytes_[0]))
    return "" if varies else found
