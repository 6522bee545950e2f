"""The group ``gradients``: first-order gradients in reverse mode. Second order and forward mode are in ``gradients_higher``."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkit.contract import prop
from opkit.contract.calls.cases import Case
from opkit.contract.calls.tensors import INCOMING
from opkit.contract.compare.outcome import bits
from opkit.contract.prop import NotApplicable, Property, Violation
from opkit.contract.subject import CallRefused, Subject
from opkit.contract.traced import derivatives as d
from opkit.contract.traced.derivatives import AutogradGraph, Gradients


def needs_reference(subject: Subject) -> str:
    """Return why gradients cannot be compared with the reference's, or ""."""
    return d.no_candidates(subject) or prop.needs_reference(subject)


def comparable(ours: AutogradGraph, reference: AutogradGraph) -> bool:
    """Return whether results have equal shapes; if not, ``numbers`` reports it."""
    return [o.shape for o in ours.outputs] == [o.shape for o in reference.outputs]


def traced_both(
    subject: Subject, case: Case
) -> tuple[AutogradGraph, AutogradGraph, Gradients, Gradients, tuple[int, ...]]:
    """Return the operator's graph, the reference's, its gradients in the case's dtypes and in float64, and the inputs' numbers.

    Raises:
        NotApplicable: one of them has no gradient.
    """
    numbers = d.candidates(subject, case)
    reference, narrow, wide = d.expected(subject, case, numbers)
    if not reference.attached:
        raise NotApplicable("the reference has no gradient")
    ours = d.trace(subject, case, numbers)
    if reason := d.forward_only(ours):
        raise NotApplicable(reason)
    return ours, reference, narrow, wide, numbers


def _backward(subject: Subject, case: Case, graph: AutogradGraph, numbers: Sequence[int]) -> Gradients:
    """Return the operator's gradients where the reference has some: only a plain "not implemented" is a refusal."""
    try:
        return graph.vjp(d.incoming(graph))
    except Exception as error:
        if d.planned(error):
            raise d.not_applicable_or(CallRefused(error)) from error
        raise Violation(f"the backward raises {type(error).__name__}: {error}") from error


def _reference(subject: Subject, case: Case) -> None:
    ours, reference, narrow, wide, numbers = traced_both(subject, case)
    if not comparable(ours, reference):
        return
    got = _backward(subject, case, ours, numbers)
    scale = d.magnitude(d.incoming(ours))
    for number, mine, own, right in zip(numbers, got, narrow, wide, strict=True):
        if d.vanished(mine) and d.clearly_nonzero(right, scale):
            continue  # gradients.lost reports it
        if wrong := d.mismatch(mine, right, scale, own):
            raise Violation(f"the gradient of {d.argument(subject, case, number)} is not the reference's: {wrong}")


def _lost(subject: Subject, case: Case) -> None:
    ours, reference, _, wide, numbers = traced_both(subject, case)
    if not comparable(ours, reference):
        return
    scale = d.magnitude(d.incoming(reference))
    try:
        got = ours.vjp(d.incoming(ours))
    except Exception as error:
        raise d.not_applicable_or(CallRefused(error)) from error
    for number, mine, right in zip(numbers, got, wide, strict=True):
        if d.vanished(mine) and d.clearly_nonzero(right, scale):
            raise Violation(_lost_message(subject, case, number, mine, ours, right))


def _lost_message(
    subject: Subject,
    case: Case,
    number: int,
    mine: torch.Tensor | None,
    ours: AutogradGraph,
    right: torch.Tensor | None,
) -> str:
    seen = "no result requires grad" if not ours.attached else "its gradient is None" if mine is None else "it is zero"
    return (
        f"the gradient of {d.argument(subject, case, number)} is lost: {seen}, where the reference's is as large as "
        f"{d.magnitude([right]):.3g}. If none is promised, say so: tensor(..., differentiable=False)."
    )


# ---- against itself ----------------------------------------------------------------------------------------------------


def _subsets(subject: Subject, case: Case) -> None:
    _, numbers, everything, grads = d.supported(subject, case)
    scale = d.magnitude(grads)
    known = dict(zip(numbers, everything, strict=True))
    for subset in d.subsets(numbers):
        for number, mine in zip(subset, _of_subset(subject, case, subset, grads, known), strict=True):
            if wrong := d.mismatch(mine, known[number], scale):
                raise Violation(
                    f"with gradients required of {_named(subset)} alone, that of {d.argument(subject, case, number)} is "
                    f"not what it is with {_named(numbers)}: {wrong}"
                )


def _of_subset(
    subject: Subject,
    case: Case,
    subset: tuple[int, ...],
    grads: list[torch.Tensor],
    known: dict[int, torch.Tensor | None],
) -> Gradients:
    graph = d.trace(subject, case, subset)
    if len(graph.outputs) != len(grads):
        return [known[number] for number in subset]
    try:
        return graph.vjp(grads)
    except Exception as error:
        raise Violation(
            f"with gradients required of {_named(subset)} alone, the backward raises {type(error).__name__}: {error}; with "
            f"{_named([*known])} it does not. Check ctx.needs_input_grad, and return None for inputs that need no gradient."
        ) from error


