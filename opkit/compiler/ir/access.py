"""How far apart the elements are that loops access, and how many there probably are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opkit.compiler.ir.index import Axis, Index, Symbol, Value


def step(at: Index, axis: Axis) -> int | None:
    """Return the distance of the first two elements along an axis; None if it is not a number.

    >>> from opkit.compiler.ir.index import axis, index
    >>> step(axis(0, 8) * 4 + axis(1, 4), Axis(0, index(8)))
    4
    """
    return (at.substitute({axis: 1}) - at.substitute({axis: 0})).constant


def is_contiguous(at: Index, axis: Axis) -> bool:
    """Return whether elements are next to each other along an axis; parts of complex numbers are two apart."""
    return step(at, axis) in (1, 2)


def rows_are_adjacent(accesses: Iterable[Index], row: Axis, column: Axis) -> bool:
    """Return whether most accesses of a matrix, by rows and columns, are contiguous from row to row and not along the rows."""
    known = [at for at in accesses if not any(isinstance(leaf, Value) for leaf in at.leaves())]
    full = [at for at in known if step(at, row) != 0 and step(at, column) != 0]
    from_row_to_row = sum(is_contiguous(at, row) for at in full)
    return from_row_to_row > sum(is_contiguous(at, column) for at in full)


def estimate(at: Index, sizes: Mapping[str, int]) -> float:
    """Return the expected value of an index: unknown sizes count as 16, and so do axes and values.

    >>> from opkit.compiler.ir.index import size
    >>> estimate(size("n") * 3 // 2, {"n": 100}), estimate(size("m"), {})
    (150.0, 16.0)
    """
    known = {leaf: sizes.get(leaf.name, 16) for leaf in at.leaves() if isinstance(leaf, Symbol)}
    found = at.substitute(known) if known else at
    return float(sum(coefficient * 16 ** len(monomial) for monomial, coefficient in found.terms.items()))
