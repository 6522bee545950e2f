"""The group ``schema``: equivalent calls agree: by position or by name, with or without defaults, of several overloads."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable
from typing import Any

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.compare.calls import is_random
from opkit.contract.compare.outcome import CallOutcome, bitwise_difference
from opkit.contract.prop import Property, Violation
from opkit.contract.subject import CallRefused, Subject


def _names(subject: Subject) -> list[tuple[str, Any, bool]]:
    """Return each parameter's name, default (or ``inspect.Parameter.empty``), and whether it can be passed by position."""
    empty = inspect.Parameter.empty
    if subject.schema is not None:
        return [
            (a.name, a.default_value if a.has_default_value() else empty, not a.kwarg_only)
            for a in subject.schema.arguments
        ]
    try:
        found = inspect.signature(subject.function).parameters.values()
    except (TypeError, ValueError):
        return []
    if any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        return []
    return [(p.name, p.default, p.kind is p.POSITIONAL_OR_KEYWORD) for p in found]


def _has_names(subject: Subject) -> str:
    return "" if _names(subject) else "nothing says what its arguments are called"


def _defaults(subject: Subject, case: Case) -> None:
    parameters = _names(subject)
    empty = inspect.Parameter.empty
    positional = [each for each in parameters if each[2]]
    if len(case.args) > len(positional):
        return
    by_name = {name: value for (name, _, _), value in zip(positional, case.args, strict=False)}
    named = Case((), (*by_name.items(), *case.kwargs))
    _agree(subject, case, named, "passed by position, and by keyword")
    optional = {name: default for name, default, _ in parameters if default is not empty}
    if optional:
        required = tuple((name, value) for name, value in named.kwargs if name not in optional)
        _agree(
            subject,
            Case((), required),
            Case((), (*required, *optional.items())),
            "without optional arguments, and with defaults",
        )


def _agree(subject: Subject, one: Case, other: Case, how: str) -> None:
    first = _seeded(subject, one)
    found = bitwise_difference(one, first, _seeded(subject, other))
    if found and not bitwise_difference(one, first, _seeded(subject, one)):
        raise Violation(f"the same call {how}, gives other results: {found}")


def _seeded(subject: Subject, case: Case) -> CallOutcome:
    torch.manual_seed(0)
    return subject.run(case).detached()


def _overloads(subject: Subject, case: Case) -> None:
    ours = _seeded(subject, case)
    if is_random(subject, case) or bitwise_difference(case, ours, _seeded(subject, case)):
        return  # overloads may draw in different orders
    for name in subject.target.overloads():
        overload = getattr(subject.target, name)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in overload._schema.arguments)
        if overload is subject.overload or writes:
            continue
        try:
            theirs = subject.call(case.make(subject.device), overload)
        except CallRefused:
            continue
        if not _close(ours, theirs):
            raise Violation(f"the overload {name!r} accepts the same arguments, and gives other results")


def _close(ours: CallOutcome, theirs: CallOutcome) -> bool:
    """Return whether results agree, with a tolerance for kernels that round differently."""
    pairs = zip(ours.tensors(), theirs.tensors(), strict=False)
    return all(a.shape == b.shape and torch.allclose(*_wide(a, b), 1e-2, 1e-2, equal_nan=True) for a, b in pairs)


def _wide(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    return a.detach().to(dtype), b.detach().to(dtype)


def _floats(subject: Subject) -> dict[Any, str]:
    """Return the parameters that take floats, by position and by name."""
    if subject.schema is not None:
        declared = [(a.name, str(a.type) in ("float", "Optional[float]")) for a in subject.schema.arguments]
    else:
        try:
            hints = typing.get_type_hints(subject.function)
        except (TypeError, NameError):
            return {}
        declared = [(name, hints.get(name) in (float, float | None)) for name, _, _ in _names(subject)]
    found = {number: name for number, (name, takes) in enumerate(declared) if takes}
    return {**found, **{name: name for name in found.values()}}


def _takes_floats(subject: Subject) -> str:
    return "" if _floats(subject) else "nothing says that an argument is a float"


def _kinds(subject: Subject, case: Case) -> None:
    floats = _floats(subject)
    whole = _changed(case, lambda at, value: _whole(value) if at in floats else value)
    for at, value in (*enumerate(whole.args), *whole.kwargs):
        if at in floats and type(value) is float and math.isfinite(value):
            variant = _changed(whole, lambda each, v, at=at: int(v) if each == at else v)
            _agree(subject, whole, variant, f"with {value!r} for {floats[at]}, and with {int(value)!r}")


def _changed(case: Case, change: Callable[[Any, Any], Any]) -> Case:
    args = tuple(change(number, value) for number, value in enumerate(case.args))
    return Case(args, tuple((name, change(name, value)) for name, value in case.kwargs))


def _whole(value: Any) -> Any:
    """Round a float to a nonzero whole number."""
    fractional = type(value) is float and math.isfinite(value)
    return (float(round(value)) or math.copysign(1.0, value)) if fractional else value


def _has_overloads(subject: Subject) -> str:
    packet = isinstance(subject.target, torch._ops.OpOverloadPacket) and len(subject.target.overloads()) > 1
    return "" if packet else "it has no other overloads"


_property = functools.partial(Property, share=0.4)

PROPERTIES = (
    _property(
        "schema.defaults",
        rule="Leaving an argument out is passing its default, and keywords are as good as positions.",
        defect="a default of the kernel's that is not the schema's, a wrapper that swaps arguments",
        check=_defaults,
        skip=_has_names,
    ),
    _property(
        "schema.kinds",
        rule="Where a float is declared, 2 is as good as 2.0.",
        defect="a division or a power of integers, a check for the type float, a kernel that is handed an integer's bits",
        check=_kinds,
        share=0.3,
        skip=_takes_floats,
    ),
    _property(
        "schema.overloads",
        rule="Overloads that accept the same arguments agree.",
        defect="a kernel that was changed for one overload alone",
        check=_overloads,
        skip=_has_overloads,
    ),
)
