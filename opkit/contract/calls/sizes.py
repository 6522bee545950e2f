"""This module draws joint sizes: the values of the names in shape patterns in one call."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from opkit.op.schema import patterns
from opkit.op.schema.patterns import PatternDim, TensorPattern

_SMALL = (1, 2, 3, 0, 4, 5, 7, 8)
SIZES = (
    *_SMALL, *_SMALL, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 512, 1000, 1023, 1024, 1025, 2049,
)  # fmt: skip
"""The sizes to draw, the simplest first: tails of vectors and tiles, powers of two and their neighbours, and 0."""

LARGE = 8193
"""A size for properties that request it: larger than many buffers of fixed size, and its square is not too large."""

MAX_ELEMENTS = 2**14
MAX_BATCH_DIMS = 3
_REDUCED = (128, 65, 33, 17, 3)  # smaller sizes for a tensor that would be too large: the first that fits
EITHER = st.booleans()
"""A strategy for a decision."""


@functools.cache
def sampled(values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Return a strategy for one of the values. It is cached: the validation of a new strategy costs more than a draw."""
    return st.sampled_from(values)


@functools.cache
def sizes(largest: int = max(SIZES)) -> st.SearchStrategy[int]:
    """A strategy for one size; it shrinks to 1.

    Args:
        largest: the largest size, for functions that are slow; or above 2049, for more.
    """
    return st.sampled_from([size for size in (*SIZES, LARGE) if size <= largest])


@functools.cache
def _batch(largest: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(sizes(largest), max_size=MAX_BATCH_DIMS).map(tuple)


def shapes(*patterns_: str, largest: int = max(SIZES), elements: int = MAX_ELEMENTS) -> st.SearchStrategy[Any]:
    """A strategy for shapes that fit the patterns jointly: equal names are equal sizes, ``*name`` any number of sizes.

    Args:
        patterns_: as in jaxtyping, such as ``"*batch d"``.
        largest: the largest single size.
        elements: the largest number of elements; the largest sizes are reduced, at most to 3, until a shape fits.

    Returns:
        A strategy for a tuple of shapes, or for one shape if there is one pattern.

    >>> from hypothesis import find
    >>> find(shapes("b n", "n"), lambda both: both[1][0] > 4)
    ((1, 5), (5,))
    """
    parsed: list[TensorPattern] = [patterns.parse_shape(text) for text in patterns_]

    @st.composite
    def joint(draw: Callable[..., Any]) -> Any:
        known = JointSizes(draw, parsed, largest, elements)
        found = [known.shape(pattern) for pattern in parsed]
        return tuple(found) if len(found) > 1 else found[0]

    return joint()


def choose(draw: Callable[..., Any], label: tuple[str, int], strategy: st.SearchStrategy[Any]) -> Any:
    """Draw from the strategy, or, if ``draw`` is not Hypothesis's but has ``decide``, let it decide by the label."""
    decide = getattr(draw, "decide", None)
    return draw(strategy) if decide is None else decide(label, strategy)


@dataclasses.dataclass
class JointSizes:
    """The sizes of one call. Names are drawn in the order in which the patterns use them."""

    draw: Callable[..., Any]
    patterns: Sequence[TensorPattern]
    largest: int = max(SIZES)
    elements: int = MAX_ELEMENTS

    def __post_init__(self) -> None:
        self.known: dict[str, Any] = {}
        self._anonymous = 0
        self._broadcast: dict[tuple[int, str], bool] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        for pattern in self.patterns:
            for dim in pattern.dims:
                self._bind(pattern, dim)
        self._reduce()

    def shape(self, pattern: TensorPattern) -> tuple[int, ...]:
        """Return the shape of one of the patterns in this call."""
        shape: list[int] = []
        for dim in pattern.dims:
            shape.extend(self._sizes(pattern, dim))
        return tuple(shape)

    def value(self, expression: str | float | None) -> float | None:
        """Return the value of a bound: a number, or an expression over names such as ``"n-1"``."""
        return patterns.evaluate(expression, self.known) if isinstance(expression, str) else expression

    def _name(self, pattern: TensorPattern, dim: PatternDim) -> str:
        if dim.kind == "any" or not dim.text:
            return f"{id(pattern)} {pattern.dims.index(dim)}"
        return dim.text

    def _bind(self, pattern: TensorPattern, dim: PatternDim) -> None:
        name = self._name(pattern, dim)
        if dim.kind in ("number", "expression"):
            return
        if name not in self.known:
            many = dim.kind == "many"
            strategy = _batch(self.largest) if many else sizes(self.largest)
            self.known[name] = choose(self.draw, ("sizes" if many else "size", len(self.known)), strategy)
        if dim.broadcast:
            label = ("broadcast", len(self._broadcast))
            self._broadcast[id(pattern), name] = choose(self.draw, label, EITHER)

    def _sizes(self, pattern: TensorPattern, dim: PatternDim) -> tuple[int, ...]:
        if dim.kind == "number":
            return (dim.number,)
        if dim.kind == "expression":
            return (max(patterns.evaluate(dim.text, self.known) or 0, 0),)
        found = self.known[self._name(pattern, dim)]
        found = found if isinstance(found, tuple) else (found,)
        return (1,) * len(found) if self._broadcast.get((id(pattern), self._name(pattern, dim))) else found

    def _reduce(self) -> None:
        """Reduce the largest sizes until every tensor fits."""
        while not self._fits():
            flat = {
                name: max(size, default=0) if isinstance(size, tuple) else size for name, size in self.known.items()
            }
            name = max(flat, key=lambda each: flat[each], default=None)
            if name is None or flat[name] <= _REDUCED[-1]:
                return
            size = self.known[name]
            for smaller in (each for each in _REDUCED if each < flat[name]):
                self.known[name] = _replaced(size, flat[name], smaller)
                if self._fits():
                    return

    def _fits(self) -> bool:
        return all(math.prod(self.shape(pattern)) <= self.elements for pattern in self.patterns)


def _replaced(size: Any, largest: int, smaller: int) -> Any:
    if isinstance(size, tuple):
        return tuple(smaller if each == largest else each for each in size)  # pyright: ignore
    return smaller
