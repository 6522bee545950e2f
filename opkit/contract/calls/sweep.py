"""This module generates a fixed list of cases that a property is tried on before the search, so that rare ones always occur.

Hypothesis draws sizes, dtypes and flags at random: in fifty cases it may well miss a row of 1025 elements in float16. A sweep
takes every size of every dimension in turn, and varies the dtypes, fills, layouts, flags and optional arguments at the same
time. A row of it lists the decisions that differ from the simplest call; one that fails is shrunk by removing decisions, one by
one, and by smaller sizes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
from hypothesis import strategies as st

from opkit.contract.calls.cases import Case
from opkit.contract.calls.specs import ArgumentSpecs, Drawing, assemble

Label = tuple[str, int]
Row = dict[Label, Any]

_BOUNDARIES = (
    2049, 1025, 0, 1, 2, 65, 17, 33, 129, 257, 9, 1024, 7, 127, 64, 513, 1023, 8, 16, 255, 4, 15, 32, 31, 128, 3, 63, 5, 1000,
    256, 100, 10, 12, 511, 512,
)  # fmt: skip
_BATCHES = ((2, 3), (), (0,), (3,), (1,), (2, 0), (65,), (1, 2), (2, 1, 2), (1025,), (17, 3), (2, 33), (3, 2, 2))
_EXAMPLES = 12
_KINDS = ("value", "none", "broadcast", "dtype", "layout", "fill", "sizes", "size", "seed")
_DTYPE: Label = ("dtype", 0)
_SIMPLEST = {"size": 1, "sizes": (), "seed": 0, "none": False, "broadcast": False}
_GENERIC = (3, 5, 2, 4, 7)
_ALONE = (257, 65)  # sizes of one dimension while the others are 1: a single row or column has another layout


class Scripted:
    """Makes the decisions of :func:`assemble`: those of a row, and the simplest ones for the rest."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.seen: dict[Label, st.SearchStrategy[Any]] = {}

    def decide(self, label: Label, strategy: st.SearchStrategy[Any]) -> Any:
        """Return the row's decision, if it is among the strategy's values."""
        self.seen[label] = strategy
        if label not in self.row:
            return _SIMPLEST[label[0]] if label[0] in _SIMPLEST else examples(strategy)[0]
        wanted, values = self.row[label], _listed(strategy)
        return wanted if values is None or label[0] == "size" or wanted in values else values[0]

    def __call__(self, strategy: st.SearchStrategy[Any]) -> Any:
        return examples(strategy)[0]


def _listed(strategy: Any) -> list[Any] | None:
    """Return the values of a ``sampled_from`` strategy, in its order; None for other strategies."""
    found = getattr(strategy, "wrapped_strategy", strategy)
    elements = getattr(found, "elements", None)
    plain = elements is not None and not getattr(found, "_transformations", ())
    return list(elements) if plain else None  # pyright: ignore[reportArgumentType]


def quiet_settings(count: int, **more: Any) -> hypothesis.settings:
    """Return Hypothesis's settings for ``count`` examples: without database, deadline, health checks and output."""
    usual: dict[str, Any] = {
        "max_examples": count,
        "database": None,
        "deadline": None,
        "print_blob": False,
        "suppress_health_check": list(hypothesis.HealthCheck),
        "verbosity": hypothesis.Verbosity.quiet,
    }
    return hypothesis.settings(**usual | more)


@functools.lru_cache(maxsize=512)
def examples(strategy: st.SearchStrategy[Any]) -> list[Any]:
    """Return some values of a strategy, the simplest first; the same ones every time."""
    found: list[Any] = []

    @hypothesis.seed(0)
    @quiet_settings(_EXAMPLES, phases=[hypothesis.Phase.generate])
    @hypothesis.given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    listed = _listed(strategy)
    if listed is not None:
        return listed
    collect()
    first = found[:1]
    return first + [value for value in (*_ends(strategy), *found[1:]) if _differs(value, first)]


def _differs(value: Any, first: list[Any]) -> bool:
    return not (isinstance(value, (int, float, bool)) and value == first[0])


