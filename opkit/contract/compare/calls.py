"""This module compares calls of one operator with one another: up to rounding, for other seeds, by what they write."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import torch
from hypothesis import errors as hypothesis_errors

from opkit.contract.calls.cases import Call, Case, TensorCase, distinct, owners
from opkit.contract.calls.sweep import quiet_settings
from opkit.contract.compare.outcome import CallOutcome, first_difference, plain, same_bits
from opkit.contract.subject import CallRefused, Subject

_PLAIN = (bool, int, float, complex, str, type(None))
_ACCUMULATED = torch.finfo(torch.float32).eps  # 16-bit kernels add up in float32
_STEPS = 8  # roundings an element, other than those of a sum
_SEEDS = (1, 2, 3, 4, 5)
_EXAMPLES = 16
Part = tuple[str, Any, Any]


def observe(
    subject: Subject, case: Case | Call, function: Callable[..., Any] | None = None, seed: int = 0
) -> CallOutcome:
    """Call the operator with torch's generator set to ``seed``. The results are not copied: later calls may change them."""
    call = case.make(subject.device) if isinstance(case, Case) else case
    seed_torch(subject, seed)
    return subject.call(call, function)


def seed_torch(subject: Subject, seed: int) -> None:
    """Seed torch's generator. On a CPU torch.manual_seed is not used: it formats a stack trace for each kind of device."""
    if subject.device == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def quietly(subject: Subject, case: Case) -> None:
    """Call the operator only for the state that the call leaves; ignore a refusal."""
    try:
        observe(subject, case)
    except CallRefused:
        return


def unequal(ours: CallOutcome, expected: CallOutcome) -> Iterator[Part]:
    """Yield what differs bitwise: results, then arguments after the calls. Opaque objects are not compared."""
    if len(ours.results) != len(expected.results):
        yield "the number of results", len(ours.results), len(expected.results)
        return
    pairs = [(f"result {n}", *pair) for n, pair in enumerate(zip(ours.results, expected.results, strict=True))]
    tensors = zip(ours.call.tensors(), expected.call.tensors(), strict=True)
    pairs += [(f"tensor argument {n}, afterwards,", *pair) for n, pair in enumerate(tensors)]
    yield from (pair for pair in pairs if _comparable(pair[1]) and _comparable(pair[2]) and not same_bits(*pair[1:]))


def difference(ours: CallOutcome, expected: CallOutcome) -> str:
    """Describe the first part that differs bitwise, or return ""."""
    return next((_described_part(part) for part in unequal(ours, expected)), "")


def beyond_rounding(subject: Subject, case: Case, ours: CallOutcome, expected: CallOutcome) -> str:
    """Describe the first part that differs by more than the order of a summation explains, or return "".

    The tolerance is relative to the largest number in the result and the arguments, and grows with the square root of the number
    of elements. If that does not suffice, the tolerance is the change that a last bit of the arguments causes: an operator may
    be ill-conditioned, and an index may be that of one of two equal elements.
    """
    pair: tuple[CallOutcome, CallOutcome] | None = None
    for part in unequal(ours, expected):
        if _explained(part, _relative(case), expected.call):
            continue
        pair = pair or _nudged(subject, case)
        if pair is None or not _ill_conditioned(part, *pair):
            return _described_part(part)
    return ""


