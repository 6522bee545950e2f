"""Streams and devices other than the current one: asked on CUDA alone."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.compare.rounding import beyond_rounding, observe
from opkit.contract.observed.outcome import CallOutcome
from opkit.contract.observed.randomness import is_random
from opkit.contract.prop import Violation
from opkit.contract.subject import Subject

_BUSY = 20_000_000  # cycles, about 10 ms, for which a stream is kept from its work


def needs_cuda(subject: Subject) -> str:
    """Why streams do not apply, or nothing."""
    return "" if torch.device(subject.device).type == "cuda" else f"the device is {subject.device}: it has no streams"


def needs_second_device(subject: Subject) -> str:
    """Why a second device does not apply, or nothing."""
    if torch.device(subject.device).type != "cuda":
        return f"the device is {subject.device}"
    return "" if torch.cuda.device_count() > 1 else "there is one GPU"


def check_stream(subject: Subject, case: Case) -> None:
    """Work goes to the current stream, behind what is already there.

    The arguments become right only after a while, on a side stream. What a kernel on any other stream reads is too old.

    Raises:
        Violation: results are of the old numbers.
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
        ours = observe(subject, staged)
        kept = ours.detached()
    torch.cuda.synchronize()
    if found := beyond_rounding(subject, case, kept, expected):
        raise Violation(f"on a stream other than the default {found}. Launch on torch.cuda.current_stream().")


def _writable(tensor: torch.Tensor) -> bool:
    return 0 not in tensor.stride() or tensor.numel() < 2


def check_second_device(subject: Subject, case: Case) -> None:
    """Tensors on a device that is not the current one are worked on where they are.

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
    _on_one(ours)
    if found := beyond_rounding(subject, case, ours.detached(), expected):
        raise Violation(
            f"for tensors on cuda:1, while cuda:0 is current, {found}. Launch under torch.cuda.device_of(x)."
        )


def _on_one(ours: CallOutcome) -> None:
    for number, tensor in enumerate(ours.tensors()):
        if tensor.device.type == "cuda" and tensor.device.index != 1:
            raise Violation(f"for tensors on cuda:1, result {number} is on {tensor.device}.")
