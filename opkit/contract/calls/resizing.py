"""This module changes the sizes of a case: it reads the value of each size name of the spec, and changes them jointly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis.strategies import SearchStrategy

from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.calls.specs import ArgumentSpecs, Drawing, TensorArgument
from opkit.contract.subject import Subject
from opkit.op.schema import patterns
from opkit.op.schema.patterns import PatternDim

Change = Callable[[int, int], int]
Sizes = dict[str, Any]

CHANGES: tuple[Change, ...] = (
    lambda number, size: size + 3 + 2 * number,
    lambda number, size: 2 * size,
    lambda number, size: size + 8 + 3 * number,
    lambda number, size: 3 * size,
    lambda number, size: 4 * size,
)
"""Functions from the number of a size name and its size to another size; some change whether it is even, others do not."""


def resized(spec: ArgumentSpecs, case: Case, change: Change) -> Case:
    """Return the case with each named size changed, wherever it occurs; bounds that are computed from sizes follow.

    Args:
        spec: the specs from which the case was drawn.
        case: one call.
        change: returns the new size, from the number of the name (0 for the first that occurs) and its present size.

    >>> from opkit.contract.calls.specs import tensor
    >>> spec = ArgumentSpecs((tensor("b n"), tensor("n")))
    >>> print(resized(spec, Case((TensorCase((2, 3)), TensorCase((3,)))), lambda number, size: 2 * size))
    (float32[4, 6], float32[6])
    """
    sizes = _read(spec, case)
    changed = _changed(sizes, change)

    def value(item: Any, found: Any) -> Any:
        if isinstance(item, TensorArgument) and isinstance(found, TensorCase):
            return _resized_tensor(item, found, sizes, changed)
        if isinstance(item, (list, tuple)) and isinstance(found, (list, tuple)) and len(item) == len(found):
            return type(found)(value(*both) for both in zip(item, found, strict=True))  # pyright: ignore
        return found

    args = tuple(value(*both) for both in zip(spec.args, case.args, strict=True))
    named = dict(spec.kwargs)
    return Case(args, tuple((name, value(named.get(name), found)) for name, found in case.kwargs))


def at_least_two(spec: ArgumentSpecs, case: Case) -> Case:
    """Return the case with no named size of 0 or 1, on which compilers specialize."""
    return resized(spec, case, lambda _, size: size if size > 1 else size + 2)


def drawn_above_one(how: Drawing) -> Callable[[Subject], SearchStrategy[Case]]:
    """Return a property's ``cases``: those that ``how`` describes, with no named size of 0 or 1."""
    return lambda subject: subject.spec.cases(how).map(lambda case: at_least_two(subject.spec, case))


def other_sizes(spec: ArgumentSpecs, case: Case) -> list[Case]:
    """Return cases that differ from ``case``, and from one another, in their sizes alone."""
    found = [resized(spec, case, change) for change in CHANGES]
    distinct = {repr(each): each for each in found}  # a case with lists has no hash
    return [each for each in distinct.values() if _shapes(each) != _shapes(case)]


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return [tensor.shape for tensor in case.tensors()]


def _pairs(item: Any, found: Any) -> Iterator[tuple[TensorArgument, TensorCase]]:
    if isinstance(item, TensorArgument) and isinstance(found, TensorCase):
        yield item, found
    elif isinstance(item, (list, tuple)) and isinstance(found, (list, tuple)):
        for both in zip(item, found, strict=False):
            yield from _pairs(*both)


def _read(spec: ArgumentSpecs, case: Case) -> Sizes:
    """Return the value of each name in the case: a size, or a tuple of sizes."""
    sizes: Sizes = {}
    named = dict(spec.kwargs)
    both = [*zip(spec.args, case.args, strict=True), *((named.get(name), found) for name, found in case.kwargs)]
    for item, found in (pair for each in both for pair in _pairs(*each)):
        for dim, name, size in _dims(item, found.shape):
            one = (1,) * len(size) if isinstance(size, tuple) else 1
            if dim.kind in ("name", "any", "many") and (name not in sizes or (dim.broadcast and size != one)):
                sizes[name] = size
            elif name in sizes and not dim.broadcast:
                sizes[name] = size  # a size that is not broadcast is the value of the name
    return sizes


def _dims(item: TensorArgument, shape: tuple[int, ...]) -> Iterator[tuple[PatternDim, str, Any]]:
    """Yield each item of the pattern, the name of its size, and its size or sizes."""
    at, several = 0, len(shape) - len(item.pattern.dims) + 1
    for number, dim in enumerate(item.pattern.dims):
        bare = dim.kind == "any" or not dim.text
        name = f"{id(item.pattern)} {number}" if bare else dim.text
        if dim.kind == "many":
            yield dim, name, shape[at : at + several]
            at += several
        else:
            yield dim, name, shape[at]
            at += 1


def _changed(sizes: Sizes, change: Change) -> Sizes:
    numbers = iter(range(10**6))
    return {
        name: tuple(change(next(numbers), each) for each in size)
        if isinstance(size, tuple)
        else change(next(numbers), size)
        for name, size in sizes.items()
    }


def _resized_tensor(item: TensorArgument, found: TensorCase, before: Sizes, after: Sizes) -> TensorCase:
    shape: list[int] = []
    for dim, name, size in _dims(item, found.shape):
        old = size if isinstance(size, tuple) else (size,)
        shape.extend(_new_sizes(dim, name, old, before, after))
    bound = {which: _bound(getattr(item, which), getattr(found, which), after) for which in ("low", "high")}
    return dataclasses.replace(found, shape=tuple(shape), **bound)


def _new_sizes(dim: PatternDim, name: str, old: tuple[int, ...], before: Sizes, after: Sizes) -> tuple[int, ...]:
    if dim.kind == "number":
        return old
    if dim.kind == "expression":
        return (max(patterns.evaluate(dim.text, after) or 0, 0),)
    named, new = (each[name] if isinstance(each[name], tuple) else (each[name],) for each in (before, after))
    return new if old == named else old  # otherwise it is 1, and broadcast


def _bound(bound: Any, found: float | None, sizes: Sizes) -> float | None:
    return patterns.evaluate(bound, sizes) if isinstance(bound, str) else found