def _comparable(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.is_quantized
    return isinstance(value, _PLAIN)


def _described_part(part: Part) -> str:
    name, a, b = part
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return f"{name} {'differs at' if tensors else 'is'} {first_difference(a, b)}"


def _relative(case: Case) -> float:
    """Return the relative error that rounding can cause in results of this case's size."""
    tensors = [tensor for tensor in case.tensors() if tensor.differentiable] or case.tensors()
    elements = max([math.prod(tensor.shape) for tensor in tensors], default=1)
    epsilons = [torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.differentiable]
    epsilon = max(epsilons, default=_ACCUMULATED)
    return _STEPS * (epsilon + min(epsilon, _ACCUMULATED) * math.sqrt(max(elements, 1)))


def _explained(part: Part, relative: float, call: Call) -> bool:
    _, a, b = part
    if not _floating(a, b):
        return False
    spread = _distance(a, b)
    largest = max(_largest(tensor) for tensor in (a, b, *call.tensors()))
    relative = max(relative, _STEPS * torch.finfo(a.dtype).eps)
    return spread <= relative * max(largest, torch.finfo(a.dtype).tiny)


def _floating(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if not both or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.dtype.is_floating_point or a.dtype.is_complex


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference of two elements; infinite if only one is a number, or both are different infinities."""
    one, other = _wide(a), _wide(b)
    apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs())
    return float(torch.nan_to_num(apart, float("inf")).max()) if apart.numel() else 0.0


def _largest(tensor: torch.Tensor) -> float:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or not tensor.numel():
        return 0.0
    sizes = _wide(tensor).abs()
    return float(torch.where(sizes.isfinite(), sizes, 0.0).max())


def _nudged(subject: Subject, case: Case) -> tuple[CallOutcome, CallOutcome] | None:
    """Call with every number of the arguments changed by about a unit in the last place, and then with the original ones."""

    def nudge(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor
        sign = 1 - 2 * (torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape) * 7 // 3 % 2)
        return (tensor.double() * (1 + sign * torch.finfo(tensor.dtype).eps)).to(tensor.dtype)

    try:
        nudged = observe(subject, case.make(subject.device).map(nudge)).detached()
        return nudged, observe(subject, case).detached()
    except CallRefused:
        return None


def _ill_conditioned(part: Part, nudged: CallOutcome, plain: CallOutcome) -> bool:
    """Return whether a last bit of the arguments changes this part by as much as the observed difference."""
    name, a, b = part
    changed = next((each for each in unequal(nudged, plain) if each[0] == name), None)
    if changed is None or name.startswith("tensor argument"):
        return False
    if _floating(a, b):
        return _floating(*changed[1:]) and _distance(a, b) <= 16 * _distance(*changed[1:])
    same = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return same and int((a != b).sum()) <= 16 * int((changed[1] != changed[2]).sum())


# ---- random numbers: whether results depend on them -----------------------------------------------------------------


def is_random(subject: Subject, case: Case) -> bool:
    """Return whether the results of this case follow torch's seed: equal for equal seeds, different for others.

    The subject caches the answer by flags and scalars, so that a second query costs nothing.

    Raises:
        CallRefused: the operator raised.
    """
    known: dict[str, bool] = _cache(subject).setdefault("flags", {})
    flags = _flags(case)
    if flags not in known:
        random, certain = _follows_seed(subject, case)
        if not certain:
            return random
        known[flags] = random
    return known[flags]


def ever_random(subject: Subject) -> bool:
    """Return whether the results of any of a few examples depend on torch's seed."""
    cache = _cache(subject)
    if "ever" not in cache:
        cache["ever"] = _search(subject)
    return cache["ever"]


def _cache(subject: Subject) -> dict[str, Any]:
    return subject.__dict__.setdefault("_randomness", {})  # a frozen dataclass caches as functools.cached_property does


def _flags(case: Case) -> str:
    """Return the case without its tensors' sizes and numbers: the part that decides whether an operator draws."""
    values = [value for value in (*case.args, *case.kwargs) if not isinstance(value, (TensorCase, list))]
    return repr((values, any(0 in tensor.shape for tensor in case.tensors())))


def _follows_seed(subject: Subject, case: Case) -> tuple[bool, bool]:
    """Return whether the case is random, and whether the answer holds for other cases with the same flags."""
    first = observe(subject, case, seed=0).detached()
    drawn = not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())
    second = observe(subject, case, seed=1).detached()
    if not difference(first, second):
        if not drawn:
            return False, True
        return any(difference(first, observe(subject, case, seed=seed)) for seed in _SEEDS), False
    return not difference(observe(subject, case, seed=0), first), True


def _search(subject: Subject) -> bool:
    found = False

    @hypothesis.seed(0)
    @quiet_settings(_EXAMPLES, phases=[hypothesis.Phase.generate])
    @hypothesis.given(subject.spec.cases())
    def look(case: Case) -> None:
        nonlocal found
        try:
            found = found or is_random(subject, case)
        except CallRefused:
            hypothesis.reject()

    try:
        look()
    except hypothesis_errors.Unsatisfiable:
        return False
    return found


# ---- arguments before and after a call, byte by byte and over their whole storages ------------------------------------


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # pyright: ignore[reportArgumentType]


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": tuple(tensor.shape),
        "strides": tensor.stride(),
        "storage offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "address": tensor.untyped_storage().data_ptr(),
        "size of its storage": tensor.untyped_storage().nbytes(),
        "requires_grad": tensor.requires_grad,
        "negative bit": tensor.is_neg(),
        "conjugate bit": tensor.is_conj(),
    }


@dataclasses.dataclass(frozen=True)
class TensorSnapshot:
    """A tensor, and its metadata and bytes at an earlier time."""

    number: int
    tensor: torch.Tensor
    facts: dict[str, Any]
    bytes: torch.Tensor
    version: int
    inside: torch.Tensor

    def metadata_changes(self) -> list[str]:
        """Describe the metadata that has changed."""
        now = _facts(self.tensor)
        return [f"its {name} was {was} and is {now[name]}" for name, was in self.facts.items() if now[name] != was]

    def written(self) -> bool:
        """Return whether its elements were written to, even with the same numbers."""
        return bool(self.bytes_changed(True)) or self.tensor._version != self.version

    def bytes_changed(self, inside: bool) -> int:
        """Count the changed bytes of its elements, or of the rest of its storage."""
        now = storage_bytes(self.tensor)
        if now.shape != self.bytes.shape:
            return 0
        return int(((now != self.bytes) & (self.inside == inside)).sum())


def snapshots(call: Call) -> list[TensorSnapshot]:
    """Return a snapshot of each tensor of the call."""
    return [
        TensorSnapshot(number, each, _facts(each), storage_bytes(each).clone(), each._version, _inside(each))
        for number, each in distinct(call)
    ]


def _inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask of the storage's bytes that belong to elements."""
    size = tensor.element_size()
    found = torch.zeros(tensor.untyped_storage().nbytes() // size, dtype=torch.bool, device=tensor.device)
    lying = plain(tensor)
    places = torch.arange(found.numel(), device=tensor.device)
    found[torch.as_strided(places, lying.shape, lying.stride(), lying.storage_offset()).reshape(-1)] = True
    return found.repeat_interleave(size)


def may_write(subject: Subject, case: Case, margin: int = 0) -> set[int]:
    """Return the numbers of the tensors that an operator may write to: by its schema, or else by what its reference does."""
    if subject.schema is not None:
        return {number for number, name in enumerate(owners(case, subject.schema)) if name in subject.writes}
    assert subject.reference is not None
    call = case.make(subject.device, margin=margin)
    before = snapshots(call)
    subject.call(call, subject.reference)
    return {each.number for each in before if each.written() or each.metadata_changes()}