def _named(numbers: Sequence[int]) -> str:
    return f"tensor{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _incoming(subject: Subject, case: Case) -> None:
    graph, numbers, _, grads = d.supported(subject, case)
    for name, (fewest, layout) in INCOMING.items():
        variants = [layout(g) if g.dim() >= fewest and g.numel() else g for g in grads]
        wanted = graph.vjp([g.clone(memory_format=torch.contiguous_format) for g in variants])
        got = _vjp_or_violation(graph, variants, f"where the incoming gradient is {name}")
        _equal(subject, case, numbers, got, wanted, grads, f"where the incoming gradient is {name}", "contiguous")


def _linear(subject: Subject, case: Case) -> None:
    graph, numbers, first, grads = d.supported(subject, case)
    if graph.rounds:
        return
    second = d.incoming(graph, seed=1)
    other = graph.vjp(second)
    mixed = graph.vjp([2 * a - 3 * b for a, b in zip(grads, second, strict=True)])
    wanted = [None if a is None or b is None else 2 * a - 3 * b for a, b in zip(first, other, strict=True)]
    scale = 5 * max(d.magnitude(grads), d.magnitude(second))
    for number, mine, right, a in zip(numbers, mixed, wanted, first, strict=True):
        if wrong := d.mismatch(mine, right, scale + 5 * d.magnitude([a])):
            raise Violation(
                f"the gradient of {d.argument(subject, case, number)} is not linear in the incoming one: for 2 a - 3 b, {wrong}. "
                "The backward must multiply by the incoming gradient."
            )
    _additive(subject, case, graph, numbers, first, grads)


def _additive(
    subject: Subject,
    case: Case,
    graph: AutogradGraph,
    numbers: Sequence[int],
    first: Gradients,
    grads: Sequence[torch.Tensor],
) -> None:
    """Check that the contributions of single results, with zero gradients for all others, add up."""
    if len(graph.attached) < 2:
        return
    parts = [
        graph.vjp([g if n == used else torch.zeros_like(g) for n, g in enumerate(grads)]) for used in graph.attached
    ]
    for position, (number, whole) in enumerate(zip(numbers, first, strict=True)):
        terms = [part[position] for part in parts]
        present = [term for term in terms if term is not None]
        total = torch.stack(present).sum(0) if present else None
        if wrong := d.mismatch(total, whole, len(parts) * (d.magnitude(grads) + d.magnitude(present))):
            raise Violation(
                f"the gradient of {d.argument(subject, case, number)} is not the sum of what each result contributes where "
                f"zeros come in for the others: {wrong}"
            )


def _undefined(subject: Subject, case: Case) -> None:
    graph, numbers, _, grads = d.supported(subject, case)
    if len(graph.attached) < 2:
        if len(graph.outputs) < 2:
            raise NotApplicable("there is one differentiable result")
        return
    for used in graph.attached:
        where = f"where only result {used} is used, and the incoming gradients of the others are undefined"
        zeros = [g if number == used else torch.zeros_like(g) for number, g in enumerate(grads)]
        got = _vjp_or_violation(graph, [g if number == used else None for number, g in enumerate(grads)], where)
        _equal(subject, case, numbers, got, graph.vjp(zeros), grads, where, "zeros")


def _vjp_or_violation(graph: AutogradGraph, grads: Sequence[torch.Tensor | None], where: str) -> Gradients:
    try:
        return graph.vjp(grads)
    except Exception as error:
        raise Violation(f"{where}, the backward raises {type(error).__name__}: {error}") from error


def _equal(
    subject: Subject,
    case: Case,
    numbers: Sequence[int],
    got: Gradients,
    wanted: Gradients,
    grads: Sequence[torch.Tensor],
    where: str,
    than: str,
) -> None:
    scale = d.magnitude(grads)
    for number, mine, right in zip(numbers, got, wanted, strict=True):
        if wrong := d.mismatch(mine, right, scale):
            raise Violation(
                f"{where}, the gradient of {d.argument(subject, case, number)} differs from that for {than}: {wrong}"
            )


def _pure(subject: Subject, case: Case) -> None:
    _, numbers, _, grads = d.supported(subject, case)
    graph = d.trace(subject, case, numbers)
    watched = _watched(graph, grads)
    before = [bits(tensor).clone() for _, tensor in watched]
    first = graph.vjp(grads)
    for (name, tensor), then in zip(watched, before, strict=True):
        if not torch.equal(bits(tensor), then):
            raise Violation(f"the backward writes to {name}")
    copies = [None if g is None else g.clone() for g in first]
    again = _vjp_or_violation(graph, grads, "in the second of two backward calls with retain_graph=True")
    _equal(subject, case, numbers, again, copies, grads, "in the second of two backward calls", "the first")
    graph.vjp([g * 2 + 1 for g in grads])
    _equal(
        subject, case, numbers, first, copies, grads, "after another backward call, in the same memory,", "that call"
    )


