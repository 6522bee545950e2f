"""The group ``schema``: an operator does what its schema, or its reference, declares."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from opkit.contract.calls.cases import Call, Case, distinct, owners, places
from opkit.contract.calls.specs import ANYTHING
from opkit.contract.compare.calls import TensorSnapshot, may_write, snapshots
from opkit.contract.compare.outcome import CallOutcome, described, leaves
from opkit.contract.prop import Property, Remark, Violation, drawn
from opkit.contract.subject import CallRefused, Subject
from opkit.errors import AliasError, MutationError, MutationUnknownError, OutputError

_MARGIN = 8  # elements of memory on either side of a view
_ENOUGH = 30  # calls in which a declared write must happen once
_TORCH_ALIAS_ERROR = (
    "may not alias any inputs to this custom operator"  # torch 2.11 to 2.13, for torch.library.custom_op
)


def _call(subject: Subject, call: Call, errors: tuple[type[Exception], ...]) -> CallOutcome:
    """Call the operator; an error of opkit's or torch's own checks at the call is a violation."""
    try:
        return subject.call(call)
    except CallRefused as refusal:
        if isinstance(refusal.error, errors) and not isinstance(refusal.error, MutationUnknownError):
            raise Violation(str(refusal.error)) from refusal
        if AliasError in errors and _TORCH_ALIAS_ERROR in str(refusal.error):
            raise Violation(
                f"a result shares memory with an argument or another result, says torch: {refusal}"
            ) from refusal
        raise


def _variants(case: Case) -> list[tuple[str, Case, int]]:
    """Return the case, the case in the middle of larger memory, and the case with gradients."""
    grad = case.map(lambda _, each: dataclasses.replace(each, requires_grad=each.differentiable))
    return [("", case, 0), ("", case, _MARGIN), (" (where it requires a gradient)", grad, 0)]


def _over_variants(check: Callable[[Subject, Case, int, str], None]) -> Callable[[Subject, Case], None]:
    def over(subject: Subject, case: Case) -> None:
        check(subject, case, 0, "")
        for note, variant, margin in _variants(case)[1:]:
            try:
                check(subject, variant, margin, note)
            except CallRefused:
                continue

    return over


def _mutation(subject: Subject, case: Case, margin: int, note: str) -> None:
    call = case.make(subject.device, margin=margin)
    lists = [(value, [*value]) for value in (*call.args, *call.kwargs.values()) if isinstance(value, list)]
    before = snapshots(call)
    _call(subject, call, (MutationError,))
    allowed = None if subject.schema is None and subject.reference is None else may_write(subject, case, margin)
    for each in before:
        _unchanged(each, places(case)[each.number] + note, allowed)
    if any(len(now) != len(was) or any(a is not b for a, b in zip(now, was, strict=True)) for now, was in lists):
        raise (
            Remark("a list among the arguments is changed")
            if subject.reference is None
            else Violation("a list among the arguments was changed: its items are no longer what they were")
        )


def _unchanged(each: TensorSnapshot, place: str, allowed: set[int] | None) -> None:
    written = allowed is not None and each.number in allowed
    outside = each.bytes_changed(False)
    resized = (
        written and each.tensor.shape != each.facts["shape"]
    )  # a resized tensor includes memory outside of the view
    if outside and not resized:
        raise Violation(f"{place}: {outside} bytes of its storage outside of the view were changed")
    changes = [] if written else each.metadata_changes()
    count = 0 if written else each.bytes_changed(True)
    if count:
        changes.append(f"{count} bytes of its elements were changed")
    if changes and allowed is None:
        raise Remark(f"{place} is written to: {changes[0]}; nothing says whether it may be. Give a reference.")
    if changes:
        raise Violation(f"{place} is not declared as written to, and {changes[0]}")
    if not written and each.written():
        message = f"{place} is written to, and has the same numbers afterwards"
        raise Remark(message) if allowed is None else Violation(f"{message}; it is not declared as written to")


def _declares_writes(subject: Subject) -> str:
    return "" if subject.writes else "no schema says that it writes to an argument"


def _declared(subject: Subject, case: Case) -> None:
    call = case.make(subject.device)
    before = snapshots(call)
    _call(subject, call, (MutationError,))
    expected = _reference_writes(subject, case)
    silent: dict[str, int] = subject.notes.setdefault("schema.mutation_declared", {})
    for each in before:
        name = owners(case, subject.schema)[each.number]
        if name not in subject.writes or not each.tensor.numel():
            continue
        wrote = bool(each.bytes_changed(True) or each.metadata_changes())
        if not wrote and each.number in expected:
            raise Violation(f"{name} is declared as written to, the reference writes to it, and it did not change")
        silent[name] = -1 if wrote or silent.get(name) == -1 else silent.get(name, 0) + 1
        if silent[name] >= _ENOUGH:
            _never_written(subject, name)


def _reference_writes(subject: Subject, case: Case) -> set[int]:
    if subject.reference is None:
        return set()
    call = case.make(subject.device)
    before = snapshots(call)
    try:
        subject.call(call, subject.reference)
    except CallRefused:
        return set()
    return {each.number for each in before if each.bytes_changed(True)}


def _never_written(subject: Subject, name: str) -> None:
    fixed = any(
        value is None or isinstance(value, bool) for value in (*subject.spec.args, *dict(subject.spec.kwargs).values())
    )
    message = f"{name} is declared as written to, and did not change in {_ENOUGH} calls"
    if fixed:
        raise Remark(f"{message}, in which a flag was never varied")
    raise Violation(message)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    first = tensor.untyped_storage().data_ptr()
    return first, first + tensor.untyped_storage().nbytes()


def _shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have one storage, or storages over the same memory."""
    if a.untyped_storage()._cdata == b.untyped_storage()._cdata:
        return True
    (first, end), (begin, last) = _span(a), _span(b)
    return first != 0 and first < last and begin < end and a.device == b.device


