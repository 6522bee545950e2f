"""What a property is: a rule of the contract, the defect it is there for, and how it is asked of one case."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from hypothesis.strategies import SearchStrategy

if TYPE_CHECKING:
    from opkit.contract.calls.cases import Case
    from opkit.contract.calls.sweep import Sweep
    from opkit.contract.subject import Subject


class Violation(Exception):
    """The operator breaks the property on this case. The message says what was seen, and what was expected."""


class Refusal(Exception):
    """The operator raised: whether it may is a question for ``numbers.accepts``; other properties pass the case over.

    ``error`` is what it raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class Remark(Exception):
    """Worth telling, and no failure: a difference that the contract allows."""


class NotApplicable(Exception):
    """The property cannot be asked of this operator; the message says why. Raised on any case, it ends the search."""


def always(subject: Subject) -> str:
    """No reason to skip."""
    return ""


def plain_cases(subject: Subject) -> SearchStrategy[Case]:
    """Contiguous arguments with ordinary numbers."""
    return subject.spec.cases()


@dataclasses.dataclass(frozen=True)
class Property:
    """A rule of the contract.

    Attributes:
        name: ``group.rule``.
        rule: what holds of a right operator, in one sentence.
        defect: what goes wrong where it does not.
        check: raises :class:`Violation` where a case breaks the rule; returning, it passes.
        cases: the strategy that cases are drawn from.
        share: of ``max_examples``; a property that compiles takes few.
        cost: seconds that one case takes, roughly: cheap properties run first.
        skip: why the property does not apply to this operator, or "".
        least: how many cases are tried at least, whatever ``max_examples`` is.
        first: a fixed list of cases that are tried before the search; see ``sweep``.
        forked: it may be asked in a forked process, beside others; see ``lanes``.
        backward: it runs autograd's backward, which not every forked process can; see ``child.runs_backward``.
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
    forked: bool = False
    backward: bool = False

    @property
    def group(self) -> str:
        """The first part of the name."""
        return self.name.split(".")[0]
