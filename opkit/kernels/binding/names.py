"""Resolve the names that kernels in C and in Triton share: outputs, and measures of tensors such as ``x_size_0``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opkit.kernels.binding.facts import Facts

_MEASURE = re.compile(
    r"(?P<argument>\w+?)_(?:(?P<what>len|numel|rank|ndim)|(?P<dim>size|stride)_(?P<minus>m?)(?P<k>\d+))\Z"
)
_SOURCES = {"numel": "NUMEL", "rank": "RANK", "ndim": "RANK", "size": "SIZE", "stride": "STRIDE", "len": "LENGTH"}


def measure(name: str) -> tuple[str, str, int] | None:
    """Return the argument or output that a name measures, the end of an ``opk_source``'s name, and the dimension.

    >>> measure("x_stride_m1"), measure("x_numel"), measure("x")
    (('x', 'STRIDE', -1), ('x', 'NUMEL', 0), None)
    """
    match = _MEASURE.match(name)
    if match is None:
        return None
    dimension = int(match["k"] or 0) * (-1 if match["minus"] else 1)
    return match["argument"], _SOURCES[match["what"] or match["dim"]], dimension


def output_numbers(facts: Facts, names: Sequence[str]) -> dict[str, int]:
    """Return the number of each output by its names: "out", or "out0", "out1", ..., and those in ``names``.

    An argument of the same name takes precedence.
    """
    count = len(facts.outputs)
    common = ["out"] if count == 1 else [f"out{number}" for number in range(count)]
    numbers = {name: number for listed in (common, names) for number, name in enumerate(listed) if name}
    arguments = {argument.name for argument in facts.arguments}
    return {name: number for name, number in numbers.items() if name not in arguments}
