"""The rules of ATen operators, one for each operator, in tables by subject."""

from __future__ import annotations

from opkit.compiler.lower.registry import Table
from opkit.compiler.lower.rules import (
    activations,
    arithmetic,
    assembly,
    complex_rules,
    creation,
    externs,
    indexing,
    lists,
    losses,
    normalisation,
    pointwise,
    pooling,
    products,
    reductions,
    resampling,
    scatters,
    views,
)

_SUBJECTS = (
    pointwise,
    arithmetic,
    activations,
    creation,
    views,
    assembly,
    reductions,
    normalisation,
    indexing,
    products,
    scatters,
    losses,
    pooling,
    resampling,
    lists,
)

RULES = Table()
for _subject in _SUBJECTS:
    assert not RULES.keys() & _subject.TABLE.keys(), f"{_subject.__name__} has rules that another subject has too"
    RULES.update(_subject.TABLE)

COMPLEX = complex_rules.TABLE
"""The rules for complex operands or results."""

EXTERNS = externs.EXTERNS
ALIASING = frozenset([*views.ALIASING, *externs.ALIASING])