def _ends(strategy: Any) -> list[Any]:
    """Return the least and the largest number of a strategy of numbers, and 1, -1 and 0 if these are among them."""
    found = getattr(strategy, "wrapped_strategy", strategy)
    least, most = (
        getattr(found, a, getattr(found, b, None)) for a, b in (("start", "min_value"), ("end", "max_value"))
    )
    if not isinstance(least, (int, float)) or not isinstance(most, (int, float)):
        return []
    kind = type(least)
    ends = [least, most] if abs(least) < float("inf") and abs(most) < float("inf") else []
    return ends + [kind(value) for value in (1, -1, 0) if least <= value <= most]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The rows for one spec.

    Attributes:
        spec: the specs of the arguments.
        how: the parts of the call that the sweep varies.
        sizes: boundary sizes that each dimension takes, one after another.
    """

    spec: ArgumentSpecs
    how: Drawing = dataclasses.field(default_factory=Drawing)
    sizes: tuple[int, ...] = _BOUNDARIES

    def case(self, row: Row) -> Case:
        """Return the case of a row."""
        return assemble(Scripted(row), self.spec, self.how)

    def rows(self, most: int) -> Iterator[Row]:
        """Yield at most ``most`` rows: equal sizes, sizes of one dimension, and everything else at random, from a fixed seed."""
        chance = random.Random(0)
        for sized in itertools.islice(self._sized(), most):
            yield {**self._anything(chance), **sized}

    @functools.cached_property
    def _labels(self) -> dict[Label, list[Any]]:
        """Every decision that a call needs, and its options."""
        script = Scripted({})
        assemble(script, self.spec, self.how)
        absent = {label: False for label in script.seen if label[0] == "none"}
        script.row = absent
        assemble(script, self.spec, self.how)
        return {label: self._options(label, strategy) for label, strategy in script.seen.items()}

    def _options(self, label: Label, strategy: st.SearchStrategy[Any]) -> list[Any]:
        allowed = [size for size in self.sizes if size <= self.how.largest]
        if label[0] == "size":
            return allowed
        if label[0] == "sizes":
            return [batch for batch in _BATCHES if max(batch, default=0) <= self.how.largest]
        return list(range(4)) if label[0] == "seed" else examples(strategy)

    def _sized(self) -> Iterator[Row]:
        """Yield rows of sizes alone."""
        names = [label for label in self._labels if label[0] in ("size", "sizes")]
        generic: Row = {
            label: _GENERIC[at % len(_GENERIC)] if label[0] == "size" else (2,) for at, label in enumerate(names)
        }
        ones: Row = {label: 1 if label[0] == "size" else () for label in names}
        for step in range(max((len(self._labels[name]) for name in names), default=0)):
            for name in names:
                if step < len(self._labels[name]):
                    row = {**generic, name: self._labels[name][step]}
                    yield from self._of_each_dtype(row) if step == 0 else [row]
            if step < len(_ALONE) and len(names) > 1:
                yield from ({**ones, name: _ALONE[step] if name[0] == "size" else (_ALONE[step],)} for name in names)
            if step < len(_GENERIC):
                yield {label: _GENERIC[step] if label[0] == "size" else (_GENERIC[step],) for label in names}
        while True:
            yield generic

    def _of_each_dtype(self, row: Row) -> Iterator[Row]:
        """Yield the row in every dtype: with the largest size, sums are long enough to reveal a narrow accumulator."""
        for dtype in self._labels.get(_DTYPE) or [None]:
            yield row if dtype is None else {**row, _DTYPE: dtype}

    def _anything(self, chance: random.Random) -> Row:
        """Return a random decision about everything except sizes; all options are equally likely."""
        others = {label: options for label, options in self._labels.items() if label[0] not in ("size", "sizes")}
        return {label: chance.choice(options) for label, options in others.items() if options}

    def shrink(self, row: Row, breaks: Callable[[Case], bool]) -> None:
        """Call ``breaks`` on simpler and simpler rows; the last one that breaks is the smallest."""
        changed = True
        while changed:
            changed = False
            for label in sorted(row, key=lambda each: _KINDS.index(each[0])):
                simpler = next((r for r in self._simpler(row, label) if breaks(self.case(r))), None)
                if simpler is not None:
                    row, changed = simpler, True
        breaks(self.case(row))

    def _simpler(self, row: Row, label: Label) -> Iterator[Row]:
        """Yield the row without the decision, then with simpler ones."""
        yield {name: value for name, value in row.items() if name != label}
        value = row[label]
        if label[0] == "size":
            later = [name for name in self._labels if name[0] == "size" and name > label]
            if later and later[-1] not in row:
                yield {**{name: each for name, each in row.items() if name != label}, later[-1]: value}
            yield from ({**row, label: size} for size in _below(value))
            equal = [name for name, each in row.items() if name[0] == "size" and each == value]
            if len(equal) > 1:
                yield from ({**row, **dict.fromkeys(equal, size)} for size in _below(value))
        elif label[0] == "sizes":
            yield from ({**row, label: batch} for batch in _shorter(value))
        else:
            options = self._labels.get(label, [])
            earlier = options[1 : options.index(value)] if value in options else []
            yield from ({**row, label: option} for option in earlier)


def _below(size: int) -> Iterator[int]:
    """Yield sizes below ``size``, each closer to it: small ones, then halving the distance to it, down to one less."""
    tried = {each for each in (2, 3, 4, 8) if each < size}
    gap = size // 2
    while gap:
        tried.add(size - gap)
        gap //= 2
    yield from sorted(tried - {1, size})


def _shorter(batch: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for at, size in enumerate(batch):
        yield (*batch[:at], *batch[at + 1 :])
        yield from ((*batch[:at], smaller, *batch[at + 1 :]) for smaller in (1, *_below(size)) if smaller < size)
