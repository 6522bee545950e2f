"""The group ``numbers``: the operator's results agree with its reference's."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy

from opkit.contract.calls.cases import Call, Case, TensorCase
from opkit.contract.calls.specs import Drawing
from opkit.contract.calls.tensors import EXTREME, NUMERIC, ORDINARY
from opkit.contract.compare.compared import ComparedPair, Judge, excused, flushed, pairs, zero_signs
from opkit.contract.compare.outcome import CallOutcome, described
from opkit.contract.compare.reference import Expected, expected
from opkit.contract.prop import Property, Remark, Violation, drawn, needs_reference, swept, swept_and_drawn
from opkit.contract.subject import CallRefused, Subject
from opkit.errors import OpkitError
from opkit.op.dispatch import planning
from opkit.op.forcing import use_kernel

_SMALL = (0, 1, 2, 3, 4, 7, 8, 9, 17)
_NONE = (0, 1, 3, 2)
_ENDS = (1, 2, 3, 5, 8, 17)
_DELIBERATE = (TypeError, ValueError, NotImplementedError, OpkitError)
_REQUIRES = re.compile(r"expect|must be|should|support|only|require|not implemented|contiguous|dtype", re.IGNORECASE)
_MISTAKE = re.compile(  # messages of Python and torch for a call with wrong arguments
    r"invalid combination of arguments|unsupported operand|positional argument|unexpected keyword|is not (callable|iterable|"
    r"subscriptable)|indices must be|object (is not|does not)|must be real number|cannot be interpreted as"
)
_NONE_ACCEPTED = 20  # calls: an operator that accepts none of so many accepts none
_FLUSHED = ("denormal", "special", "tiny")


def _wanted(found: Expected, got: CallOutcome) -> CallOutcome:
    """Return the reference's results in its dtype, or if it does not support that, its exact results in the operator's dtypes."""
    if found.own is not None:
        return found.own
    assert found.exact is not None

    def cast(exact: Any, ours: Any) -> Any:
        both = isinstance(exact, torch.Tensor) and isinstance(ours, torch.Tensor)
        return exact.to(ours.dtype) if both else exact

    if len(found.exact.results) != len(got.results):
        return found.exact
    return CallOutcome(got.call, tuple(map(cast, found.exact.results, got.results)), None)


def compare(subject: Subject, case: Case, **how: Any) -> None:
    """Run the operator and the reference, and compare all that they return and write to.

    Raises:
        Violation: they differ by more than right kernels do.
        Remark: the reference cannot be run in float64.
    """
    found = expected(subject, case)
    got = subject.run(case)
    judge = Judge(subject, case, found, **how)
    for pair in pairs(subject, got, _wanted(found, got), case):
        judge.check(pair)
    if found.exact is None:
        raise Remark(f"the reference was compared in its own dtype: in float64 it cannot be run ({found.why})")


def _reference(subject: Subject, case: Case) -> None:
    compare(subject, case)


def _has_kernels(subject: Subject) -> str:
    return needs_reference(subject) or ("" if len(subject.kernels) > 1 else "it has no second kernel for the device")


def _kernels(subject: Subject, case: Case) -> None:
    assert subject.operator is not None
    refusals: list[CallRefused] = []
    operator = subject.operator._operator

    def eligible(*args: Any, **kwargs: Any) -> list[str]:
        return [kernel.name for kernel in planning.eligible(operator, *operator.signature.encode(args, kwargs))[0]]

    names = subject.call(case.make(subject.device), eligible).returned
    for name in names:
        try:
            with use_kernel(subject.operator, name):
                compare(subject, case)
        except Violation as violation:
            raise Violation(f"kernel {name!r}: {violation}") from None
        except CallRefused as refusal:
            refusals.append(refusal)
    if refusals and len(refusals) == len(names):
        raise refusals[0]


def _extreme(subject: Subject, case: Case) -> None:
    flushes = any(tensor.fill in _FLUSHED for tensor in case.tensors())

    def alternates(pair: ComparedPair) -> Iterator[Any]:
        if flushes:
            yield pair.of(flushed(subject, case))

    excuse = functools.partial(excused, subject, case)
    compare(subject, case, floor=_floor(case), extreme=True, alternates=alternates, excused=excuse)
    zero_signs(subject, case)


def _floor(case: Case) -> float:
    """Return the largest number that may be flushed to zero."""
    found = [torch.finfo(t.dtype).smallest_normal for t in case.tensors() if t.differentiable and t.dtype.itemsize != 1]
    return min(found, default=0.0)


def _empty(subject: Subject, case: Case) -> None:
    if not any(0 in tensor.shape or not tensor.shape for tensor in case.tensors()):
        return
    sizes = [leaf.numel() for leaf in subject.expect(case).tensors()]
    stale = [torch.full((max(size, 1),), float("nan")) for size in sizes for _ in range(2)]
    del stale  # the next memory from the allocator contains no zeros by chance
    compare(subject, case)


def _has_integers(subject: Subject) -> str:
    found = [d for each in subject.spec.tensors() for d in each.dtypes or ()]
    exact = any(not (dtype.is_floating_point or dtype.is_complex) for dtype in found)
    return needs_reference(subject) or ("" if exact else "no argument is of an integer dtype")


def _integers(subject: Subject, case: Case) -> None:
    if any(not tensor.differentiable and tensor.dtype != torch.bool for tensor in case.tensors()):
        compare(subject, case)
        if _accepts_any_integer(subject, case):
            ends = case.map(lambda _, each: dataclasses.replace(each, fill="edges") if _unbounded(each) else each)
            compare(subject, ends)


def _accepts_any_integer(subject: Subject, case: Case) -> bool:
    """Return whether integers are neither positions nor sizes: the reference accepts larger ones and its results keep shape."""
    call = case.make(subject.device)
    pairs = zip(call.tensors(), case.tensors(), strict=True)
    larger = {id(tensor): tensor * 1000 + 7 for tensor, each in pairs if _unbounded(each)}
    try:
        found = subject.call(call.map(lambda tensor: larger.get(id(tensor), tensor)), subject.reference)
    except CallRefused:
        return False
    shapes = [[leaf.shape for leaf in outcome.tensors()] for outcome in (found, subject.expect(case))]
    return bool(larger) and shapes[0] == shapes[1]


def _unbounded(tensor: TensorCase) -> bool:
    return not tensor.differentiable and tensor.dtype != torch.bool and tensor.low is None and tensor.high is None


def _has_scalars(subject: Subject) -> str:
    drawn = [each for each in (*subject.spec.args, *dict(subject.spec.kwargs).values()) if _varies(each)]
    return needs_reference(subject) or ("" if drawn else "no argument other than tensors varies, and none is optional")


def _varies(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return any(map(_varies, item))
    return isinstance(item, SearchStrategy) or getattr(item, "optional", False)


def _dtypes(subject: Subject, case: Case) -> None:
    wanted, got = subject.expect(case), subject.run(case)
    for number, (ours, theirs) in enumerate(zip(got.results, wanted.results, strict=False)):
        both = isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        if both and ours.dtype != theirs.dtype:
            raise Violation(f"result {number} is {described(ours)}, and the reference's is {described(theirs)}")


def _accepts(subject: Subject, case: Case) -> None:
    refusal = _refusal(subject, case.make(subject.device), subject.function)
    reference = _refusal(subject, case.make(subject.device), subject.reference)
    _raise_if_all_refused(subject, refusal, reference)
    if refusal is None and reference is not None:
        raise Remark(f"it gives a result where the reference raises {reference}")
    if refusal is None or reference is not None:
        return
    message = f"it raises {refusal}, and the reference gives a result"
    raise Remark(message) if _deliberate(refusal.error) else Violation(message)


def _raise_if_all_refused(subject: Subject, refusal: CallRefused | None, reference: CallRefused | None) -> None:
    """Raise if the operator has refused every call that the reference accepts: then nothing is checked at all."""
    count: dict[str, int] = subject.notes.setdefault("numbers.accepts", {"accepted": 0, "refused": 0})
    count["accepted"] += refusal is None
    count["refused"] += refusal is not None and reference is None
    if count["refused"] >= _NONE_ACCEPTED and not count["accepted"]:
        raise Violation(
            f"none of {count['refused']} calls that the reference accepts gives a result: it raises {refusal}"
        )


def _refusal(subject: Subject, call: Call, function: Any) -> CallRefused | None:
    try:
        subject.call(call, function)
    except CallRefused as refusal:
        return refusal
    return None


def _deliberate(error: BaseException) -> bool:
    """Return whether the operator's author, or torch for a dtype, refuses the call deliberately."""
    if isinstance(error, TypeError) and _MISTAKE.search(str(error)):
        return False
    requires = type(error) is RuntimeError and _REQUIRES.search(str(error)) is not None
    return isinstance(error, _DELIBERATE) or requires


