"""The group ``layout``: results do not depend on the arguments' memory layouts, nor on memory that they share."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import torch

from opkit.contract.calls.cases import Call, Case, TensorCase
from opkit.contract.calls.specs import Drawing
from opkit.contract.calls.tensors import WRITABLE, fill
from opkit.contract.compare.compared import ComparedPair, Judge, as_tensor, gap, in_float64
from opkit.contract.compare.outcome import CallOutcome, described, first_index, same_bits, same_values
from opkit.contract.compare.reference import Expected, Goal, unit, wrong
from opkit.contract.prop import NotApplicable, Property, Violation, swept_and_drawn
from opkit.contract.subject import CallRefused, Subject

_FILLS = ("normal", "distinct")
_SIZES = (3, 2, 17, 5, 65, 4, 33, 1, 8)
_PAIRS = 3
_RUNS = 8
_ROUNDINGS = 16


def _layouts(*names: str) -> Drawing:
    return Drawing(layouts=("contiguous", *names), fills=_FILLS, largest=129, elements=4096)


_PLAIN = Drawing(fills=_FILLS, largest=129, elements=4096)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_neg().resolve_conj().clone(memory_format=torch.contiguous_format)


def _altered(call: Call, before: Call) -> list[bool]:
    """Return for each tensor whether it was written to."""
    return [not same_bits(a, b) for a, b in zip(call.tensors(), before.tensors(), strict=True)]


def _as_contiguous(subject: Subject, case: Case) -> None:
    if all(tensor.layout == "contiguous" for tensor in case.tensors()):
        return
    before = case.make(subject.device).map(_dense)
    plain = subject.call(before.map(torch.clone))
    written = _altered(plain.call, before)
    if any(w and t.layout not in WRITABLE for w, t in zip(written, case.tensors(), strict=True)):
        return
    layouts = [f"{at} {t.layout}" for at, t in enumerate(case.tensors()) if t.layout != "contiguous"]
    _same(subject, case, subject.run(case), plain, before, f"where tensor {' and '.join(layouts)}")


def _same(subject: Subject, case: Case, got: CallOutcome, plain: CallOutcome, before: Call, where: str) -> None:
    """Compare results, and arguments that were written to, with those of contiguous copies.

    Raises:
        Violation: they differ by more than another order of the same sums explains.
    """
    if len(got.results) != len(plain.results):
        raise Violation(f"{where}: it returns {len(got.results)} values, and {len(plain.results)} of contiguous copies")
    for pair in _pairs(got, plain):
        if not isinstance(pair.got, torch.Tensor) or not isinstance(pair.own, torch.Tensor):
            continue
        if pair.got.shape != pair.own.shape or pair.got.dtype != pair.own.dtype:
            raise Violation(
                f"{pair.name} is {described(pair.got)} {where}, and {described(pair.own)} of contiguous copies"
            )
        found = _difference(subject, case, pair, plain, before)
        if found:
            raise Violation(f"{pair.name} differs {where}: {found}")


def _pairs(got: CallOutcome, plain: CallOutcome) -> Iterator[ComparedPair]:
    for at, both in enumerate(zip(got.results, plain.results, strict=True)):
        yield ComparedPair(f"result {at}", ("result", at), *both)
    for at, both in enumerate(zip(got.call.tensors(), plain.call.tensors(), strict=True)):
        yield ComparedPair(f"argument tensor {at} afterwards", ("argument", at), *both)


def _difference(subject: Subject, case: Case, pair: ComparedPair, plain: CallOutcome, before: Call) -> str:
    """Describe a difference from the result of contiguous copies, ``plain``, beyond the order of sums, or return "".

    Raises:
        NotApplicable: the operator gives other results for the same arguments each time.
        Remark: only positions of equal elements differ.
    """
    got, own = (as_tensor(each, each).detach() for each in (pair.got, pair.own))
    if same_bits(got, own) or not bool((bad := wrong(got, Goal(own, in_float64(own), floor=_steps(own)))).any()):
        return ""
    again = pair.of(subject.call(before.map(torch.clone)))
    if not same_values(again, pair.of(plain)):
        raise NotApplicable("the operator gives other results for the same arguments each time")
    runs = [pair.of(run) for seed in range(_RUNS) if (run := _nearby(subject, before, seed)) is not None]
    gaps = [gap(each, own) for each in runs if each.shape == own.shape]
    spread = torch.stack(gaps).amax(0) if gaps else None
    bad = wrong(got, Goal(own, in_float64(own), spread=lambda: spread, floor=_steps(own)))
    if _finite(before):  # a product that overflows in one order need not in another
        bad = bad & got.isfinite() & own.isfinite()
    if not bool(bad.any()):
        return ""
    Judge(subject, case, Expected(subject, case, plain, None)).ties(pair)
    at, index = first_index(bad, bad.shape)
    one, other = (each.reshape(-1)[at].item() for each in (got, own))
    return f"{one!r} at {index}, and {other!r} for contiguous copies ({int(bad.sum())} of {bad.numel()} elements)"


def _finite(call: Call) -> bool:
    """Return whether all floats among the arguments are finite."""
    return all(bool(each.isfinite().all()) for each in call.tensors() if each.dtype.is_floating_point)


def _steps(result: torch.Tensor) -> float:
    """Return the error of intermediate steps: another layout means other instructions, such as for exp; a real error is large."""
    if not (result.dtype.is_floating_point or result.dtype.is_complex) or not result.numel():
        return 0.0
    largest = float(torch.nan_to_num(in_float64(result).abs(), 0.0, 0.0, 0.0).amax())
    return _ROUNDINGS * unit(result.dtype) * max(1.0, largest)


def _nearby(subject: Subject, before: Call, seed: int) -> CallOutcome | None:
    """Call the operator with arguments that are off by the roundings of a sum over the longest dimension."""
    generator = torch.Generator().manual_seed(seed)

    def off(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.clone()
        length = max(tensor.shape, default=1)
        size = unit(tensor.dtype) * (2 if tensor.dtype.itemsize <= 2 else 4 * length**0.5)
        signs = torch.randint(2, tensor.shape, generator=generator).to(torch.float64) * 2 - 1
        return (tensor.double() * (1 + size * signs.to(tensor.device))).to(tensor.dtype)

    try:
        return subject.call(before.map(off))
    except CallRefused:
        return None


def _partners(case: Case) -> list[tuple[int, int]]:
    """Return pairs of tensors in whose place one tensor could be passed twice."""
    numbered = list(enumerate(case.tensors()))
    pairs = itertools.combinations(numbered, 2)
    return [(i, j) for (i, a), (j, b) in pairs if _alike(a, b) and a.shape == b.shape][:_PAIRS]


def _alike(a: TensorCase, b: TensorCase) -> bool:
    return (a.dtype, a.low, a.high) == (b.dtype, b.low, b.high)


def _twice(subject: Subject, case: Case) -> None:
    for first, second in _partners(case):
        copies = _with_tensor(case, second, case.tensors()[first])
        once = _with_tensor(case, second, dataclasses.replace(case.tensors()[first], same_as=first))
        before = copies.make(subject.device)
        plain = subject.run(copies)
        if any(_altered(plain.call, before)):
            continue
        where = f"where tensors {first} and {second} are the same tensor"
        _same(subject, copies, subject.run(once), plain, before, where)


def _with_tensor(case: Case, number: int, tensor: TensorCase) -> Case:
    return case.map(lambda at, each: tensor if at == number else each)


def _shared(subject: Subject, case: Case) -> None:
    tensors = case.tensors()
    numbered = itertools.combinations(range(len(tensors)), 2)
    for first, second in [(i, j) for i, j in numbered if _alike(tensors[i], tensors[j])][:_PAIRS]:
        for overlap in (False, True):
            _one_storage(subject, case, first, second, overlap)


def _one_storage(subject: Subject, case: Case, first: int, second: int, overlap: bool) -> None:
    one, other = case.tensors()[first], case.tensors()[second]
    sizes = [torch.Size(each.shape).numel() for each in (one, other)]
    start = sizes[0] // 2 if overlap else sizes[0]
    if overlap and (not start or not sizes[1]):
        return
    memory = fill(max(sizes[0], start + sizes[1]), one.dtype, one.fill, one.seed, one.low, one.high).to(subject.device)
    views = {first: memory[: sizes[0]].view(one.shape), second: memory[start : start + sizes[1]].view(other.shape)}
    call = case.make(subject.device)
    numbers = {id(tensor): at for at, tensor in enumerate(call.tensors())}
    shared = call.map(lambda tensor: views.get(numbers[id(tensor)], tensor))
    before = shared.map(_dense)
    plain = subject.call(before.map(torch.clone))
    if any(_altered(plain.call, before)):
        return
    how = "overlap in" if overlap else "lie side by side in"
    _same(subject, case, subject.call(shared), plain, before, f"where tensors {first} and {second} {how} one storage")


def _no_tensor(subject: Subject) -> str:
    return "" if subject.spec.tensors() else "there is no tensor"


def _no_two_tensors(subject: Subject) -> str:
    if len(subject.spec.tensors()) < 2:
        return "there are no two tensors"
    return "" if subject.functional else "it writes to an argument: no other may share its memory"


_STRIDES = _layouts("transposed", "strided", "reversed", "channels_last")
_VIEWS = _layouts("offset", "padded", "negated")
_EXPANDED = _layouts("expanded", "expanded_last", "overlapping")

_property = functools.partial(Property, check=_as_contiguous, skip=_no_tensor, share=0.4, cost=0.002)

PROPERTIES = (
    _property(
        "layout.strides",
        rule="Transposed, strided and channels-last arguments give what contiguous copies of them give.",
        defect="strides that are taken for granted, strides of the wrong argument or dimension",
        **swept_and_drawn(_STRIDES, sizes=_SIZES),
    ),
    _property(
        "layout.views",
        rule="So do views that begin in the middle of a storage, rows with gaps between, and torch's lazy minus.",
        defect="a storage offset that is forgotten, aligned loads of what is not aligned, a row length for a row stride",
        **swept_and_drawn(_VIEWS, sizes=_SIZES),
    ),
    _property(
        "layout.expanded",
        rule="So do tensors whose elements share memory, where the operator does not write to them.",
        defect="a stride of zero that is read as a dense one, elements that overlap",
        **swept_and_drawn(_EXPANDED, sizes=_SIZES),
    ),
    _property(
        "layout.same_tensor",
        rule="The same tensor in two places gives what two copies of it give.",
        defect="a workspace in an argument's memory, a shortcut where two pointers are equal",
        check=_twice,
        **swept_and_drawn(_PLAIN, sizes=_SIZES),
        skip=_no_two_tensors,
        share=0.3,
    ),
    _property(
        "layout.shared_storage",
        rule="Views of one storage, side by side or overlapping, give what copies give.",
        defect="reads past the end that find a neighbour, data that is taken by storage rather than by tensor",
        check=_shared,
        **swept_and_drawn(_PLAIN, sizes=_SIZES),
        skip=_no_two_tensors,
        share=0.3,
    ),
)
