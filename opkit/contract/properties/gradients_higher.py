"""The group ``gradients``: finite differences, second order, forward mode."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch

from opkit.contract.calls.cases import Call, Case
from opkit.contract.prop import NotApplicable, Property, Remark, Violation
from opkit.contract.properties.gradients import gradient_property
from opkit.contract.subject import CallRefused, Subject
from opkit.contract.traced import derivatives as d
from opkit.contract.traced.derivatives import AutogradGraph, Gradients
from opkit.op.rules.derived import is_differentiable_once

_FACTOR = 20.0  # how much more rounding a second derivative may have than a first
_STEPS = (2e-6, 8e-6, 3.2e-5)
_EXACT = (torch.float64, torch.complex128)
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


# ---- finite differences ------------------------------------------------------------------------------------------------


def _finite(subject: Subject, case: Case) -> None:
    wide = widened(subject, case)
    graph, numbers, got, grads = d.supported(subject, wide)
    if not graph.attached:
        raise NotApplicable("no result requires grad: only a reference can show whether one should")
    if graph.rounds:
        return
    for number, tensor, mine in zip(numbers, graph.inputs, got, strict=True):
        u = direction(tensor, number)
        found = slope(along(subject, wide, numbers, number, u, lambda moved: _weighted(moved.outputs, grads)))
        derivative = inner(mine, u)
        if not found.differs(derivative, size(mine, u)) or _reference_agrees(subject, wide, numbers, number, mine):
            continue
        if found.constant:
            raise Remark(f"{d.argument(subject, wide, number)} has a gradient, but results are a step function of it")
        raise Violation(
            f"the gradient of {d.argument(subject, wide, number)} is {_state(mine)}: in a random direction it gives "
            f"{derivative:.7g}, finite differences {found.value:.7g}"
        )


def _weighted(outputs: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]) -> float:
    return math.fsum(inner(weight, output) for output, weight in zip(outputs, weights, strict=False))


def _state(gradient: torch.Tensor | None) -> str:
    return "None" if gradient is None else "zero" if d.vanished(gradient) else "wrong"


def _reference_agrees(
    subject: Subject, case: Case, numbers: Sequence[int], number: int, mine: torch.Tensor | None
) -> bool:
    """Return whether an independent reference has this gradient, so that it is deliberate: a straight-through estimate."""
    if subject.reference is None or _is_own_body(subject):
        return False
    try:
        reference, right, _ = d.expected(subject, case, numbers)
    except CallRefused:
        return False
    return bool(reference.attached) and not d.mismatch(mine, right[list(numbers).index(number)], 1.0)


def _is_own_body(subject: Subject) -> bool:
    """Return whether the reference is the operator's body, which shares every mistake with it."""
    operator = subject.operator
    return operator is not None and subject.reference is operator._operator.function  # pyright: ignore[reportPrivateUsage]


# ---- second order ------------------------------------------------------------------------------------------------------


def _second_gradients(graph: AutogradGraph, grads: Sequence[torch.Tensor]) -> tuple[Gradients, Gradients] | None:
    """Return gradients, and gradients of their weighted sum; None if they have no graph."""
    first = graph.vjp(grads, create_graph=True)
    if any(g is not None and is_differentiable_once(g) for g in first):
        raise NotImplementedError("it is marked with once_differentiable")
    parts = [(g, direction(g, n + 50)) for n, g in enumerate(first) if g is not None and g.requires_grad]
    if not parts:
        return None
    outputs, weights = zip(*parts, strict=True)
    targets = [*graph.inputs, *grads]
    return first, list(torch.autograd.grad(outputs, targets, weights, allow_unused=True))


def _leaves(graph: AutogradGraph) -> list[torch.Tensor]:
    return [g.detach().requires_grad_() for g in d.incoming(graph)]


def _second(subject: Subject, case: Case) -> None:
    graph, numbers, _, _ = d.supported(subject, case)
    if not graph.attached:
        raise NotApplicable("no result requires grad")
    grads = _leaves(graph)
    try:
        found = _second_gradients(graph, grads)
    except Exception as error:
        raise NotApplicable(f"it cannot be differentiated twice: {type(error).__name__}: {error}") from error
    if found is None:
        raise Remark(
            "gradients have no graph: torch raises where they are differentiated again. Declare it with once_differentiable"
        )
    if _by_reference(subject, case, numbers, found):
        return
    _by_differences(subject, case, numbers, found)


def _by_reference(subject: Subject, case: Case, numbers: Sequence[int], found: tuple[Gradients, Gradients]) -> bool:
    """Compare with the reference's second derivatives. Return False if it has none to compare with."""
    if subject.reference is None:
        return False
    try:
        reference = d.trace(subject, case, numbers, subject.reference)
        right = _second_gradients(reference, _leaves(reference))
    except Exception:  # autograd cannot differentiate the reference twice
        return False
    if right is None or len(right[1]) != len(found[1]) or _disagree(numbers, found[0], right[0]):
        return False
    scale = max(1.0, d.magnitude(right[1]))
    for position, (mine, wanted) in enumerate(zip(found[1], right[1], strict=True)):
        if wrong := d.mismatch(mine, wanted, scale, factor=_FACTOR):
            of = d.argument(subject, case, numbers[position]) if position < len(numbers) else "the incoming gradient"
            raise Violation(f"the second derivative by {of} is {_state(mine)}, not the reference's: {wrong}")
    return True


