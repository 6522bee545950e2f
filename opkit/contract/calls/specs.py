"""This module defines the specs of an operator's arguments, and draws whole calls from them, with joint sizes."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.calls.tensors import FILLS, LAYOUTS, ORDINARY, fits
from opkit.errors import ArgumentError
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
_SEED = st.integers(0, 3)
Bound = float | str | None


@dataclasses.dataclass(frozen=True)
class TensorArgument:
    """A tensor argument as :func:`tensor` describes it."""

    pattern: TensorPattern
    dtypes: tuple[torch.dtype, ...] | None
    optional: bool = False
    low: Bound = None
    high: Bound = None
    layouts: tuple[str, ...] | None = None
    fills: tuple[str, ...] | None = None
    differentiable: bool = True
    largest: int | None = None


def tensor(
    shape: str | Sequence[int] = "...",
    dtypes: torch.dtype | Iterable[torch.dtype] | None = None,
    *,
    optional: bool = False,
    low: Bound = None,
    high: Bound = None,
    layouts: Iterable[str] | None = None,
    fills: Iterable[str] | None = None,
    differentiable: bool = True,
    largest: int | None = None,
) -> TensorArgument:
    """A tensor argument, for :func:`opkit.check`.

    Args:
        shape: as in jaxtyping: equal names are equal sizes over all arguments of a call, ``*batch`` is any number of leading
            sizes, ``#n`` a size that may be 1, ``2*n+1`` is computed, ``...`` stands for any sizes; or a sequence of numbers.
        dtypes: the dtypes to try. By default the dtype of the arguments before it, or float32. Arguments with equal ``dtypes``
            have the same dtype in each call.
        optional: whether it may be None.
        low: the least element, a number or an expression over sizes such as ``"-n"``.
        high: the largest element, such as ``"n-1"`` for an index.
        layouts: the only memory layouts to try; names of ``opkit.testing.LAYOUTS``.
        fills: the only kinds of numbers to try; names of ``opkit.testing.FILLS``. ``low`` and ``high`` still apply.
        differentiable: False where the operator promises no gradient for it.
        largest: the largest size of its dimensions that are not numbers, where the reference is a loop over one of them.

    Raises:
        ArgumentError: a name of a layout or a fill is unknown.

    >>> tensor("b n", dtypes=(torch.float32, torch.bfloat16)).pattern.text
    'b n'
    """
    text = shape if isinstance(shape, str) else " ".join(str(int(size)) for size in shape)
    several = (dtypes,) if isinstance(dtypes, torch.dtype) else None if dtypes is None else tuple(dtypes)
    return TensorArgument(
        pattern=patterns.parse_shape(text),
        dtypes=several,
        optional=optional,
        low=low,
        high=high,
        layouts=None if layouts is None else known_names("tensor(layouts=...)", layouts, LAYOUTS),
        fills=None if fills is None else known_names("tensor(fills=...)", fills, FILLS),
        differentiable=differentiable,
        largest=largest,
    )


def known_names(where: str, names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return the names; raise ArgumentError for one that is not known, with ``where`` they were passed."""
    names = tuple(names)
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ArgumentError(f"{where}: {wrong[0]!r} is not one of {', '.join(known)}.")
    return names


# ---- joint sizes -------------------------------------------------------------------------------------------------------


