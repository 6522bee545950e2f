"""This module defines a property: one rule of the contract, the defect that it catches, and the function that checks one case.

The tables of all properties are in :mod:`opkit.contract.properties`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis.strategies import SearchStrategy

from opkit.contract.calls.cases import Case
from opkit.contract.calls.specs import Drawing
from opkit.contract.calls.sweep import Sweep
from opkit.contract.subject import Subject


class Violation(Exception):
    """The operator breaks the property on this case. The message says what was observed and what was expected."""


class Remark(Exception):
    """A difference that the contract allows and that the report mentions."""


class NotApplicable(Exception):
    """The property cannot be checked for this operator; the message says why. Raised on any case, it ends the search."""


def always(subject: Subject) -> str:
    """Return no reason to skip."""
    return ""


def needs_reference(subject: Subject) -> str:
    """Return why a property that compares with the reference does not apply, or ""."""
    return "" if subject.reference is not None else "there is no reference"


def plain_cases(subject: Subject) -> SearchStrategy[Case]:
    """Draw contiguous arguments with ordinary numbers."""
    return subject.spec.cases()


def drawn(how: Drawing) -> Callable[[Subject], SearchStrategy[Case]]:
    """Return a property's ``cases``: those that ``how`` describes."""
    return lambda subject: subject.spec.cases(how)


def swept(how: Drawing, **sizes: Any) -> Callable[[Subject], Sweep]:
    """Return a property's ``first``: the fixed list of cases that ``how`` describes."""
    return lambda subject: Sweep(subject.spec, how, **sizes)


def swept_and_drawn(how: Drawing, **sizes: Any) -> dict[str, Any]:
    """Return a property's ``first`` and ``cases``."""
    return {"first": swept(how, **sizes), "cases": drawn(how)}


@dataclasses.dataclass(frozen=True)
class Property:
    """A rule of the contract.

    Attributes:
        name: ``group.rule``.
        rule: one sentence that is true of a correct operator.
        defect: what goes wrong where the rule is broken.
        check: raises :class:`Violation` where a case breaks the rule; the case passes if it returns.
        cases: the strategy that draws cases.
        share: the part of ``max_examples`` that the property takes; one that compiles takes few.
        cost: the approximate seconds of one case; cheap properties run first.
        skip: returns why the property does not apply to this operator, or "".
        least: the number of cases that are tried at least, whatever ``max_examples`` is.
        first: a fixed list of cases that are tried before the search; see ``sweep``.
        forked: whether it may be checked in a forked process, in parallel with others; see ``fork_pool``.
        backward: whether it runs autograd's backward, which not every forked process can; see ``child.runs_backward``.
    """

    name: str
    rule: str
    defect: str
    check: Callable[[Subject, Case], None]
    cases: Callable[[Subject], SearchStrategy[Case]] = plain_cases
    share: float = 1.0
    cost: float = 0.001
    skip: Callable[[Subject], str] = always
    least: int = 1
    first: Callable[[Subject], Sweep] | None = None
    forked: bool = True
    backward: bool = False

    @property
    def group(self) -> str:
        """The first part of the name."""
        return self.name.split(".")[0]
