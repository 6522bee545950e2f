"""This module records the outcome of one call, results and arguments, and compares outcomes bit by bit."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.contract.calls.cases import Call, Case, places

FRESH = (0x00, 0x7F, 0xC1)
"""Bytes for fresh memory: zeros, numbers near the largest, small negative ones; as bools false, true and true."""

AROUND = (0x00, 0xFF, 0x7F)
"""Bytes for memory next to tensors: zeros, NaN, numbers near the largest."""


@dataclasses.dataclass(frozen=True)
class CallOutcome:
    """One call's arguments after the call, and its results: the leaves of the returned value, in order."""

    call: Call
    results: tuple[Any, ...]
    returned: Any

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the results."""
        return [leaf for leaf in self.results if isinstance(leaf, torch.Tensor)]

    def differentiable(self) -> tuple[torch.Tensor, ...]:
        """Return the floating-point and complex tensors among the results."""
        return tuple(leaf for leaf in self.tensors() if leaf.is_floating_point() or leaf.is_complex())

    def detached(self) -> CallOutcome:
        """Return the outcome with copies of all tensors, so that later calls cannot change it."""
        copy = self.call.map(lambda tensor: tensor.detach().clone())
        results = tuple(leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.results)
        return CallOutcome(copy, results, None)


def leaves(value: Any) -> tuple[Any, ...]:
    """Return the leaves of lists, tuples and dicts."""
    return tuple(pytree.tree_leaves(value))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it is in memory, without torch's lazy minus."""
    found = tensor.detach()
    return torch._neg_view(found) if found.is_neg() else found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes, in logical order, so that NaN and signed zeros can be compared."""
    plain = tensor.detach().resolve_neg().resolve_conj().cpu().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two results are bitwise equal, with equal dtypes and shapes."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b or (a != a and b != b))
    return a.dtype == b.dtype and a.shape == b.shape and bits(a).numpy().tobytes() == bits(b).numpy().tobytes()


def same_values(a: Any, b: Any) -> bool:
    """Return whether two results are equal, if any NaN equals any other."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return same_bits(a, b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return same_bits(torch.nan_to_num(a, 0.25, None, None), torch.nan_to_num(b, 0.25, None, None)) and torch.equal(
        a.isnan(), b.isnan()
    )


def first_difference(a: Any, b: Any) -> str:
    """Describe the first difference of two results: ``[0, 3]: 1.0 and 2.0 (5 of 12 elements differ)``."""
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if not tensors or a.shape != b.shape or a.dtype != b.dtype:
        return f"{described(a)} and {described(b)}"
    size = max(a.element_size(), 1)
    unequal = (bits(a).view(-1, size) != bits(b).view(-1, size)).any(1)
    if not unequal.any():
        return "no difference"
    at, index = first_index(unequal, a.shape)
    one, other = (each.detach().reshape(-1)[at].item() for each in (a, b))
    return f"{index}: {one!r} and {other!r} ({int(unequal.sum())} of {a.numel()} elements differ)"


def first_index(mask: torch.Tensor, shape: torch.Size) -> tuple[int, list[int]]:
    """Return the first True of a mask of a tensor's elements: its place in order, and its index in ``shape``."""
    at = int(mask.reshape(-1).nonzero()[0])
    return at, [int(i) for i in torch.unravel_index(torch.tensor(at), shape)] if len(shape) else []


def described(value: Any) -> str:
    """Describe a result: ``float32[2, 3]`` for a tensor, otherwise its representation."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def bitwise_difference(case: Case, one: CallOutcome, other: CallOutcome) -> str:
    """Describe where two outcomes of a case first differ bitwise, or return ""."""
    if len(one.results) != len(other.results):
        return f"there are {len(one.results)} and {len(other.results)} results"
    pairs = [(f"result {i}", a, b) for i, (a, b) in enumerate(zip(one.results, other.results, strict=True))]
    tensors = zip(places(case), one.call.tensors(), other.call.tensors(), strict=True)
    pairs += [(f"{place} afterwards", a, b) for place, a, b in tensors]
    return next((f"{place}: {first_difference(a, b)}" for place, a, b in pairs if not same_bits(a, b)), "")


def dependence(case: Case, bytes_: tuple[int, ...], run: Callable[[int], CallOutcome]) -> str:
    """Describe how results depend on which of ``bytes_`` memory contains, or return ""; also "" if equal calls differ."""
    first = run(bytes_[0])
    found = next(filter(None, (bitwise_difference(case, first, run(byte)) for byte in bytes_[1:])), "")
    varies = found and bitwise_difference(case, first, run(bytes_[0]))
    return "" if varies else found