@functools.cache
def sampled(values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Return a strategy for one of the values. It is cached: the validation of a new strategy costs more than a draw."""
    return st.sampled_from(values)


@functools.cache
def sizes(largest: int = max(SIZES)) -> st.SearchStrategy[int]:
    """A strategy for one size; it shrinks to 1.

    Args:
        largest: the largest size, for functions that are slow; or above 2049, for more.

    >>> from hypothesis import find
    >>> find(sizes(), lambda size: size > 100)
    127
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

    Raises:
        DefinitionError: a pattern cannot be read.

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
    """The sizes of one call. Names are drawn in the order in which the patterns use them; ``limits`` are those of patterns."""

    draw: Callable[..., Any]
    patterns: Sequence[TensorPattern]
    largest: int = max(SIZES)
    elements: int = MAX_ELEMENTS
    limits: Sequence[int | None] = ()

    def __post_init__(self) -> None:
        self.known: dict[str, Any] = {}
        self._anonymous = 0
        self._broadcast: dict[tuple[int, str], bool] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        for pattern in self.patterns:
            for dim in pattern.dims:
                self._bind(pattern, dim)
        for pattern, limit in zip(self.patterns, self.limits, strict=False):
            if limit is not None:
                self._limit(pattern, limit)
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

    def _limit(self, pattern: TensorPattern, limit: int) -> None:
        """Reduce sizes of a pattern above the limit: also those that a sweep decides."""
        for name in {self._name(pattern, dim) for dim in pattern.dims} & self.known.keys():
            size = self.known[name]
            self.known[name] = tuple(min(each, limit) for each in size) if isinstance(size, tuple) else min(size, limit)

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


# ---- whole calls -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The parts of a call that a search varies; each property has its own."""

    layouts: tuple[str, ...] = ("contiguous",)
    fills: tuple[str, ...] = ORDINARY
    dtypes: tuple[torch.dtype, ...] | None = None  # only these, if the specs allow any of them
    largest: int = max(SIZES)
    elements: int = MAX_ELEMENTS


ANYTHING = Drawing(layouts=tuple(LAYOUTS), fills=tuple(FILLS))
"""Every layout and every fill."""


@dataclasses.dataclass(frozen=True)
class ArgumentSpecs:
    """The arguments of an operator: :class:`TensorArgument`, lists of these, Hypothesis strategies, constants."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def tensors(self) -> list[TensorArgument]:
        """Return every tensor argument, in order."""
        return [*_tensors((*self.args, *dict(self.kwargs).values()))]

    def cases(self, how: Drawing | None = None) -> SearchStrategy[Case]:
        """A strategy for calls: joint sizes and dtypes; layouts, fills and seeds of each tensor; everything else."""
        return _cases(self, how or Drawing())


def _tensors(value: Any) -> Iterator[TensorArgument]:
    if isinstance(value, TensorArgument):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def assemble(draw: Callable[..., Any], spec: ArgumentSpecs, how: Drawing) -> Case:
    """Return a call; ``draw`` makes every decision, each with a label: see :func:`opkit.contract.calls.specs.choose`."""
    tensors = spec.tensors()
    limits = [each.largest for each in tensors]
    sizes = JointSizes(draw, [each.pattern for each in tensors], how.largest, how.elements, limits)
    dtypes = _dtypes(draw, spec, how)
    numbers = itertools.count()

    def value(item: Any) -> Any:
        number = next(numbers)
        if isinstance(item, TensorArgument):
            absent = item.optional and choose(draw, ("none", number), EITHER)
            return None if absent else _tensor(draw, item, dtypes[item.dtypes], sizes, how, number)
        if isinstance(item, SearchStrategy):
            return choose(draw, ("value", number), item)
        return type(item)(map(value, item)) if isinstance(item, (list, tuple)) else item

    args = tuple(value(item) for item in spec.args)
    return Case(args, tuple((name, value(item)) for name, item in spec.kwargs))


_cases = st.composite(assemble)


def _dtypes(draw: Callable[..., Any], spec: ArgumentSpecs, how: Drawing) -> dict[Any, torch.dtype]:
    """Choose one dtype for each group of tensors that list the same dtypes."""
    found: dict[Any, torch.dtype] = {}
    for group in dict.fromkeys(each.dtypes for each in spec.tensors()):
        if group is None:
            continue
        wanted = [dtype for dtype in group if how.dtypes is None or dtype in how.dtypes or not dtype.is_floating_point]
        found[group] = choose(draw, ("dtype", len(found)), sampled(tuple(wanted) or group))
    floating = next((dtype for dtype in found.values() if dtype.is_floating_point or dtype.is_complex), None)
    first = next(iter(spec.tensors()), None)
    before = None if first is None or first.dtypes is None else found[first.dtypes]  # an index after it does not count
    return {None: floating or before or torch.float32, **found}


def _tensor(
    draw: Callable[..., Any],
    item: TensorArgument,
    dtype: torch.dtype,
    sizes: JointSizes,
    how: Drawing,
    number: int,
) -> TensorCase:
    shape, floating = sizes.shape(item.pattern), dtype.is_floating_point or dtype.is_complex
    layouts = [name for name in how.layouts if fits(name, shape) and name in (item.layouts or LAYOUTS)]
    fills = [name for name in how.fills if name in (item.fills or FILLS)] or [*(item.fills or ORDINARY)]
    return TensorCase(
        shape=shape,
        dtype=dtype,
        layout=choose(draw, ("layout", number), sampled(tuple(layouts) or item.layouts or ("contiguous",))),
        fill=choose(draw, ("fill", number), sampled(tuple(fills))) if floating else "normal",
        seed=choose(draw, ("seed", number), _SEED),
        low=sizes.value(item.low),
        high=sizes.value(item.high),
    )
