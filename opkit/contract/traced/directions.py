"""This module computes directional derivatives by central differences, and estimates their error."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.prop import CallRefused, NotApplicable
from opkit.contract.subject import Subject
from opkit.contract.traced import derivatives as d

_STEPS = (2e-6, 8e-6, 3.2e-5)
_EXACT = (torch.float64, torch.complex128)
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@dataclasses.dataclass(frozen=True)
class Slope:
    """A derivative in one direction.

    Attributes:
        value: the derivative by the smallest step.
        doubt: the distance to derivatives by other steps, and by one side alone.
        constant: whether the function does not change at all, as a step function does not.
    """

    value: float
    doubt: float
    constant: bool

    def differs(self, derivative: float, scale: float) -> bool:
        """Return whether ``derivative`` certainly differs, for terms of magnitude ``scale``."""
        off = abs(derivative - self.value)
        return off > 1e-3 * max(abs(derivative), abs(self.value)) + 1e-6 * scale + 20 * self.doubt


def slope(function: Callable[[float], float]) -> Slope:
    """Return the derivative of ``function`` at 0.

    >>> round(slope(lambda t: (1 + t) ** 2).value, 6)
    2.0
    >>> slope(abs).doubt  # a kink: the derivatives from the left and from the right disagree
    1.0
    """
    middle = function(0.0)
    sides = [(function(-step), function(step), step) for step in _STEPS]
    central = [(after - before) / (2 * step) for before, after, step in sides]
    one_sided = [abs((after - middle) - (middle - before)) / (2 * step) for before, after, step in sides]
    curvature = min(one_sided)  # falls with the step where the function is smooth
    spread = max(central) - min(central)
    constant = all(before == middle == after for before, after, _ in sides)
    return Slope(central[0], spread + curvature if spread == spread else float("inf"), constant)


def inner(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Return the real inner product; None counts as zero."""
    if a is None or b is None:
        return 0.0
    a, b = (each.detach().to(torch.complex128 if each.is_complex() else torch.float64) for each in (a, b))
    if a.is_complex() or b.is_complex():
        return float((a.to(torch.complex128).conj() * b.to(torch.complex128)).real.sum())
    return float((a * b).sum())


def size(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Return the sum of the magnitudes of the terms of :func:`inner`."""
    return 0.0 if a is None or b is None else inner(a.detach().abs(), b.detach().abs())


def direction(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a random tensor of this shape and dtype."""
    generator = torch.Generator().manual_seed(seed + 1234)
    wide = torch.complex128 if like.dtype.is_complex else torch.float64
    return torch.randn(like.shape, generator=generator, dtype=wide).to(like.dtype).to(like.device)


def widened(subject: Subject, case: Case) -> Case:
    """Return the case in float64, which finite differences need; where no spec lists dtypes, after a trial call.

    Raises:
        NotApplicable: float64 is not among the dtypes.
        CallRefused: this case has other dtypes.
    """
    numbers = d.candidates(subject, case)
    narrow = {case.tensors()[number].dtype for number in numbers} - set(_EXACT)
    if not narrow:
        return case
    listed = [item.dtypes for item in subject.spec.tensors() if item.dtypes is not None]
    if any(torch.float64 in dtypes or torch.complex128 in dtypes for dtypes in listed):
        raise CallRefused(ValueError("this example is not in float64"))
    if listed or not narrow <= set(_WIDER):
        raise NotApplicable("finite differences need float64, which is not among the dtypes")
    wide = case.map(lambda _, tensor: dataclasses.replace(tensor, dtype=_WIDER.get(tensor.dtype, tensor.dtype)))
    _trial(subject, case, wide)
    return wide


def _trial(subject: Subject, case: Case, wide: Case) -> None:
    """Raise NotApplicable unless the operator computes in float64, which its author did not list."""
    call, _ = d.arguments_requiring_grad(subject, case, (), wide=True)
    narrow = d.trace(subject, case, ())
    found = subject.call(call)
    outputs = [t for t in found.tensors() if t.is_floating_point() or t.is_complex()]
    scale = max(1.0, d.magnitude(narrow.outputs))
    for a, b in zip(outputs, narrow.outputs, strict=False):
        if a.dtype not in _EXACT or d.mismatch(b, a, scale, factor=10):
            raise NotApplicable("finite differences need float64, which the operator does not compute in")
    if len(outputs) != len(narrow.outputs):
        raise NotApplicable("finite differences need float64, where the operator returns other results")
    assert wide.tensors()


def along(
    subject: Subject,
    case: Case,
    numbers: Sequence[int],
    number: int,
    u: torch.Tensor,
    value: Callable[[d.AutogradGraph], float],
) -> Callable[[float], float]:
    """Return ``value`` of the operator's results as a function of how far tensor ``number`` is moved along ``u``."""

    def moved(step: float) -> float:
        call, inputs = d.arguments_requiring_grad(subject, case, numbers)
        tensor = inputs[list(numbers).index(number)]
        replaced = (tensor.detach() + step * u).requires_grad_(tensor.requires_grad)
        inputs = tuple(replaced if each is tensor else each for each in inputs)
        call = call.map(lambda each: replaced if each is tensor else each)
        torch.default_generator.manual_seed(0)
        found = subject.call(call)
        outputs = tuple(t for t in found.tensors() if t.is_floating_point() or t.is_complex())
        return value(d.AutogradGraph(call, inputs, outputs))

    return moved
