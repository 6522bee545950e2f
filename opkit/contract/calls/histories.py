"""This module defines a case with other calls around it, which reveal state that an operator carries between calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from opkit.contract.calls.cases import Case
from opkit.contract.calls.specs import Drawing
from opkit.contract.subject import Subject

_MAX_BETWEEN = 2


@dataclasses.dataclass(frozen=True)
class History(Case):
    """A call, and other calls of the same operator that are made before it is repeated.

    >>> from opkit.contract.calls.cases import TensorCase
    >>> print(History((TensorCase((2,)),), between=(Case((TensorCase((3,)),)),)))
    (float32[2]) around calls of (float32[3])
    """

    between: tuple[Case, ...] = ()

    def __str__(self) -> str:
        others = " and ".join(map(str, self.between))
        return f"{super().__str__()} around calls of {others}" if others else super().__str__()


def histories(subject: Subject) -> st.SearchStrategy[Case]:
    """A strategy for calls with one or two others between them: of any sizes, dtypes, flags and numbers."""
    ordinary = subject.spec.cases()
    others = subject.spec.cases(Drawing(fills=("normal", "nan", "infinite", "large")))

    @st.composite
    def drawn(draw: Callable[..., Any]) -> History:
        case: Case = draw(ordinary)
        between = draw(st.lists(others, min_size=1, max_size=_MAX_BETWEEN))
        return History(case.args, case.kwargs, tuple(between))

    return drawn()
