"""Vector-Jacobian products of one call, for any of its inputs, and how near two of them must be."""

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
from opkit.contract.observed.outcome import same_bits
from opkit.contract.prop import CallRefused, NotApplicable, Violation
from opkit.contract.subject import Subject

Gradients = list[torch.Tensor | None]

_SMOOTH = ("normal", "positive")  # without ties and exact zeros, where subgradients are a matter of choice
_WIDTH = 2.0
_MOST_SUBSETS = 8
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
_ROUGH = (6e-2, 6e-2)  # narrower ones


def smooth_cases(
    elements: int = 256, dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32), **how: Any
) -> Callable[[Subject], SearchStrategy[Case]]:
    """Small calls on ordinary numbers, in wide dtypes where the specs allow them, away from bounds."""

    def cases(subject: Subject) -> SearchStrategy[Case]:
        drawing = Drawing(fills=_SMOOTH, dtypes=tuple(dtypes), largest=65, elements=elements, **how)
        return subject.spec.cases(drawing).map(lambda case: case.map(lambda _, tensor: _inside(tensor)))

    return cases


def _inside(tensor: TensorCase) -> TensorCase:
    """Numbers that are bounded on one side only would be clamped to the bound, all equal: draw between two."""
    if not tensor.differentiable or (tensor.low is None) == (tensor.high is None):
        return tensor
    if tensor.low is None:
        assert tensor.high is not None
        return dataclasses.replace(tensor, low=tensor.high - _WIDTH)
    return dataclasses.replace(tensor, high=tensor.low + _WIDTH)


def no_candidates(subject: Subject) -> str:
    """Why gradients cannot be asked for, or nothing."""
    if not subject.functional:
        return "it writes to its arguments"
    return ""


def candidates(subject: Subject, case: Case) -> tuple[int, ...]:
    """The numbers of the case's tensors for which the operator promises gradients.

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
        if all(item.optional or not _may_have_gradient(item) for item in subject.spec.tensors()):
            raise NotApplicable("no argument is floating-point and declared differentiable")
        raise CallRefused(ValueError("no argument of this call is floating-point"))
    return found


def _may_have_gradient(item: TensorArgument) -> bool:
    return item.differentiable and any(d.is_floating_point or d.is_complex for d in item.dtypes or (torch.float32,))


def _promised(spec: Any, value: Any, wanted: bool = True) -> Iterator[tuple[TensorCase, bool]]:
    """Each tensor of the case in order, and whether its spec promises a gradient."""
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
    """Each alone, all but each, pairs; not all together. At most eight.

    >>> subsets((0, 1, 3))
    [(0,), (1,), (3,), (1, 3), (0, 3), (0, 1)]
    """
    single = [(number,) for number in numbers]
    rest = [tuple(other for other in numbers if other != number) for number in numbers]
    several = dict.fromkeys([*single, *rest, *itertools.combinations(numbers, 2)])
    return [each for each in several if each and len(each) < len(numbers)][: max(_MOST_SUBSETS, len(numbers))]


# ---- one call and its graph --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AutogradGraph:
    """A call that was made with gradients required, its inputs that require them, and its differentiable results."""

    call: Call
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    @property
    def attached(self) -> tuple[int, ...]:
        """The numbers of outputs that have a gradient."""
        return tuple(number for number, output in enumerate(self.outputs) if output.requires_grad)

    @property
    def rounds(self) -> bool:
        """Whether a result is narrower than an input: steps of its dtype hide how it moves with the input."""
        return any(o.dtype.to_real().itemsize < t.dtype.to_real().itemsize for o in self.outputs for t in self.inputs)

    def vjp(self, incoming: Sequence[torch.Tensor | None], create_graph: bool = False) -> Gradients:
        """The gradients of the inputs; an output whose incoming gradient is None is not used."""
        pairs = [(o, g) for o, g in zip(self.outputs, incoming, strict=True) if g is not None and o.requires_grad]
        if not pairs:
            return [None] * len(self.inputs)
        outputs, grads = zip(*pairs, strict=True)
        return list(
            torch.autograd.grad(
                outputs, self.inputs, grads, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
        )


def made(
    subject: Subject, case: Case, numbers: Sequence[int], wide: bool = False
) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """The case's arguments, of which the tensors ``numbers`` are leaves that require gradients; these leaves."""
    chosen = set(numbers)
    plain = case.make(subject.device)
    order: list[torch.Tensor] = cased(case, plain)
    changed = {id(tensor): _leaf(tensor, number in chosen, wide) for number, tensor in reversed([*enumerate(order)])}
    call = plain.map(lambda tensor: changed.get(id(tensor), tensor))
    return call, tuple(changed[id(order[number])] for number in numbers)


