"""Gradients in narrow dtypes, and of numbers at the limits of a dtype; other properties use ordinary float64 and float32."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.calls.specs import Drawing
from opkit.contract.prop import CallRefused, NotApplicable, Property, Violation, drawn, swept
from opkit.contract.properties.gradients import gradient_property, needs_reference
from opkit.contract.subject import Subject
from opkit.contract.traced import derivatives as d
from opkit.contract.traced.derivatives import AutogradGraph, Gradients

_NARROW = (torch.bfloat16, torch.float16)
_SIZES = (1025, 1, 257, 3, 65, 17, 513, 2, 0)
_DRAWN = Drawing(fills=("positive", "normal"), dtypes=_NARROW, largest=max(_SIZES), elements=8192)
_LEVEL = Drawing(fills=("level", "constant", "zeros"), dtypes=(torch.float32, torch.float64), largest=65, elements=256)
_NEAR = 1e-3  # of a gradient: where the reference's own is further off, it decides nothing
_RUNS = 3  # of the reference, with numbers that are off by one rounding
_ROUNDINGS = 4.0  # of a result and its inputs
_OWN = 8.0  # times the reference's own error in the same dtype
_SMALL = 0.01  # of a rounding of the largest number


def _skip(subject: Subject) -> str:
    listed = {dtype for each in subject.spec.tensors() for dtype in each.dtypes or ()}
    if not listed & {*_NARROW}:
        return "no argument is of a narrow dtype"
    return needs_reference(subject)


def _incoming(graph: AutogradGraph) -> list[torch.Tensor]:
    """Return positive incoming gradients: a sum in a narrow dtype stops growing once terms are smaller than its steps."""
    return [each.abs() for each in d.incoming(graph)]


@d.steady
def _check(subject: Subject, case: Case) -> None:
    if case.dtype not in _NARROW:
        return
    numbers = d.candidates(subject, case)
    reference = d.trace(subject, case, numbers, subject.reference)
    if not reference.attached:
        raise NotApplicable("the reference has no gradient")
    wide = d.trace(subject, case, numbers, subject.reference, wide=True)
    own, exact = (_pulled(graph, _incoming(reference)) for graph in (reference, wide))
    ours = d.trace(subject, case, numbers)
    if reason := d.forward_only(ours):
        raise NotApplicable(reason)
    if ours.rounds or [o.shape for o in ours.outputs] != [o.shape for o in reference.outputs]:
        return
    got = _pulled(ours, _incoming(ours))
    moved = [_moved(subject, case, numbers, ours, seed) for seed in range(_RUNS)]
    for position, number in enumerate(numbers):
        runs = [run[position] for run in moved if run is not None]
        found = _beyond(got[position], own[position], exact[position], [each for each in runs if each is not None])
        if found:
            raise Violation(
                f"the gradient of {d.argument(subject, case, number)} is not the reference's in float64: {found}"
            )


def _pulled(graph: AutogradGraph, grads: Sequence[torch.Tensor]) -> Gradients:
    try:
        return graph.vjp([g.to(o.dtype) for g, o in zip(grads, graph.outputs, strict=True)])
    except Exception as error:  # gradients.accepts checks whether it may
        raise CallRefused(error) from error


def _moved(subject: Subject, case: Case, numbers: Sequence[int], ours: AutogradGraph, seed: int) -> Gradients | None:
    """Return the reference's float64 gradients for numbers and incoming gradients that are off by a rounding of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.finfo(case.dtype or torch.float32).eps / 2

    def off(tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
        return tensor * (1 + unit * signs)

    call, inputs = d.arguments_requiring_grad(subject, case, numbers, wide=True)
    with torch.no_grad():
        for tensor in d.tensors_of_case(case, call):
            if tensor.is_floating_point() and 0 not in tensor.stride():
                tensor.copy_(off(tensor))
    try:
        outputs = subject.call(call, subject.reference).tensors()
        graph = AutogradGraph(call, inputs, tuple(o for o in outputs if o.is_floating_point()))
        return graph.vjp([off(g.to(o.dtype)) for g, o in zip(_incoming(ours), graph.outputs, strict=True)])
    except Exception:  # the reference may not accept the moved numbers: they add nothing to the tolerance
        return None


def _beyond(
    got: torch.Tensor | None, own: torch.Tensor | None, exact: torch.Tensor | None, moved: Sequence[torch.Tensor]
) -> str:
    """Describe where a gradient is off by more than rounding explains, or return ""."""
    if got is None or own is None or exact is None or got.shape != exact.shape or not moved:
        return ""
    a, b, unit = got.detach().double(), exact.detach().double(), torch.finfo(got.dtype).eps / 2
    spread = torch.stack([(each.detach().double() - b).abs() for each in moved]).amax(0)
    allowed = _ROUNDINGS * (unit * b.abs() + spread) + _OWN * (own.detach().double() - b).abs()
    allowed = allowed + _SMALL * unit * d.magnitude([b]) + torch.finfo(got.dtype).smallest_normal
    wrong = ((a - b).abs() > allowed) & b.isfinite() & allowed.isfinite()
    return d.where(a, b, wrong) if bool(wrong.any()) else ""


# ---- equal numbers, and those at the limits of their dtype ---------------------------------------------------------------


@d.steady
def _ties(subject: Subject, case: Case) -> None:
    numbers = d.candidates(subject, case)
    reference, narrow, wide = d.expected(subject, case, numbers)
    if not reference.attached:
        raise NotApplicable("the reference has no gradient")
    ours = d.trace(subject, case, numbers)
    if reason := d.forward_only(ours):
        raise NotApplicable(reason)
    if [o.shape for o in ours.outputs] != [o.shape for o in reference.outputs]:
        return
    grads = d.incoming(ours)
    try:
        found = ours.vjp(grads)
    except Exception as error:
        raise d.not_applicable_or(CallRefused(error)) from error
    scale = d.magnitude(grads)
    for number, mine, own, right in zip(numbers, found, narrow, wide, strict=True):
        if mine is None or own is None or right is None or mine.shape != right.shape:
            continue  # gradients.lost and gradients.reference report it
        exact = right.to(own.dtype)
        sure = own.isfinite() & exact.isfinite() & ((own - exact).abs() <= _NEAR * (scale + exact.abs()))
        if wrong := d.mismatch(torch.where(sure, mine, exact), right, scale, own):
            raise Violation(f"the gradient of {d.argument(subject, case, number)} is not the reference's: {wrong}")


PROPERTIES: tuple[Property, ...] = (
    gradient_property(
        "gradients.ties",
        rule="Where numbers are all equal, or at the limits of their dtype, gradients are the reference's, if that is correct.",
        defect="probabilities from a log-sum-exp, which of huge logits is the maximum itself; all ties taken for the maximum",
        check=_ties,
        cases=drawn(_LEVEL),
        share=0.3,
        cost=0.002,
        skip=needs_reference,
    ),
    gradient_property(
        "gradients.dtypes",
        rule="In bfloat16 and float16, gradients are the reference's in float64, to what rounding explains.",
        defect="a backward that adds up in 16 bits, a cast that is forgotten, a kernel that was written for float32 alone",
        check=_check,
        cases=drawn(_DRAWN),
        first=swept(_DRAWN, sizes=_SIZES),
        cost=0.004,
        skip=_skip,
    ),
)
