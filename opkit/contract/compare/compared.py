"""This module pairs an operator's results with its reference's, and checks each pair, also where numbers are extreme."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.compare.outcome import CallOutcome, described, first_index, same_bits, same_values
from opkit.contract.compare.reference import Expected, Goal, allowed, widened, wrong
from opkit.contract.prop import Remark, Violation
from opkit.contract.subject import CallRefused, Subject

_RUNS = 8
_SIGNS = ("signed_zeros", "special")
_NEAR = 4  # a sum that comes this close to the largest number overflows in some order
_ORDINARY = 3.0
_MIN_NONZERO = 3  # so many nonzero numbers show that nothing is added up


@dataclasses.dataclass(frozen=True)
class ComparedPair:
    """One result, or one argument afterwards, of the operator and of the reference."""

    name: str
    at: tuple[str, int]  # which list of an outcome, and the index in it
    got: Any
    own: Any

    def of(self, outcome: CallOutcome) -> Any:
        """Return the same result in another outcome of the reference."""
        found = outcome.results if self.at[0] == "result" else outcome.call.tensors()
        return found[self.at[1]]


def pairs(subject: Subject, got: CallOutcome, wanted: CallOutcome, case: Case) -> list[ComparedPair]:
    """Return pairs of results in order, then pairs of the arguments that are written to.

    Raises:
        Violation: the operator returns more, or fewer, than the reference.
    """
    ours, theirs = got.results, wanted.results
    after = _written(subject, got, wanted, case)
    if len(ours) != len(theirs) and subject.writes and not [each for each in ours if each is not None]:
        return _into_arguments(subject, got, wanted)
    if len(ours) != len(theirs):
        if all(each is None for each in theirs) and after:  # the operator also returns the arguments that it wrote to
            return after
        raise Violation(
            f"it returns {len(ours)} values ({_list(ours)}), and the reference {len(theirs)} ({_list(theirs)})"
        )
    if after and (_nothing(ours) or _nothing(theirs)):
        return after
    many = len(ours) > 1
    named = [
        ComparedPair(f"result {at}" if many else "the result", ("result", at), *both)
        for at, both in enumerate(zip(ours, theirs, strict=True))
    ]
    return named + after


def _nothing(values: tuple[Any, ...]) -> bool:
    return all(each is None for each in values)


def _list(values: tuple[Any, ...]) -> str:
    return ", ".join(map(described, values)) or "none"


def _written(subject: Subject, got: CallOutcome, wanted: CallOutcome, case: Case) -> list[ComparedPair]:
    """Return pairs of the arguments that the reference writes to."""
    before = case.make(subject.device).tensors()
    found = []
    for at, (a, b, c) in enumerate(zip(got.call.tensors(), wanted.call.tensors(), before, strict=True)):
        if not same_bits(b, c):
            found.append(ComparedPair(f"argument tensor {at}, afterwards,", ("argument", at), a, b))
    return found


def _into_arguments(subject: Subject, got: CallOutcome, wanted: CallOutcome) -> list[ComparedPair]:
    """Return pairs for an operator with ``out`` arguments and no results, and a reference that returns results."""
    names = [argument.name for argument in subject.schema.arguments]
    arguments = dict(zip(names, got.call.args, strict=False)) | got.call.kwargs
    outs = [arguments[name] for name in subject.writes if isinstance(arguments.get(name), torch.Tensor)]
    if len(outs) != len(wanted.results):
        raise Remark(f"it writes to {len(outs)} arguments and the reference returns {len(wanted.results)} values")
    return [
        ComparedPair(f"argument {name}, afterwards,", ("result", at), *both)
        for at, (name, *both) in enumerate(zip(subject.writes, outs, wanted.results, strict=True))
    ]


@dataclasses.dataclass
class Judge:
    """Compares one call's results with the expected ones."""

    subject: Subject
    case: Case
    wanted: Expected
    floor: float = 0.0
    extreme: bool = False
    alternates: Callable[[ComparedPair], Iterable[Any]] = lambda _: ()
    excused: Callable[[ComparedPair], torch.Tensor | None] = lambda _: None

    @functools.cached_property
    def _disturbed(self) -> list[CallOutcome]:
        return [found for seed in range(_RUNS) if (found := self.wanted.disturbed(seed)) is not None]

    @functools.cached_property
    def _moved(self) -> list[CallOutcome]:
        return [found for seed in range(2) if (found := self.wanted.moved(seed)) is not None]

    def goal(self, pair: ComparedPair) -> Goal:
        """Return what a pair's result is compared with."""
        own = pair.own
        exact = pair.of(self.wanted.exact) if self.wanted.exact is not None else None
        usable = isinstance(exact, torch.Tensor) and exact.shape == own.shape
        base: torch.Tensor = exact if usable and exact is not None else own

        def spread(outcomes: list[CallOutcome]) -> torch.Tensor | None:
            found = [pair.of(each) for each in outcomes if len(each.results) == len(self.wanted_results)]
            gaps = [gap(each, base) for each in found if isinstance(each, torch.Tensor) and each.shape == base.shape]
            return torch.stack(gaps).amax(0) if gaps else None

        half = own.dtype.is_floating_point and own.dtype.itemsize <= 2
        return Goal(
            own,
            in_float64(base),
            lambda: spread(self._disturbed),
            lambda: spread(self._moved) if half or self._is_narrow else None,
            self.floor,
            self.extreme,
        )

    @property
    def wanted_results(self) -> tuple[Any, ...]:
        """The reference's results."""
        found = self.wanted.own or self.wanted.exact
        assert found is not None
        return found.results

    @functools.cached_property
    def _is_narrow(self) -> bool:
        return any(tensor.dtype.itemsize <= 2 for tensor in self.case.tensors() if tensor.differentiable)

    def check(self, pair: ComparedPair) -> None:
        """Check that the result is the expected one.

        Raises:
            Violation: it has another value, shape or dtype.
        """
        got, own = pair.got, pair.own
        if isinstance(got, torch.Tensor) != isinstance(own, torch.Tensor) and (got is None or own is None):
            raise Violation(f"{pair.name} is {described(got)}, and the reference's is {described(own)}")
        if not _numeric(got) or not _numeric(own):
            self._plain(pair)
            return
        got, own = as_tensor(got, own), as_tensor(own, got)
        if got.shape != own.shape:
            raise Violation(f"{pair.name} has shape {list(got.shape)}, and the reference's has {list(own.shape)}")
        self._numbers(dataclasses.replace(pair, got=got.detach(), own=own.detach()))

    def _plain(self, pair: ComparedPair) -> None:
        if not (pair.got == pair.own or pair.got is pair.own):
            raise Violation(f"{pair.name} is {pair.got!r}, and the reference's is {pair.own!r}")

    def _numbers(self, pair: ComparedPair) -> None:
        got, own = pair.got, pair.own
        if own.numel() == 0 or (got.dtype == own.dtype and torch.equal(got, own)):
            return
        if got.dtype.is_floating_point != own.dtype.is_floating_point or got.dtype.is_complex != own.dtype.is_complex:
            raise Violation(f"{pair.name} is {described(got)}, and the reference's is {described(own)}")
        goal = self.goal(pair)
        bad = wrong(got, goal)
        if bool(bad.any()):
            bad = self._forgiven(pair, bad)
        if bool(bad.any()):
            self.ties(pair)
            raise Violation(self._message(pair, goal, bad))

    def _forgiven(self, pair: ComparedPair, bad: torch.Tensor) -> torch.Tensor:
        """Return the mask without elements that agree with other correct results."""
        for other in self.alternates(pair):
            if isinstance(other, torch.Tensor) and other.shape == pair.own.shape:
                bad = bad & wrong(pair.got, Goal(other, in_float64(other), floor=self.floor, extreme=self.extreme))
        excused = self.excused(pair)
        return bad if excused is None else bad & ~excused

    def ties(self, pair: ComparedPair) -> None:
        """Raise Remark if the results are positions and some elements are equal: their positions have no order."""
        if pair.got.dtype not in (torch.int64, torch.int32):
            return
        for tensor in self.case.make(self.subject.device).tensors():
            values = (
                torch.nan_to_num(tensor.detach().double()) if tensor.dtype.is_floating_point else tensor.new_empty(0)
            )
            if values.unique().numel() < values.numel():
                raise Remark(f"{pair.name} has positions, and differs from the reference's where elements are equal")

    def _message(self, pair: ComparedPair, goal: Goal, bad: torch.Tensor) -> str:
        at, index = first_index(bad, bad.shape)
        got, own, exact = (each.reshape(-1)[at].item() for each in (pair.got, goal.own, goal.exact))
        exactly = f" (exactly {exact!r})" if own != exact and self.wanted.exact is not None else ""
        floating = pair.got.dtype.is_floating_point
        within = f", within {float(allowed(goal).reshape(-1)[at]):.2g}" if floating else ""
        count = f"; {int(bad.sum())} of {bad.numel()} elements are wrong" if bad.numel() > 1 else ""
        return f"{pair.name} is {got!r} at {index}, and the reference's is {own!r}{exactly}{within}{count}"


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers in float64 or complex128."""
    return tensor.detach().to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def gap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the distance of each two elements; 0 where it is not finite."""
    return torch.nan_to_num((in_float64(one) - in_float64(other)).abs(), 0.0, 0.0, 0.0)