def cased(case: Case, call: Call) -> list[torch.Tensor]:
    """The call's tensors that come from the case, in the case's order: constants are left out."""
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
        CallRefused: it raised.
    """
    call, inputs = made(subject, case, numbers, wide)
    torch.default_generator.manual_seed(0)  # equal calls draw equal numbers
    outcome = subject.call(call, function)
    outputs = tuple(leaf for leaf in outcome.tensors() if leaf.is_floating_point() or leaf.is_complex())
    return AutogradGraph(call, inputs, outputs)


def incoming(graph: AutogradGraph, seed: int = 0) -> list[torch.Tensor]:
    """Random incoming gradients, none of them ones, for every output."""
    generator = torch.Generator().manual_seed(seed + 77)
    return [
        torch.randn(o.shape, generator=generator, dtype=_wide(o.dtype)).to(o.dtype).to(o.device) for o in graph.outputs
    ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def forward_only(graph: AutogradGraph) -> str:
    """Why the operator has no gradients where torch itself says so when they are asked for, or nothing."""
    nodes = {type(o.grad_fn).__name__ if o.grad_fn is not None else "" for o in graph.outputs}
    if nodes and all(name.startswith("WarnNotImplemented") for name in nodes):
        return (
            "nothing is registered for autograd: torch warns of it, and gives no gradient. Register one with "
            "torch.library.register_autograd"
        )
    return ""


def planned(error: BaseException) -> bool:
    """Whether an exception says that something is not there, not that something went wrong."""
    text = str(error)
    return isinstance(error, NotImplementedError) or type(error).__name__ == "RuleError" or bool(_PLANNED.search(text))


def supported(subject: Subject, case: Case) -> tuple[AutogradGraph, tuple[int, ...], Gradients, list[torch.Tensor]]:
    """The graph for every input for which the operator has gradients, their numbers, the gradients, what came in.

    Raises:
        NotApplicable: it says that it has none.
        CallRefused: it raised otherwise.
    """
    everything = candidates(subject, case)
    try:
        return _plain(subject, case, everything)
    except CallRefused as refusal:
        if len(everything) == 1 or not planned(refusal.error):
            raise told(refusal) from refusal
        fewer = tuple(number for number in everything if _works(subject, case, number))
        if not fewer:
            raise told(refusal) from refusal
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


def told(refusal: CallRefused) -> CallRefused | NotApplicable:
    error = refusal.error
    if planned(error) and not isinstance(error, (TypeError, ValueError, IndexError)):
        return NotApplicable(f"it says that it has no gradient: {_first_line(error)}")
    return refusal


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def expected(subject: Subject, case: Case, numbers: Sequence[int]) -> tuple[AutogradGraph, Gradients, Gradients]:
    """The reference's graph, its gradients at the case's dtypes, and those in float64 (the same where that is refused).

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
    """How far gradients of this dtype may be apart: relative to the largest, and to what came in."""
    return _NEAR.get(dtype, _ROUGH)


def magnitude(tensors: Sequence[torch.Tensor | None]) -> float:
    """The largest finite absolute value; 0 where there is none."""
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
    """Where two gradients differ by more than rounding explains, or nothing. None is zero.

    Args:
        got: the operator's.
        wanted: what it should be, perhaps in a wider dtype.
        scale: how large what came in was.
        own_error: the reference's at the same dtype; what it is away from ``wanted`` is allowed eight times.
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
    """The first of the elements that are wrong, in words."""
    at = int(wrong.reshape(-1).nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), a.shape)] if a.dim() else []
    got, wanted = a.reshape(-1)[at].item(), b.reshape(-1)[at].item()
    return f"at {index} it is {_short(got)}, expected {_short(wanted)} ({int(wrong.sum())} of {a.numel()} elements)"


def _short(value: Any) -> str:
    return f"{value:.7g}"


def finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every number is finite: a mean over nothing is not, and neither is its derivative."""
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)


def clearly_nonzero(gradient: torch.Tensor | None, scale: float) -> bool:
    """Whether a gradient is no rounding error away from zero."""
    return gradient is not None and magnitude([gradient]) > 1e-3 * max(scale, 1e-30)


def vanished(gradient: torch.Tensor | None) -> bool:
    """Whether there is no gradient, or nothing but zeros."""
    return gradient is None or not bool(gradient.detach().abs().sum())


def steady(check: Callable[[Subject, Case], None]) -> Callable[[Subject, Case], None]:
    """The check, whose violations count where the operator gives equal results twice: others compare noise."""

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
    """A tensor of the case in words: its number among the tensors, and what it is."""
    return f"tensor {number} ({case.tensors()[number]})"
