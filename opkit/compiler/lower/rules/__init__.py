"""One rule an operator, in tables by subject."""

from __future__ import annotations

from opkit.compiler.lower.registry import Table
from opkit.compiler.lower.rules import activations, creation, externs, normalisation, pointwise, reductions, views

RULES = Table()
for _table in (
    pointwise.TABLE,
    activations.TABLE,
    creation.TABLE,
    views.TABLE,
    reductions.TABLE,
    normalisation.TABLE,
):
    RULES.update(_table)

EXTERNS = externs.EXTERNS
ALIASING = frozenset([*views.ALIASING, *externs.ALIASING])