def _aliases(outcome: CallOutcome, case: Case) -> dict[tuple[int, int, bool], str]:
    """Return the results that share memory with an argument, or with an earlier result."""
    tensors = ((i, each) for i, each in enumerate(outcome.results) if isinstance(each, torch.Tensor))
    results = [(i, each) for i, each in tensors if each.layout == torch.strided]
    found: dict[tuple[int, int, bool], str] = {}
    for i, result in results:
        for number, argument in distinct(outcome.call):
            if _shared(result, argument):
                what = "is" if result is argument else "shares memory with"
                found[i, number, True] = f"result {i} {what} {places(case)[number]}"
        for j, earlier in results:
            if j < i and _shared(result, earlier):
                found[i, j, False] = f"result {i} shares memory with result {j}"
    return found


def _alias(subject: Subject, case: Case, margin: int, note: str) -> None:
    outcome = _call(subject, case.make(subject.device, margin=margin), (AliasError,))
    found = _aliases(outcome, case)
    if subject.schema is not None:
        found = {key: text for key, text in found.items() if not _promised(subject, case, outcome, key)}
    elif subject.reference is not None and found:
        expected = subject.expect(case, margin=margin)
        found = {key: text for key, text in found.items() if key not in _aliases(expected, case)}
    alias = next(iter(found.values()), "")
    if alias and subject.schema is None and subject.reference is None:
        raise Remark(f"{alias}{note}; nothing says whether it may")
    if alias and _decomposes(subject):
        raise Remark(
            f"{alias}{note}; its schema does not say so, and nobody relies on it: the operator is a composite one"
        )
    if alias:
        raise Violation(f"{alias}{note}, and nothing says that it may: return a copy, as with .clone()")


def _decomposes(subject: Subject) -> bool:
    """Return whether transforms see the operators that it calls, as they do for aten::dropout."""
    if subject.overload is None:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(subject.overload.name(), "CompositeImplicitAutograd")


