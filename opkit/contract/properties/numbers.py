"""numbers: what the operator computes, against its reference."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import torch

from opkit.contract.cases import Case
from opkit.contract.outcome import first_difference
from opkit.contract.prop import Property, Violation
from opkit.contract.subject import Subject


def needs_reference(subject: Subject) -> str:
    """Why a property that compares with the reference does not apply, or nothing."""
    return "" if subject.reference is not None else "there is no reference"


def _reference(subject: Subject, case: Case) -> None:
    ours, expected = subject.run(case), subject.expect(case)
    for number, (a, b) in enumerate(zip(ours.tensors(), expected.tensors(), strict=True)):
        if a.shape != b.shape or not torch.allclose(a.double(), b.double(), rtol=1e-2, atol=1e-2, equal_nan=True):
            raise Violation(f"output {number} differs from the reference's at {first_difference(a, b)}")


PROPERTIES = (
    Property(
        "numbers.reference",
        rule="Results are the reference's, to the rounding of their dtype.",
        defect="a wrong formula, a dropped term, swapped operands",
        check=_reference,
        skip=needs_reference,
    ),
)
