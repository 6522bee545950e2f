"""This module computes vector-Jacobian products of one call, for any of its inputs, and compares them within tolerances."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy

from opkit.contract.calls.cases import Call, Case, TensorCase
from opkit.contract.calls.specs import Drawing, TensorArgument
from opkit.contract.compare.outcome import first_index, same_bits
from opkit.contract.prop import NotApplicable, Violation
from opkit.contract.subject import CallRefused, Subject

Gradients = list[torch.Tensor | None]

_SMOOTH = ("normal", "positive")  # no ties and no exact zeros, where operators may choose a subgradient
_WIDTH = 2.0
_MAX_SUBSETS = 8
_PLANNED = re.compile(
    r"no autograd formula|not (yet )?(been )?implemented|(not|n't) (be )?differentiab|does(n't| not) support|not support|"
    r"unsupported|derivative|differentiate twice|register_autograd|once_differentiable",
    re.IGNORECASE,
)
_NEAR = {
    torch.float64: (1e-5, 1e-8),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (2e-2, 2e-2),
}
_NEAR |= {torch.complex128: _NEAR[torch.float64], torch.complex64: _NEAR[torch.float32]}
_ROUGH = (6e-2, 6e-2)  # for narrower dtypes


def smooth_cases(
    elements: int = 256, dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32), **how: Any
) -> Callable[[Subject], SearchStrategy[Case]]:
    """Return a property's ``cases``: small calls on ordinary numbers, in wide dtypes where the specs allow, away from bounds."""

    def cases(subject: Subject) -> SearchStrategy[Case]:
        drawing = Drawing(fills=_SMOOTH, dtypes=tuple(dtypes), largest=65, elements=elements, **how)
        return subject.spec.cases(drawing).map(lambda case: case.map(lambda _, tensor: _inside(tensor)))

    return cases


def _inside(tensor: TensorCase) -> TensorCase:
    """Add a second bound: numbers with one bound would be clamped to it and be equal."""
    if not tensor.differentiable or (tensor.low is None) == (tensor.high is None):
        return tensor
    if tensor.low is None:
        assert tensor.high is not None
        return dataclasses.replace(tensor, low=tensor.high - _WIDTH)
    return dataclasses.replace(tensor, high=tensor.low + _WIDTH)


def no_candidates(subject: Subject) -> str:
    """Return why the operator cannot have gradients, or ""."""
    if not subject.functional:
        return "it writes to its arguments"
    return ""


def candidates(subject: Subject, case: Case) -> tuple[int, ...]:
    """Return the numbers of the case's tensors for which the operator promises gradients.

    Raises:
        NotApplicable: no argument can have one, whatever the case.
    """
    promised = [*_promised((subject.spec.args, dict(subject.spec.kwargs)), (case.args, dict(case.kwargs)))]
    found = tuple(
        number
        for number, (tensor, wanted) in enumerate(promised)
        if wanted and tensor.differentiable and tensor.same_as is None
    )
    if not found:
        promising = [item for item in subject.spec.tensors() if item.differentiable and not item.optional]
        dtypes = [dtype for item in promising for dtype in item.dtypes or (torch.float32,)]
        if not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
            raise NotApplicable("no argument is floating-point and declared differentiable")
        raise CallRefused(ValueError("no argument of this call is floating-point"))
    return found


def _promised(spec: Any, value: Any, wanted: bool = True) -> Iterator[tuple[TensorCase, bool]]:
    """Yield each tensor of the case in order, and whether its spec promises a gradient."""
    if isinstance(value, TensorCase):
        yield value, wanted and not (isinstance(spec, TensorArgument) and not spec.differentiable)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _promised(spec.get(name), item, wanted)
    elif isinstance(value, (list, tuple)):
        parallel = spec if isinstance(spec, (list, tuple)) and len(spec) == len(value) else [None] * len(value)
        for inner, item in zip(parallel, value, strict=True):
            yield from _promised(inner, item, wanted)


