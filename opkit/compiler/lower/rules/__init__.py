"""One rule an operator, in tables by subject."""

from __future__ import annotations

from opkit.compiler.lower.registry import Table
from opkit.compiler.lower.rules import (
    activations,
    assembly,
    creation,
    externs,
    indexing,
    lists,
    losses,
    normalisation,
    pointwise,
    products,
    reductions,
    scatters,
    views,
)

_SUBJECTS = (
    pointwise,
    activations,
    creation,
    views,
    assembly,
    reductions,
    normalisation,
    products,
    indexing,
    scatters,
    losses,
    lists,
)

RULES = Table()
for _subject in _SUBJECTS:
    RULES.update(_subject.TABLE)

EXTERNS = externs.EXTERNS
ALIASING = frozenset([*views.ALIASING, *externs.ALIASING])