_NUMERIC = Drawing(fills=NUMERIC)
_FORGOTTEN = Drawing(fills=EXTREME, largest=65, elements=1024)
_FEW = Drawing(fills=ORDINARY, largest=17, elements=512)
_NOTHING = Drawing(fills=("normal", "ones"), largest=3)

_property = functools.partial(Property, skip=needs_reference, share=0.3, cost=0.001)

PROPERTIES = (
    _property(
        "numbers.accepts",
        rule="It gives a result wherever the reference does, or says in plain words that it does not.",
        defect="an index error on an empty tensor, a division by a size of zero, an assertion about a size",
        check=_accepts,
        first=swept(_FEW, sizes=_SMALL),
    ),
    _property(
        "numbers.dtypes",
        rule="Results have the dtypes of the reference's, for every dtype and mixture of dtypes.",
        defect="float32 results from 16-bit arguments, a result in the dtype of the wrong argument",
        check=_dtypes,
        **swept_and_drawn(_FEW, sizes=_ENDS),
    ),
    _property(
        "numbers.reference",
        rule="Results, and arguments that are written to, are the reference's in float64, to what rounding explains.",
        defect="a wrong formula, a dropped term, swapped operands, a wrong tail, a sum in too narrow a dtype",
        check=_reference,
        **swept_and_drawn(_NUMERIC),
        share=0.5,
        cost=0.002,
    ),
    _property(
        "numbers.empty",
        rule="Tensors of no elements and of no dimensions are right too: a sum of nothing is 0.",
        defect="uninitialised results where a loop does not run, a wrong shape, a division by a size of zero",
        check=_empty,
        **swept_and_drawn(_NOTHING, sizes=_NONE),
    ),
    _property(
        "numbers.integers",
        rule="Integers are exact, and wrap around at the ends of their dtype as the reference's do.",
        defect="integers that pass through float, a narrower accumulator, saturation",
        check=_integers,
        cases=drawn(_FEW),
        first=swept(Drawing(largest=1025), sizes=(*_ENDS, 1025)),
        skip=_has_integers,
        share=0.4,
        cost=0.002,
    ),
    _property(
        "numbers.scalars",
        rule="Every value of an argument that is no tensor counts, and optional tensors may be left out.",
        defect="a flag that is ignored, a default in the place of the argument, a special case at 0 or 1",
        check=_reference,
        **swept_and_drawn(_FEW, sizes=_ENDS),
        skip=_has_scalars,
        share=0.4,
        cost=0.002,
    ),
    _property(
        "numbers.kernels",
        rule="Every kernel for the device is correct for the calls that it accepts, not only the one that opkit selects.",
        defect="a kernel for rare calls that was never run, or one that another kernel always precedes",
        check=_kernels,
        **swept_and_drawn(_NUMERIC),
        skip=_has_kernels,
        cost=0.004,
        share=1.0,
    ),
    _property(
        "numbers.extreme",
        rule="NaN, infinities, signed zeros, denormals, huge and tiny numbers come out as the reference's do.",
        defect="a lost NaN, an overflow on the way to a result that is none, a softmax without its maximum",
        check=_extreme,
        **swept_and_drawn(_FORGOTTEN, sizes=(3, 1, 2, 17, 33, 64, 8)),
        share=0.5,
        cost=0.003,
    ),
)
