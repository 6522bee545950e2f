"""The group ``memory`` on a GPU: memory next to arguments, fresh memory, and leaks, in this process, which cannot be forked.

A GPU has no pages to guard, and most of what a kernel reads past an allocation belongs to torch too: only results reveal it.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.compare.outcome import FRESH, CallOutcome, dependence
from opkit.contract.prop import Violation
from opkit.contract.subject import CallRefused, Subject

_MARGIN = 256  # elements before and after each argument
_MARGIN_VALUES = (1, 3, 2)  # as indices, these do not end the process if a tensor has four elements
_CALLS = 50
_MIN_LEAK = 512  # bytes: the size of torch's smallest block
_SMALL = 2**20  # bytes of the largest block that torch 2.13 cuts from a segment of 2 MiB, as it does all small ones
_FRESH = (_SMALL,) * 4 + (19 * 2**20,) * 4  # segments of either kind, for calls that need more than the cache has


def _run_with_margin(subject: Subject, case: Case, value: int) -> CallOutcome:
    torch.manual_seed(0)
    return subject.call(case.make(subject.device, margin=_MARGIN, outside=value)).detached()


def red_zone(subject: Subject, case: Case) -> None:
    """Check that results do not depend on memory next to the arguments; schema.mutation checks that it is not written.

    Raises:
        Violation: they are not.
    """
    found = dependence(case, _MARGIN_VALUES, functools.partial(_run_with_margin, subject, case))
    if found:
        raise Violation(f"reads memory next to its arguments: with other numbers there, {found}")


def _poisoned(run: Callable[[Case], CallOutcome], subject: Subject, case: Case, byte: int) -> CallOutcome:
    torch.manual_seed(0)
    _poison_fresh_memory(byte, torch.device(subject.device))
    return run(case).detached()


def _poison_fresh_memory(byte: int, device: torch.device) -> None:
    """Write ``byte`` to all memory that torch's caching allocator has and that is not in use, and to some more."""
    torch.cuda.synchronize(device)
    unused = _unused_blocks(device)
    sizes = unused if sum(unused) > sum(_FRESH) else [*unused, *_FRESH]
    blocks = [torch.full((size,), byte, dtype=torch.uint8, device=device) for size in sizes]
    torch.cuda.synchronize(device)
    del blocks


def _unused_blocks(device: torch.device) -> list[int]:
    """Return the sizes of the blocks that torch caches."""
    number = torch.cuda.current_device() if device.index is None else device.index
    found: list[int] = []
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"] if segment["device"] == number else ():
            if block["state"] == "inactive":
                parts, rest = divmod(block["size"], _SMALL if segment["segment_type"] == "small" else block["size"])
                found += [block["size"]] if not rest and parts == 1 else [_SMALL] * parts + [rest] * bool(rest)
    return found


def uninitialized(subject: Subject, case: Case) -> None:
    """Check that results do not depend on the contents of fresh memory.

    Raises:
        Violation: they do, and the reference's do not.
    """
    found = dependence(case, FRESH, functools.partial(_poisoned, subject.run, subject, case))
    if found and not _reference_depends(subject, case):
        raise Violation(f"results depend on what fresh memory held: {found}. Every element must be written.")


def _reference_depends(subject: Subject, case: Case) -> bool:
    if subject.reference is None:
        return False
    try:
        run = functools.partial(_poisoned, subject.expect, subject, case)
        return bool(dependence(case, FRESH, run))
    except CallRefused:
        return False


def leak(subject: Subject, case: Case) -> None:
    """Check that torch's memory on the GPU does not grow with each call.

    Raises:
        Violation: it does.
    """
    device = torch.device(subject.device)
    _repeat(subject, case, 3)
    if min(_growth(subject, case, device) for _ in range(2)) >= _CALLS * _MIN_LEAK:
        steady = _growth(subject, case, device)
        if steady >= _CALLS * _MIN_LEAK:
            raise Violation(
                f"{steady // _CALLS} bytes more are allocated on the GPU after each call, for {3 * _CALLS} calls"
            )


def _growth(subject: Subject, case: Case, device: torch.device) -> int:
    gc.collect()
    before = _used(device)
    _repeat(subject, case, _CALLS)
    gc.collect()
    return _used(device) - before


def _used(device: torch.device) -> int:
    """Return the bytes of torch's tensors on the device."""
    torch.cuda.synchronize(device)
    return torch.cuda.memory_stats(device)["allocated_bytes.all.current"]


def _repeat(subject: Subject, case: Case, calls: int) -> None:
    for _ in range(calls):
        subject.run(case)