def _numeric(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, int, float, complex))


def as_tensor(value: Any, like: Any) -> torch.Tensor:
    """Return a number as a tensor, in the other's dtype if that is a tensor of the same kind."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype.is_floating_point and value.dtype.itemsize == 1 else value
    found = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    suits = isinstance(like, torch.Tensor) and like.dtype.is_floating_point == found.dtype.is_floating_point
    return found.to(like.dtype) if suits else found


# ---- extreme numbers: flushed denormals, overflow, invalid operations --------------------------------------------------


def _of_changed(subject: Subject, case: Case, change: Callable[[torch.Tensor], torch.Tensor]) -> CallOutcome:
    """Return the reference's results for changed floats."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return change(tensor) if tensor.dtype.is_floating_point else tensor

    return subject.call(case.make(subject.device).map(changed), subject.reference)


def flushed(subject: Subject, case: Case) -> CallOutcome:
    """Return the reference's results if denormal arguments are flushed to zero."""

    def flush(tensor: torch.Tensor) -> torch.Tensor:
        small = tensor.abs() < torch.finfo(tensor.dtype).smallest_normal
        return torch.where(small, torch.zeros_like(tensor).copysign(tensor), tensor)

    return _of_changed(subject, case, flush)


def excused(subject: Subject, case: Case, pair: ComparedPair) -> torch.Tensor | None:
    """Return a mask of the elements at which correct kernels may differ, or None."""
    got, own = pair.got, pair.own
    if not got.dtype.is_floating_point:
        return None
    found = _invalid(subject, case, pair)
    if got.numel() < max((t.make().numel() for t in case.tensors()), default=0):
        found |= own.isinf() & got.isnan()  # infinity less infinity in a sum
    odd = ~got.isfinite() | ~own.isfinite()
    if bool(odd.any()) and _overflows(subject, case, pair):
        found |= odd
    return found


