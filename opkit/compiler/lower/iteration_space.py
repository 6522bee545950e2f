"""This module computes the iteration space that steps share: the coarsest list of extents whose products are each step's axes.

A step over (8, 128, 3072) and one over (1024, 3072) visit the same elements in the same order; they share the space
(8, 128, 3072), in which the second one's first axis is ``a0 * 128 + a1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opkit.compiler.ir.index import Axis, Index, axis, contiguous, flat, index

Extents = tuple[Index, ...]


def refined(a: Extents, b: Extents) -> Extents | None:
    """Return the coarsest list of extents such that both lists are products of neighbours in it; None if there is none.

    >>> refined((index(8), index(128), index(6)), (index(1024), index(6)))
    (8, 128, 6)
    >>> refined((index(4),), (index(6),)) is None
    True
    """
    left, right = [e for e in a if e != 1], [e for e in b if e != 1]
    found: list[Index] = []
    while left and right:
        x, y = left.pop(), right.pop()
        step, rest_x, rest_y = _step(x, y)
        if step is None:
            return None
        found.append(step)
        left += rest_x
        right += rest_y
    return None if left or right else tuple(reversed(found))


def _step(x: Index, y: Index) -> tuple[Index | None, list[Index], list[Index]]:
    """Return the smaller of two innermost extents, and what it leaves of the other."""
    if x == y:
        return x, [], []
    if _divides(x, y):
        return x, [], [y // x]
    return (y, [x // y], []) if _divides(y, x) else (None, [], [])


def _divides(a: Index, b: Index) -> bool:
    return a == b or (len(a.terms) == 1 and a != 0 and b != 0 and b % a == 0)


def runs(axes: Sequence[Index], space: Sequence[Index]) -> list[list[int]] | None:
    """For each axis, the neighbouring positions of the space that it is the product of; None if it is not so.

    >>> runs([index(1024), index(1), index(6)], [index(8), index(128), index(6)])
    [[0, 1], [], [2]]
    """
    position, found = 0, []
    for extent in axes:
        run: list[int] = []
        covered = index(1)
        while covered != extent:
            if position == len(space) or not _divides(covered * space[position], extent):
                return None
            covered = covered * space[position]
            run.append(position)
            position += 1
        found.append(run)
    return found if position == len(space) else None


def substitution(axes: Sequence[Index], placed: Sequence[Sequence[int]], space: Sequence[Index]) -> dict[Axis, Index]:
    """Return each axis as an index over the axes of the space, of which ``placed`` lists those that it is the product of."""
    found: dict[Axis, Index] = {}
    for number, (extent, run) in enumerate(zip(axes, placed, strict=True)):
        extents = [space[k] for k in run]
        found[Axis(number, extent)] = flat([axis(k, space[k]) for k in run], contiguous(extents))
    return found


def number(at: Index, sizes: Mapping[str, int]) -> float:
    """Return an estimate of an index over sizes."""
    total = 0.0
    for monomial, coefficient in at.terms.items():
        part = float(coefficient)
        for atom in monomial:
            part *= sizes.get(getattr(atom, "name", ""), 16)
        total += part
    return total
