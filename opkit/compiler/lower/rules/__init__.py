"""The rules of ATen operators, one for each operator, in tables by subject."""

from __future__ import annotations

from opkit.compiler.lower.registry import Table
from opkit.compiler.lower.rules import (
    activations,
    arithmetic,
    collectives,
    complex_rules,
    creation,
    epilogues,
    extern_calls,
    floats,
    indexing,
    joining,
    losses,
    normalisation,
    pointwise,
    pooling,
    reductions,
    views,
)

_SUBJECTS = (
    pointwise,
    arithmetic,
    activations,
    creation,
    views,
    joining,
    reductions,
    normalisation,
    indexing,
    extern_calls,
    epilogues,
    floats,
    losses,
    pooling,
    collectives,
)

RULES = Table()
for _subject in _SUBJECTS:
    assert not RULES.keys() & _subject.TABLE.keys(), f"{_subject.__name__} has rules that another subject has too"
    RULES.update(_subject.TABLE)

COMPLEX = Table({**complex_rules.TABLE, **collectives.TABLE})
"""The rules for complex operands or results."""

EXTERNS = {**extern_calls.EXTERNS, **collectives.EXTERNS}
ALIASING = frozenset([*views.ALIASING, *extern_calls.ALIASING, *collectives.ALIASING])
