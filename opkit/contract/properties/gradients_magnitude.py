"""gradients: of equal numbers, small ones and those at the limits of their dtype."""

from __future__ import annotations

import torch
from hypothesis.strategies import SearchStrategy

from opkit.contract.calls.cases import Case
from opkit.contract.calls.specs import Drawing
from opkit.contract.prop import NotApplicable, Property, Refusal, Violation
from opkit.contract.subject import Subject
from opkit.contract.traced import derivatives as d

_NEAR = 1e-3


def _cases(subject: Subject) -> SearchStrategy[Case]:
    how = Drawing(fills=("level", "constant", "zeros"), dtypes=(torch.float32, torch.float64), largest=65, elements=256)
    return subject.spec.cases(how)


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
        raise d.told(Refusal(error)) from error
    scale = d.magnitude(grads)
    for number, mine, own, right in zip(numbers, found, narrow, wide, strict=True):
        if mine is None or own is None or right is None or mine.shape != right.shape:
            continue  # gradients.lost and gradients.reference say so
        exact = right.to(own.dtype)
        sure = own.isfinite() & exact.isfinite() & ((own - exact).abs() <= _NEAR * (scale + exact.abs()))
        if wrong := d.mismatch(torch.where(sure, mine, exact), right, scale, own):
            raise Violation(f"the gradient of {d.argument(subject, case, number)} is not the reference's: {wrong}")


def _needs_reference(subject: Subject) -> str:
    return d.no_candidates(subject) or ("" if subject.reference is not None else "there is no reference")


PROPERTIES: tuple[Property, ...] = (
    Property(
        "gradients.ties",
        rule="Where numbers are all equal, or at the limits of their dtype, gradients are the reference's, where that is right.",
        defect="probabilities from a log-sum-exp, which of huge logits is the maximum itself; all ties taken for the maximum",
        check=_ties,
        cases=_cases,
        share=0.3,
        cost=0.002,
        skip=_needs_reference,
    ),
)