def _invalid(subject: Subject, case: Case, pair: ComparedPair) -> torch.Tensor:
    """Return where the reference gives NaN because of numbers that are infinite or too large to be squared: others need not."""

    def calmed(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(tensor.abs() > torch.finfo(tensor.dtype).max ** 0.5, tensor.sign() * _ORDINARY, tensor)

    try:
        calm = pair.of(_of_changed(subject, case, calmed))
    except CallRefused:
        return torch.zeros_like(pair.got, dtype=torch.bool)
    found = pair.own.isnan() & ~calm.isnan()
    widest = pair.got.dtype == torch.float64  # for narrower dtypes the correct result is known
    return found | (pair.got.isnan() & (calm != pair.own)) if widest else found


def _overflows(subject: Subject, case: Case, pair: ComparedPair) -> bool:
    """Return whether terms of one sign would overflow: then an overflow of these terms depends on their order."""
    try:
        largest = pair.of(_of_changed(subject, case, lambda t: widened(torch.where(t.isfinite(), t, 0.0).abs())))
    except CallRefused:
        return False
    limit = torch.finfo(pair.own.dtype).max / _NEAR
    return bool((largest.double().abs() > limit).any()) or bool((~largest.isfinite()).any())


def zero_signs(subject: Subject, case: Case) -> None:
    """Check the signs of zeros if an operator does nothing but change signs.

    Raises:
        Violation: one has another sign.
    """
    floats = [t for t in case.tensors() if t.fill in _SIGNS and t.dtype.is_floating_point]
    scalars = [value for value in (*case.args, *dict(case.kwargs).values()) if isinstance(value, (int, float))]
    if not floats or scalars or len(case.tensors()) > 1:  # 0 * b may be added to a
        return
    got, own = subject.run(case), subject.expect(case)
    inputs = [t for t in case.make(subject.device).tensors() if t.dtype.is_floating_point]
    for ours, theirs in zip(got.results, own.results, strict=False):
        if _only_signs(ours, theirs, inputs) and bool((_negative_zero(ours) != _negative_zero(theirs)).any()):
            raise Violation(
                "a zero of the result has another sign than the reference's, and everything else is bitwise equal"
            )


def _only_signs(ours: Any, theirs: Any, inputs: list[torch.Tensor]) -> bool:
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor) or not theirs.is_floating_point():
        return False
    if not bool((theirs != 0).sum() >= _MIN_NONZERO):
        return False
    only_signs = any(same_values(theirs.abs(), each.abs()) for each in inputs)
    return only_signs and same_values(ours.abs(), theirs.abs())


def _negative_zero(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor == 0) & tensor.signbit()