def subsets(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return subsets: each number alone, all but each, pairs; not all together; at most eight.

    >>> subsets((0, 1, 3))
    [(0,), (1,), (3,), (1, 3), (0, 3), (0, 1)]
    """
    single = [(number,) for number in numbers]
    rest = [tuple(other for other in numbers if other != number) for number in numbers]
    several = dict.fromkeys([*single, *rest, *itertools.combinations(numbers, 2)])
    return [each for each in several if each and len(each) < len(numbers)][: max(_MAX_SUBSETS, len(numbers))]


# ---- one call and its graph --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AutogradGraph:
    """A call with gradients required, the inputs that require them, and the differentiable results."""

    call: Call
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    @property
    def attached(self) -> tuple[int, ...]:
        """The numbers of outputs that have a gradient."""
        return tuple(number for number, output in enumerate(self.outputs) if output.requires_grad)

    @property
    def rounds(self) -> bool:
        """Whether a result has a narrower dtype than an input: its rounding hides how it changes with the input."""
        return any(o.dtype.to_real().itemsize < t.dtype.to_real().itemsize for o in self.outputs for t in self.inputs)

    def vjp(self, incoming: Sequence[torch.Tensor | None], create_graph: bool = False) -> Gradients:
        """Return the gradients of the inputs; an output whose incoming gradient is None is not used."""
        pairs = [(o, g) for o, g in zip(self.outputs, incoming, strict=True) if g is not None and o.requires_grad]
        if not pairs:
            return [None] * len(self.inputs)
        outputs, grads = zip(*pairs, strict=True)
        return list(
            torch.autograd.grad(
                outputs, self.inputs, grads, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
        )


def arguments_requiring_grad(
    subject: Subject, case: Case, numbers: Sequence[int], wide: bool = False
) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """Return the case's arguments, in which the tensors ``numbers`` are leaves that require gradients, and these leaves."""
    chosen = set(numbers)
    plain = case.make(subject.device)
    order: list[torch.Tensor] = tensors_of_case(case, plain)
    changed = {id(tensor): _leaf(tensor, number in chosen, wide) for number, tensor in reversed([*enumerate(order)])}
    call = plain.map(lambda tensor: changed.get(id(tensor), tensor))
    return call, tuple(changed[id(order[number])] for number in numbers)


def tensors_of_case(case: Case, call: Call) -> list[torch.Tensor]:
    """Return the call's tensors that come from the case, in the case's order, without constants."""
    constants = {id(leaf) for leaf in Call(case.args, dict(case.kwargs)).tensors()}
    return [tensor for tensor in call.tensors() if id(tensor) not in constants]


def _leaf(tensor: torch.Tensor, required: bool, wide: bool) -> torch.Tensor:
    if wide and tensor.is_floating_point():
        tensor = tensor.double()
    elif wide and tensor.is_complex():
        tensor = tensor.to(torch.complex128)
    return tensor.detach().requires_grad_(required)


def trace(
    subject: Subject, case: Case, numbers: Sequence[int], function: Callable[..., Any] | None = None, wide: bool = False
) -> AutogradGraph:
    """Call the operator, or ``function``, with gradients required of the tensors ``numbers``.

    Raises:
        CallRefused: the operator raised.
    """
    call, inputs = arguments_requiring_grad(subject, case, numbers, wide)
    torch.default_generator.manual_seed(0)  # equal calls draw equal numbers
    return AutogradGraph(call, inputs, subject.call(call, function).differentiable())


def incoming(graph: AutogradGraph, seed: int = 0) -> list[torch.Tensor]:
    """Return random incoming gradients for every output."""
    generator = torch.Generator().manual_seed(seed + 77)
    return [
        torch.randn(o.shape, generator=generator, dtype=_wide(o.dtype)).to(o.dtype).to(o.device) for o in graph.outputs
    ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def forward_only(graph: AutogradGraph) -> str:
    """Return why the operator has no gradients, if torch itself warns so when they are computed, or ""."""
    nodes = {type(o.grad_fn).__name__ if o.grad_fn is not None else "" for o in graph.outputs}
    if nodes and all(name.startswith("WarnNotImplemented") for name in nodes):
        return (
            "nothing is registered for autograd: torch warns and gives no gradient. Register one with "
            "torch.library.register_autograd"
        )
    return ""


def planned(error: BaseException) -> bool:
    """Return whether an exception says that something is not implemented, rather than that something went wrong."""
    text = str(error)
    return isinstance(error, NotImplementedError) or type(error).__name__ == "RuleError" or bool(_PLANNED.search(text))


def supported(subject: Subject, case: Case) -> tuple[AutogradGraph, tuple[int, ...], Gradients, list[torch.Tensor]]:
    """Return the graph of every input that has a gradient, their numbers, the gradients, and the incoming gradients.

    Raises:
        NotApplicable: the operator says that it has no gradient.
        CallRefused: the operator raised another exception.
    """
    everything = candidates(subject, case)
    try:
        return _plain(subject, case, everything)
    except CallRefused as refusal:
        if len(everything) == 1 or not planned(refusal.error):
            raise not_applicable_or(refusal) from refusal
        fewer = tuple(number for number in everything if _works(subject, case, number))
        if not fewer:
            raise not_applicable_or(refusal) from refusal
        return _plain(subject, case, fewer)


def _plain(
    subject: Subject, case: Case, numbers: tuple[int, ...]
) -> tuple[AutogradGraph, tuple[int, ...], Gradients, list[torch.Tensor]]:
    graph = trace(subject, case, numbers)
    if reason := forward_only(graph):
        raise NotApplicable(reason)
    grads = incoming(graph)
    try:
        return graph, numbers, graph.vjp(grads), grads
    except Exception as error:
        raise CallRefused(error) from error


def _works(subject: Subject, case: Case, number: int) -> bool:
    try:
        _plain(subject, case, (number,))
    except CallRefused:
        return False
    return True


def not_applicable_or(refusal: CallRefused) -> CallRefused | NotApplicable:
    """Return NotApplicable if the operator says that it has no gradient, or else the refusal."""
    error = refusal.error
    if planned(error) and not isinstance(error, (TypeError, ValueError, IndexError)):
        first_line = (str(error).splitlines() or [""])[0][:200]
        return NotApplicable(f"it says that it has no gradient: {first_line}")
    return refusal


def expected(subject: Subject, case: Case, numbers: Sequence[int]) -> tuple[AutogradGraph, Gradients, Gradients]:
    """Return the reference's graph, its gradients at the case's dtypes, and those in float64 (the same if it refuses float64).

    Raises:
        CallRefused: the reference raises, or has no gradient.
    """
    graph = trace(subject, case, numbers, subject.reference)
    grads = incoming(graph)
    try:
        ours = graph.vjp(grads)
    except Exception as error:
        raise CallRefused(error) from error
    if all(t.dtype in (torch.float64, torch.complex128) for t in graph.inputs):
        return graph, ours, ours
    try:
        wide = trace(subject, case, numbers, subject.reference, wide=True)
        return graph, ours, wide.vjp([g.to(o.dtype) for g, o in zip(grads, wide.outputs, strict=True)])
    except Exception:  # a reference may refuse float64
        return graph, ours, ours


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return the tolerances of gradients of this dtype: relative to the largest, and to the incoming gradients."""
    return _NEAR.get(dtype, _ROUGH)


def magnitude(tensors: Sequence[torch.Tensor | None]) -> float:
    """Return the largest finite absolute value, or 0."""
    largest = 0.0
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            values = tensor.detach().abs().double()
            largest = max(largest, float(torch.where(values.isfinite(), values, 0.0).max()))
    return largest


def mismatch(
    got: torch.Tensor | None,
    wanted: torch.Tensor | None,
    scale: float,
    own_error: torch.Tensor | None = None,
    factor: float = 1.0,
) -> str:
    """Describe where two gradients differ by more than rounding explains, or return "". None counts as zero.

    Args:
        got: the operator's gradient.
        wanted: the correct gradient, perhaps in a wider dtype.
        scale: the magnitude of the incoming gradients.
        own_error: the reference's gradient at the same dtype; eight times its distance to ``wanted`` is allowed.
        factor: widens the tolerance, for chains of operations.
    """
    if got is None or wanted is None:
        got = torch.zeros_like(wanted) if got is None and wanted is not None else got
        wanted = torch.zeros_like(got) if wanted is None and got is not None else wanted
        if got is None or wanted is None:
            return ""
    if got.shape != wanted.shape:
        return f"its shape is {list(got.shape)}, not {list(wanted.shape)}"
    near, floor = tolerances(got.dtype)
    a, b = (each.detach().to(_wide(each.dtype)) for each in (got, wanted))
    if a.is_complex() != b.is_complex():
        a, b = a.to(torch.complex128), b.to(torch.complex128)
    allowed = factor * (near * b.abs() + near * magnitude([b]) + floor * scale)
    if own_error is not None and own_error.shape == b.shape:
        allowed = allowed + 8 * (own_error.detach().to(b.dtype) - b).abs().nan_to_num(0.0, 0.0, 0.0)
    wrong = ~(
        ((a - b).abs() <= allowed) | (a == b) | (a.isnan() & b.isnan()) | ~(b.abs() < torch.finfo(torch.float32).max)
    )
    return where(a, b, wrong) if bool(wrong.any()) else ""


def where(a: torch.Tensor, b: torch.Tensor, wrong: torch.Tensor) -> str:
    """Describe the first wrong element."""
    at, index = first_index(wrong, a.shape)
    got, wanted = a.reshape(-1)[at].item(), b.reshape(-1)[at].item()
    return f"at {index} it is {got:.7g}, expected {wanted:.7g} ({int(wrong.sum())} of {a.numel()} elements)"


def finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether every number is finite: a mean of no elements is not, and neither is its derivative."""
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)


def clearly_nonzero(gradient: torch.Tensor | None, scale: float) -> bool:
    """Return whether a gradient differs from zero by more than rounding."""
    return gradient is not None and magnitude([gradient]) > 1e-3 * max(scale, 1e-30)


def vanished(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is None or all zeros."""
    return gradient is None or not bool(gradient.detach().abs().sum())


def steady(check: Callable[[Subject, Case], None]) -> Callable[[Subject, Case], None]:
    """Wrap a check so that its violations count only if equal calls give equal results; otherwise it compares noise."""

    @functools.wraps(check)
    def checked(subject: Subject, case: Case) -> None:
        try:
            check(subject, case)
        except Violation:
            if not _repeats(subject, case):
                raise NotApplicable("equal calls give different results: see behaviour") from None
            raise

    return checked


def _repeats(subject: Subject, case: Case) -> bool:
    results: list[list[torch.Tensor]] = []
    for _ in range(3):
        torch.default_generator.manual_seed(0)
        results.append(subject.run(case).detached().tensors())
    return all(len(other) == len(results[0]) and all(map(same_bits, results[0], other)) for other in results[1:])


def argument(subject: Subject, case: Case, number: int) -> str:
    """Describe a tensor of the case: its number among the tensors, and its dtype and shape."""
    return f"tensor {number} ({case.tensors()[number]})"