def _watched(graph: AutogradGraph, grads: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return tensors that a backward may read, but not write to."""
    arguments = [(f"tensor argument {n}", t) for n, t in enumerate(graph.call.tensors())]
    results = [(f"result {n}", t) for n, t in enumerate(graph.outputs)]
    return [*arguments, *results, *((f"the gradient that comes in for result {n}", g) for n, g in enumerate(grads))]


def _saved(subject: Subject, case: Case) -> None:
    graph, numbers, plain, grads = d.supported(subject, case)
    _interleaved(subject, case, numbers, plain, grads)
    for position, (name, original) in enumerate(_watched(graph, ())):
        if not original.numel():
            continue
        changed = d.trace(subject, case, numbers)
        tensor = [t for _, t in _watched(changed, ())][position]
        try:
            with torch.no_grad():
                _overwrite(tensor)
        except RuntimeError:
            continue  # memory that several elements share cannot be written to
        where = f"where {name} was modified in place between forward and backward"
        try:
            got = _vjp_unless_detected(changed, grads, where)
            if got is not None:
                _equal(subject, case, numbers, got, plain, grads, where, "what was passed")
        except Violation as violation:
            raise Violation(f"{violation}. Save tensors with ctx.save_for_backward: it raises in this case.") from None


def _interleaved(
    subject: Subject, case: Case, numbers: Sequence[int], plain: Gradients, grads: list[torch.Tensor]
) -> None:
    """Check that another call with other numbers between a forward and its backward changes nothing."""
    first = d.trace(subject, case, numbers)
    try:
        d.trace(subject, case.reseeded(), numbers)
    except CallRefused:
        return
    where = "where another call came between forward and backward"
    _equal(subject, case, numbers, _vjp_or_violation(first, grads, where), plain, grads, where, "a call that is alone")


def _vjp_unless_detected(graph: AutogradGraph, grads: Sequence[torch.Tensor], where: str) -> Gradients | None:
    """Return the gradients, or None if torch raises, as it should, because a saved tensor was modified."""
    try:
        return graph.vjp(grads)
    except RuntimeError:
        return None
    except Exception as error:
        raise Violation(f"{where}, the backward raises {type(error).__name__}: {error}") from error


def _overwrite(tensor: torch.Tensor) -> None:
    """Change the numbers in place; an index becomes another one that is in the tensor."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(-0.5).add_(0.25)
    else:
        tensor.copy_(tensor.flatten()[-1].expand(tensor.shape).clone())


def gradient_property(name: str, *, check: Callable[[Subject, Case], None], **row: Any) -> Property:
    """Return a property with the defaults of the group; its violations count only if equal calls give equal results."""
    usual = {"cases": d.smooth_cases(), "skip": d.no_candidates, "share": 0.4, "cost": 0.0015, "backward": True}
    return Property(name, check=d.steady(check), **usual | row)


PROPERTIES: tuple[Property, ...] = (
    gradient_property(
        "gradients.lost",
        rule="Where the reference has a gradient, the operator has one: not None, not all zeros.",
        defect="detach, .data or numpy inside, a backward that returns None, a kernel beneath autograd",
        check=_lost,
        skip=needs_reference,
    ),
    gradient_property(
        "gradients.reference",
        rule="Vector-Jacobian products are the reference's, for random incoming gradients.",
        defect="a wrong sign, a dropped term, gradients in each other's place, a sum over broadcast sizes that is forgotten",
        check=_reference,
        cases=d.smooth_cases(layouts=("contiguous", "transposed", "strided", "expanded", "padded")),
        share=0.7,
        cost=0.002,
        skip=needs_reference,
    ),
    gradient_property(
        "gradients.subsets",
        rule="The gradient of an input is the same whichever other inputs require one.",
        defect="a backward that takes all to be needed, or counts positions among those that are",
        check=_subsets,
        share=0.5,
        cost=0.0025,
    ),
    gradient_property(
        "gradients.incoming",
        rule="Gradients depend on the numbers that come in, not on how these lie in memory.",
        defect="a backward that reads an expanded or transposed gradient as if it were contiguous, or views it",
        check=_incoming,
        share=0.5,
        cost=0.0025,
    ),
    gradient_property(
        "gradients.linear",
        rule="Gradients are linear in what comes in.",
        defect="a backward that takes the incoming gradient to be ones, or uses its sign, or squares it",
        check=_linear,
    ),
    gradient_property(
        "gradients.undefined",
        rule="A result that nobody uses counts as one whose incoming gradient is zero.",
        defect="set_materialize_grads(False) and None not handled; only the first result's gradient used",
        check=_undefined,
    ),
    gradient_property(
        "gradients.pure",
        rule="A backward does not write to its inputs, and can be run again.",
        defect="an in-place operation on the incoming gradient or on a saved tensor; one buffer for all gradients",
        check=_pure,
        share=0.5,
    ),
    gradient_property(
        "gradients.saved",
        rule="Where a tensor is modified, or another call comes, between forward and backward, the backward raises or is right.",
        defect="ctx.x = x, .data or a global in place of save_for_backward: stale numbers, or another call's, are used silently",
        check=_saved,
        share=0.3,
        cost=0.003,
    ),
)