def _disagree(numbers: Sequence[int], mine: Gradients, right: Gradients) -> bool:
    """Return whether first gradients differ, which other properties report."""
    scale = max(1.0, d.magnitude(right))
    return any(d.mismatch(a, b, scale, factor=_FACTOR) for _, a, b in zip(numbers, mine, right, strict=True))


def _by_differences(subject: Subject, case: Case, numbers: Sequence[int], found: tuple[Gradients, Gradients]) -> None:
    wide = widened(subject, case)
    graph, _, first, grads = d.supported(subject, wide)
    if wide is not case:
        again = _second_gradients(graph, _leaves(graph))
        if again is None:
            return
        found = again
    taken = [g is not None and g.requires_grad for g in found[0]]
    weights = [direction(g, n + 50) if g is not None else None for n, g in enumerate(first)]
    used = [w if use else None for w, use in zip(weights, taken, strict=True)]
    for position, number in enumerate(numbers):
        u = direction(graph.inputs[position], number)
        seen = slope(along(subject, wide, numbers, number, u, lambda moved: _pulled(moved, grads, used)))
        second = inner(found[1][position], u)
        if seen.differs(second, size(found[1][position], u) + 1.0):
            raise Violation(
                f"the second derivative by {d.argument(subject, wide, number)} is {_state(found[1][position])}: in a random "
                f"direction it gives {second:.7g}, finite differences of the gradient {seen.value:.7g}"
            )


def _pulled(moved: AutogradGraph, grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None]) -> float:
    return math.fsum(inner(w, g) for g, w in zip(moved.vjp(grads), weights, strict=True))


# ---- forward mode ------------------------------------------------------------------------------------------------------


def _forward(subject: Subject, case: Case) -> None:
    graph, numbers, got, grads = d.supported(subject, case)
    if not graph.attached:
        raise NotApplicable("no result requires grad")
    if graph.rounds or not d.finite(graph.outputs):
        return
    lost: list[int] = []
    seen = 0
    for number, tensor, mine in zip(numbers, graph.inputs, got, strict=True):
        u = direction(tensor, number)
        tangents = _tangents(subject, case, number, u)
        wanted, scale = inner(mine, u), size(mine, u)
        near = d.tolerances(tensor.dtype)[0]
        if all(t is None or d.vanished(t) for t in tangents):
            lost += [number] if abs(wanted) > 10 * near * (scale + d.magnitude(grads)) else []
            continue
        seen += 1
        value = _weighted(tangents, grads)
        scale += sum(size(t, g) for t, g in zip(tangents, grads, strict=False))
        if not abs(value - wanted) <= 10 * near * (scale + d.magnitude(grads)) and math.isfinite(wanted):
            raise Violation(
                f"in forward mode, the derivative by {d.argument(subject, case, number)} in a random direction is {value:.7g}; "
                f"by the backward it is {wanted:.7g}"
            )
    _raise_if_lost(subject, case, lost, seen)


def _raise_if_lost(subject: Subject, case: Case, lost: Sequence[int], seen: int) -> None:
    if lost and (seen or subject.operator is not None):
        raise Violation(f"in forward mode, the tangent of {d.argument(subject, case, lost[0])} is lost")
    if lost:  # torch.library drops tangents of operators without a rule
        raise NotApplicable("it has no forward mode: torch gives no tangent")


def _tangents(subject: Subject, case: Case, number: int, u: torch.Tensor) -> list[torch.Tensor | None]:
    call, inputs = d.arguments_requiring_grad(subject, case, (number,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0].detach(), u)
        torch.default_generator.manual_seed(0)
        outcome = _called(subject, call.map(lambda tensor: dual if tensor is inputs[0] else tensor))
        outputs = [t for t in outcome if t.is_floating_point() or t.is_complex()]
        found = [torch.autograd.forward_ad.unpack_dual(t).tangent for t in outputs]
        return [None if t is None else t.detach().clone() for t in found]


def _called(subject: Subject, call: Call) -> list[torch.Tensor]:
    try:
        return subject.call(call).tensors()
    except CallRefused as refusal:
        raise NotApplicable(f"it has no forward mode: {refusal}") from refusal


# ---- directional derivatives by central differences -----------------------------------------------------------------


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
    outputs = found.differentiable()
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
        return value(AutogradGraph(call, inputs, subject.call(call).differentiable()))

    return moved


_property = functools.partial(gradient_property, cases=d.smooth_cases(elements=64), cost=0.004)

PROPERTIES: tuple[Property, ...] = (
    _property(
        "gradients.finite",
        rule="Gradients are those of the function that is computed: finite differences in float64 agree.",
        defect="a backward of another formula than the forward, also where there is no reference to say so",
        check=_finite,
        cases=d.smooth_cases(elements=64, dtypes=(torch.float64,)),
    ),
    _property(
        "gradients.second",
        rule="An operator that can be differentiated twice has the right second derivatives.",
        defect="intermediate values saved without a graph, a detach in the backward: second derivatives silently lose terms",
        check=_second,
    ),
    _property(
        "gradients.forward",
        rule="Forward mode, where there is one, agrees with the backward.",
        defect="a jvp of another formula, or a tangent that is lost",
        check=_forward,
        cost=0.002,
    ),
)
