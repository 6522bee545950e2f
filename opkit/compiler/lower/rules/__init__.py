"""One rule an operator, in tables by subject."""

from __future__ import annotations

from opkit.compiler.lower.registry import Table
from opkit.compiler.lower.rules import (
    activations,
    creation,
    externs,
    indexing,
    losses,
    pointwise,
    pooling,
    resampling,
    scatters,
    views,
)

RULES = Table()
for _module in (pointwise, activations, creation, views, indexing, scatters, losses, pooling, resampling):
    RULES.update(_module.TABLE)

EXTERNS = externs.EXTERNS
ALIASING = frozenset([*views.ALIASING, *externs.ALIASING])
