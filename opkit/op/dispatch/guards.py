"""The guards of recent calls, and the functions that run the calls for which they hold (``fastcall``)."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkit.op import torch_private as private
from opkit.op.dispatch.planning import CallPlan

_MAX_ENTRIES = 4


class GuardedFunction:
    """A guard, and the function that runs calls for which it holds.

    ``recorded`` says whether this thread must record gradients (True) or must not (False); None: either. ``kind`` is equal for
    calls that differ in sizes and strides alone. ``plan`` is None if the guard holds for any sizes.
    """

    __slots__ = ("check", "flags", "fn", "kind", "plan", "recorded")

    def __init__(
        self,
        check: Callable[..., bool],
        flags: tuple[Any, ...],
        fn: Callable[..., Any],
        recorded: bool | None,
        kind: tuple[Any, ...],
        plan: CallPlan | None,
    ) -> None:
        self.check = check
        self.flags = flags
        self.fn = fn
        self.recorded = recorded
        self.kind = kind
        self.plan = plan


class Guards:
    """The guards of an operator's recent calls, the latest first."""

    def __init__(self, strides: bool) -> None:
        self.entries: list[GuardedFunction] = []
        self._strides = strides
        self._latest: CallPlan | None = None

    def install(
        self,
        training: bool,
        plan: CallPlan,
        any_size: Callable[..., Any],
        tensors: Sequence[Any],
        flags: tuple[Any, ...],
    ) -> None:
        """Guard calls like this one, which come often.

        Once calls that differ in sizes alone take several places and none is left, one guard for any sizes takes theirs, with
        a function that ``any_size`` makes. A guard for these sizes joins it if no other ones have come often since the last time.
        """
        again, self._latest = plan is self._latest, plan
        recorded = training if any(tensor.requires_grad for tensor in tensors) else None
        kind = kind_of(tensors, flags, recorded)
        alike = [old for old in self.entries if old.kind == kind and old.plan is not plan]
        covered = any(old.plan is None for old in alike)
        if alike and not covered and len(self.entries) == _MAX_ENTRIES:
            self.add(any_size({}, training), None, recorded, kind, tensors, flags)
        elif again or not covered:
            fn = plan.train if training else plan.run
            assert fn is not None
            self.add(fn, plan, recorded, kind, tensors, flags)

    def holding(self, tensors: Sequence[Any], flags: tuple[Any, ...]) -> GuardedFunction | None:
        """Return the first guard that holds now for these tensors."""
        return next((entry for entry in self.entries if entry.flags == flags and entry.check(*tensors)), None)

    def add(
        self,
        fn: Callable[..., Any],
        plan: CallPlan | None,
        recorded: bool | None,
        kind: tuple[Any, ...],
        tensors: Sequence[Any],
        flags: tuple[Any, ...],
    ) -> None:
        """Add a guard for these tensors; for any sizes of them if there is no plan."""
        check = guard(tensors, self._strides and plan is not None, plan is not None)
        if check(*tensors):
            covered = plan is not None and any(old.kind == kind and old.plan is None for old in self.entries)
            others = [
                old
                for old in self.entries
                if old.kind != kind or (plan is not None and old.plan is not plan and (not covered or old.plan is None))
            ]
            self.entries[:] = [GuardedFunction(check, flags, fn, recorded, kind, plan), *others[: _MAX_ENTRIES - 1]]


def kind_of(tensors: Sequence[Any], flags: tuple[Any, ...], recorded: bool | None) -> tuple[Any, ...]:
    """Return what is equal for calls that differ in sizes and strides alone."""
    same = [
        (type(t), t.dtype, t.device, t.ndim, t.requires_grad, place)
        for t, place in zip(tensors, _places(tensors), strict=True)
    ]
    return flags, recorded, torch.is_inference_mode_enabled(), private.any_autocast(), *same


def _places(tensors: Sequence[Any]) -> list[int]:
    """Return the index at which each tensor is passed first."""
    first = {id(tensor): place for place, tensor in reversed([*enumerate(tensors)])}
    return [first[id(tensor)] for tensor in tensors]


def guard(tensors: Sequence[Any], strides: bool, sizes: bool = True) -> Callable[..., bool]:
    """Return :func:`torch_private.tensor_guard` of these tensors, some of which may be the same."""
    places = _places(tensors)
    check = private.tensor_guard([tensors[i] for i in sorted({*places})], strides, sizes)
    same = " and ".join(f"t{i} is t{place}" for i, place in enumerate(places) if i != place)
    if not same:
        return check
    declared, distinct = [", ".join(f"t{i}" for i in numbers) for numbers in (range(len(places)), sorted({*places}))]
    return eval(f"lambda {declared}: {same} and check({distinct})", {"check": check})
