"""One rule an operator, in tables by subject."""

from __future__ import annotations

from opkit.compiler.lower.registry import Table
from opkit.compiler.lower.rules import (
    activations,
    creation,
    externs,
    indexing,
    losses,
    normalisation,
    pointwise,
    products,
    reductions,
    scatters,
    views,
)

RULES = Table()
for _module in (
    pointwise,
    activations,
    creation,
    views,
    reductions,
    normalisation,
    products,
    indexing,
    scatters,
    losses,
):
    RULES.update(_module.TABLE)

EXTERNS = externs.EXTERNS
ALIASING = frozenset([*views.ALIASING, *externs.ALIASING])
