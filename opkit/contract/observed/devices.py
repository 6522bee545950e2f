"""This module checks CUDA streams and devices other than the current one."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.compare.rounding import beyond_rounding, observe
from opkit.contract.observed.randomness import is_random
from opkit.contract.prop import Violation
from opkit.contract.subject import Subject

_BUSY = 20_000_000  # cycles, about 10 ms, for which a stream is blocked


def needs_cuda(subject: Subject) -> str:
    """Return why streams do not apply, or ""."""
    return "" if torch.device(subject.device).type == "cuda" else f"the device is {subject.device}: it has no streams"


def needs_second_device(subject: Subject) -> str:
    """Return why a second device does not apply, or ""."""
    if torch.device(subject.device).type != "cuda":
        return f"the device is {subject.device}"
    return "" if torch.cuda.device_count() > 1 else "there is one GPU"


def check_stream(subject: Subject, case: Case) -> None:
    """Check that work is launched on the current stream, after earlier work on it.

    The arguments are filled only after a while, on a side stream. A kernel on any other stream reads old numbers.

    Raises:
        Violation: results are those of the old numbers.
    """
    if is_random(subject, case):
        return
    expected = observe(subject, case).detached()
    right = case.make(subject.device)
    staged = case.make(subject.device)
    pairs = [(late, now) for late, now in zip(staged.tensors(), right.tensors(), strict=True) if _writable(late)]
    for late, _ in pairs:
        late.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_BUSY)  # torch 2.13: there is no public way to keep a stream busy
        for late, now in pairs:
            late.copy_(now)
        ours = observe(subject, staged).detached()
    torch.cuda.synchronize()
    if found := beyond_rounding(subject, case, ours, expected):
        raise Violation(f"on a stream other than the default {found}. Launch on torch.cuda.current_stream().")


def _writable(tensor: torch.Tensor) -> bool:
    return 0 not in tensor.stride() or tensor.numel() < 2


def check_second_device(subject: Subject, case: Case) -> None:
    """Check that the operator works on tensors of a device that is not the current one.

    Raises:
        Violation: results are wrong, on another device, or the current device has changed.
    """
    if is_random(subject, case):
        return
    expected = observe(subject, case).detached()
    with torch.cuda.device(0):
        ours = observe(subject, case.make("cuda:1"))
        current = torch.cuda.current_device()
    if current != 0:
        raise Violation(f"the call changes the current device from 0 to {current}. Use torch.cuda.device as a context.")
    for number, tensor in enumerate(ours.tensors()):
        if tensor.device.type == "cuda" and tensor.device.index != 1:
            raise Violation(f"for tensors on cuda:1, result {number} is on {tensor.device}.")
    if found := beyond_rounding(subject, case, ours.detached(), expected):
        raise Violation(
            f"for tensors on cuda:1, while cuda:0 is current, {found}. Launch under torch.cuda.device_of(x)."
        )
