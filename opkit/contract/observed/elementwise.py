"""This module checks that kernels that are declared elementwise give the same on parts of the tensors."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.prop import CallRefused, Violation
from opkit.contract.subject import Subject
from opkit.op.native.function import NativeFunction


def declares_nothing(subject: Subject) -> str:
    """Return why no parts can be compared, or ""."""
    kernels = [] if subject.operator is None else subject.operator._operator.kernels.kernels
    native = [each.function.native for each in kernels if isinstance(each.function, NativeFunction)]
    return "" if any(each.elementwise for each in native) else "no kernel of it is declared elementwise"


def check_parts(subject: Subject, case: Case) -> None:
    """Check that each part of the arguments gives that part of the result.

    Raises:
        CallRefused: the operator does not take the call, or no part of it.
        Violation: a part differs.
    """
    compared, refused = False, None
    call = case.make(subject.device)
    whole = subject.call(call).results[0]
    for where, part in _parts([tensor for tensor in call.tensors() if tensor.shape == whole.shape]):
        try:
            found = subject.call(call.map(functools.partial(_part, shape=whole.shape, part=part))).results[0]
        except CallRefused as error:  # an annotation requires the whole
            refused = error
            continue
        _compare(found, whole[part], where)
        compared = True
    if refused is not None and not compared:
        raise refused


def _part(tensor: torch.Tensor, shape: torch.Size, part: tuple[slice, ...]) -> torch.Tensor:
    return tensor[part] if tensor.shape == shape else tensor


def _parts(tensors: list[torch.Tensor]) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Yield the parts on both sides of a cut of each dimension: after its first element, and in the middle."""
    if not tensors:
        return
    for dimension, size in enumerate(tensors[0].shape):
        for at in {1, size // 2} - {0, size}:
            for begin, end in ((0, at), (at, size)):
                part = (*[slice(None)] * dimension, slice(begin, end))
                yield f"elements {begin} to {end} of dimension {dimension}", part


def _compare(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        raise Violation(
            f"a kernel is declared elementwise, but of {where} alone the result differs from that of the whole: "
            f"{str(error).splitlines()[0]} What an element becomes may depend on elements at its place only."
        ) from error