def _promised(subject: Subject, case: Case, outcome: CallOutcome, key: tuple[int, int, bool]) -> bool:
    """Return whether the schema declares that a pair shares memory."""
    i, other, is_argument = key
    one = _sets(_declared_return(subject, outcome, i))
    if not is_argument:
        return bool(one) and bool(one & _sets(_declared_return(subject, outcome, other)))
    name = owners(case, subject.schema)[other]
    argument = next(each for each in subject.schema.arguments if each.name == name)
    return bool(one) and ("*" in one or bool(one & _sets(argument)))


def _declared_return(subject: Subject, outcome: CallOutcome, leaf: int) -> Any:
    """Return the schema's return value to which a leaf of the results belongs."""
    returns = subject.schema.returns
    if len(returns) == 1:
        return returns[0]
    counts = [len(leaves(each)) for each in outcome.returned] if isinstance(outcome.returned, (tuple, list)) else []
    owner = [number for number, count in enumerate(counts) for _ in range(count)]
    return returns[owner[leaf]] if leaf < len(owner) and owner[leaf] < len(returns) else None


def _sets(declared: Any) -> set[str]:
    info = None if declared is None else declared.alias_info
    return set() if info is None else {*info.before_set, *info.after_set}


_KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "int": (int, torch.SymInt),
    "float": (float, torch.SymFloat),
    "bool": (bool, torch.SymBool),
    "number": (int, float, complex),
    "str": (str,),
}


def _returns(subject: Subject, case: Case) -> None:
    outcome = _call(subject, case.make(subject.device), (OutputError,))
    if subject.schema is not None:
        _as_declared(subject.schema.returns, outcome.returned)
    if subject.reference is not None:
        ours, expected = outcome.results, subject.expect(case).results
        kinds = [[isinstance(each, torch.Tensor) for each in both] for both in (ours, expected)]
        if kinds[0] != kinds[1]:
            texts = ["(" + ", ".join(map(described, both)) + ")" for both in (ours, expected)]
            raise Violation(f"it returned {texts[0]}, and the reference {texts[1]}")


def _as_declared(declared: Any, returned: Any) -> None:
    if len(declared) == 0:
        if returned is not None and returned != ():
            raise Violation(f"its schema says that it returns nothing, and it returned {described(returned)}")
        return
    values = (returned,) if len(declared) == 1 else returned
    if not isinstance(values, (tuple, list)) or len(values) != len(declared):
        raise Violation(f"its schema promises {len(declared)} results, and it returned {described(returned)}")
    for number, (promise, value) in enumerate(zip(declared, values, strict=True)):
        _of_kind(f"result {number}", str(promise.type), value)


def _of_kind(place: str, kind: str, value: Any) -> None:
    if kind.startswith("List["):
        if not isinstance(value, (list, tuple)):
            raise Violation(f"{place}: its schema promises {kind}, and it is {described(value)}")
        for number, item in enumerate(value):
            _of_kind(f"{place}[{number}]", kind[5:-1], item)
    elif kind in _KINDS and not isinstance(value, _KINDS[kind]):
        raise Violation(f"{place}: its schema promises {kind}, and it is {described(value)}")


_property = functools.partial(Property, cases=drawn(ANYTHING))

PROPERTIES = (
    _property(
        "schema.mutation",
        rule="An argument that is not declared as written to stays bitwise equal, and so does its storage outside of the view.",
        defect="an input used as a workspace, a write to it for some shapes, layouts or values alone",
        check=_over_variants(_mutation),
        cost=0.002,
    ),
    _property(
        "schema.mutation_declared",
        rule="An argument that is declared as written to is written to.",
        defect="a kernel that writes to a contiguous copy of its argument, and never back",
        check=_declared,
        skip=_declares_writes,
        least=50,
    ),
    _property(
        "schema.alias",
        rule="No result shares memory with an argument or another result, unless the schema or the reference says so.",
        defect="an argument returned as it is where there is nothing to do: by contiguous(), to(), reshape(), or a shortcut",
        check=_over_variants(_alias),
        cost=0.002,
    ),
    _property(
        "schema.returns",
        rule="The number and types of results are those that the schema promises, or that the reference has.",
        defect="None in place of a tensor under some flag, a list of another length",
        check=_returns,
    ),
)
