"""Rows that are read from memory, asked for while the row before them is passed over again.

A kernel of several passes reads a row in its first pass alone; in the others memory would have nothing to do. So before the
second pass the next row is asked for, a line of the cache at a time, where that pass does little but read and add.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opkit.compiler.emit.functions import is_called
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Axis, Index, Value, index, product
from opkit.compiler.ir.kernel import Let, Loop, Statement, Store, Update

_LINE = 64  # bytes of a line of the cache
_ROW = (
    1 << 10,
    1 << 14,
)  # bytes: a shorter row is not worth a loop, a longer one would push this one out of the first cache
_BUFFER = 1 << 22  # bytes: a smaller buffer is likely to be in a cache already

Asked = tuple[str, Index, int, int]
"""A buffer, where the next row begins, and how many elements it and a line have."""


def of(loops: Sequence[Loop], body: Sequence[Statement]) -> tuple[Loop | None, list[Asked]]:
    """The pass before which next rows are asked for, and which those are; ``loops`` are the parallel ones around ``body``."""
    passes = [s for s in body if isinstance(s, Loop)]
    if not loops or len(passes) < 2 or not all(each.how == "vector" for each in passes[:2]):
        return None, []
    if any(isinstance(s, Loop) for s in passes[0].body) or any(map(is_called, _nodes(passes[1]))):
        return None, []
    rows = product(loop.axis.extent for loop in loops).constant
    reads = {(n.data[0], n.data[1], n.dtype) for n in _nodes(passes[0]) if n.op == "load" and not n.args}
    asked = [_asked(*read, passes[0].axis, loops[-1].axis, rows) for read in sorted(reads, key=str)]
    return passes[1], [each for each in asked if each is not None]


def _nodes(loop: Loop) -> Iterator[Expr]:
    for s in loop.body:
        if isinstance(s, Let | Store | Update):
            yield from s.value.walk()


def _asked(
    buffer: str, coordinates: tuple[Index, ...], dtype: str, within: Axis, row: Axis, rows: int | None
) -> Asked | None:
    """The next row of a buffer whose rows lie one after the other."""
    (at,), length, size = coordinates, within.extent.constant, DTYPES[dtype].bytes
    apart = at.coefficient(row)
    if rows is None or length is None or at.coefficient(within) != 1 or apart is None or apart.constant is None:
        return None
    if not _ROW[0] <= length * size <= _ROW[1] or rows * length * size < _BUFFER or apart.constant < length:
        return None
    if any(isinstance(leaf, Value) for leaf in at.leaves()):
        return None
    return buffer, at.substitute({within: index(0)}) + apart, length, max(1, _LINE // size)


def text(asked: Asked, at: str) -> str:
    """The loop that asks for a row which begins at the index ``at``; what lies after the last row may be asked for too."""
    buffer, _, length, line = asked
    return (
        f"for (int64_t ahead = 0; ahead < {length}; ahead += {line})"
        f" __builtin_prefetch(p_{buffer} + ({at}) + ahead, 0, 2);"
    )
