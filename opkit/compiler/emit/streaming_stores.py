"""This module writes large results past the caches, with streaming stores: they do not fit into the caches anyway.

A store first reads its cache line; a streaming store does not, and evicts nothing. The processor combines such stores by lines,
so a strip of results is computed in a row in the L1 cache and then moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from opkit.compiler.emit.blocks import CScope
from opkit.compiler.emit.functions import is_called
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Value
from opkit.compiler.ir.kernel import Kernel, Let, Loop, Store, Update, walk

_SHORTEST = 128  # iterations of a loop


def buffers(kernel: Kernel) -> frozenset[str]:
    """Return the arguments that are written past the caches: those marked ``streamed`` that it writes once and never reads."""
    marked = frozenset(a.buffer for a in kernel.arguments if a.streamed)
    if not marked:
        return marked
    every = list(walk(kernel.body))
    stores = Counter(s.buffer for s in every if isinstance(s, Store))
    nodes = (node for s in every if isinstance(s, Let | Store | Update) for node in s.value.walk())
    return frozenset(name for name in marked if stores[name] == 1) - {n.data[0] for n in nodes if n.op == "load"}


def of(loop: Loop, roots: Iterable[Expr], streamed: frozenset[str]) -> list[Store]:
    """Return the stores of a loop that fill a row of such a buffer; none if the loop computes elementary functions."""
    extent = loop.axis.extent.constant
    if not streamed or (extent is not None and extent < _SHORTEST):
        return []
    if any(is_called(node) for root in roots for node in root.walk()):
        return []
    return [s for s in loop.body if isinstance(s, Store) and s.buffer in streamed and _is_row(s, loop)]


def _is_row(store: Store, loop: Loop) -> bool:
    computed = any(isinstance(leaf, Value) for leaf in store.at.leaves())
    return store.update is None and not computed and store.at.coefficient(loop.axis) == 1


def move(scope: CScope, store: Store, row: str, elements: str) -> None:
    """Write the call that moves a row to its place; the axis is at the beginning of the strip."""
    at = scope.index(store.at)
    scope.writer.line(f"opk_stream(p_{store.buffer} + ({at}), {row}, ({elements}) * (int64_t)sizeof *{row});")
