"""This module defines the specs of an operator's arguments, and draws whole calls from them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from opkit.contract.calls import sizes as joint
from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.calls.fills import FILLS, ORDINARY
from opkit.contract.calls.layouts import LAYOUTS, fits
from opkit.errors import ArgumentError
from opkit.op.schema import patterns
from opkit.op.schema.patterns import TensorPattern

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
        layouts=_names("layouts", layouts, LAYOUTS),
        fills=_names("fills", fills, FILLS),
        differentiable=differentiable,
    )


def _names(what: str, names: Iterable[str] | None, known: Mapping[str, Any]) -> tuple[str, ...] | None:
    if names is None:
        return None
    names = tuple(names)
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ArgumentError(f"tensor({what}=...): {wrong[0]!r} is not one of {', '.join(known)}.")
    return names


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The parts of a call that a search varies; each property has its own."""

    layouts: tuple[str, ...] = ("contiguous",)
    fills: tuple[str, ...] = ORDINARY
    dtypes: tuple[torch.dtype, ...] | None = None  # only these, if the specs allow any of them
    largest: int = max(joint.SIZES)
    elements: int = joint.MAX_ELEMENTS


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
    """Return a call; ``draw`` makes every decision, each with a label: see :func:`opkit.contract.calls.sizes.choose`."""
    sizes = joint.JointSizes(draw, [each.pattern for each in spec.tensors()], how.largest, how.elements)
    dtypes = _dtypes(draw, spec, how)
    numbers = itertools.count()

    def value(item: Any) -> Any:
        number = next(numbers)
        if isinstance(item, TensorArgument):
            absent = item.optional and joint.choose(draw, ("none", number), joint.EITHER)
            return None if absent else _tensor(draw, item, dtypes[item.dtypes], sizes, how, number)
        if isinstance(item, SearchStrategy):
            return joint.choose(draw, ("value", number), item)
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
        found[group] = joint.choose(draw, ("dtype", len(found)), joint.sampled(tuple(wanted) or group))
    floating = next((dtype for dtype in found.values() if dtype.is_floating_point or dtype.is_complex), None)
    first = next(iter(spec.tensors()), None)
    before = None if first is None or first.dtypes is None else found[first.dtypes]  # an index after it does not count
    return {None: floating or before or torch.float32, **found}


def _tensor(
    draw: Callable[..., Any],
    item: TensorArgument,
    dtype: torch.dtype,
    sizes: joint.JointSizes,
    how: Drawing,
    number: int,
) -> TensorCase:
    shape, floating = sizes.shape(item.pattern), dtype.is_floating_point or dtype.is_complex
    layouts = [name for name in how.layouts if fits(name, shape) and name in (item.layouts or LAYOUTS)]
    fills = [name for name in how.fills if name in (item.fills or FILLS)] or [*(item.fills or ORDINARY)]
    return TensorCase(
        shape=shape,
        dtype=dtype,
        layout=joint.choose(draw, ("layout", number), joint.sampled(tuple(layouts) or item.layouts or ("contiguous",))),
        fill=joint.choose(draw, ("fill", number), joint.sampled(tuple(fills))) if floating else "normal",
        seed=joint.choose(draw, ("seed", number), _SEED),
        low=sizes.value(item.low),
        high=sizes.value(item.high),
    )
