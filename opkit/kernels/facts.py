"""Describe an operator's interface, to which a kernel's parameters are bound, in plain data, and the names that it gives kernels.

The operator layer fills the data in; nothing here knows of torch. Kernels in C and in Triton share the names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

KINDS = ("tensor", "tensors", "int", "float", "bool", "str", "dtype", "ints", "floats", "bools", "ignored")
"""The kinds of arguments, in the order of ``opk_kind`` in ``include/opkit.h``."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape's sizes: named (str), fixed (int), or any (None); ``variadic`` lies between ``before`` and ``after``.

    ``variadic`` is a name, "" for an unnamed run of sizes, or None where there is no such run.

    >>> Shape(("b",), "seq", ("d",)).names
    ('b', 'seq', 'd')
    """

    before: tuple[str | int | None, ...] = ()
    variadic: str | None = None
    after: tuple[str | int | None, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sizes that have one."""
        listed = (*self.before, *([self.variadic] if self.variadic else ()), *self.after)
        return tuple(size for size in listed if isinstance(size, str))


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of the schema."""

    name: str
    kind: str
    optional: bool = False
    written: bool = False
    shape: Shape | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """One output: a new tensor, or (``alias``) the argument of that number."""

    name: str
    alias: int | None = None
    shape: Shape | None = None


@dataclasses.dataclass(frozen=True)
class Facts:
    """The interface of an operator: what a kernel's parameters can receive.

    ``schema`` is the whole schema, name included: "demo::double(Tensor x) -> Tensor".
    """

    operator: str
    schema: str
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]

    @property
    def sizes(self) -> tuple[str, ...]:
        """The named sizes, in the order in which the arguments first show them."""
        shapes = [argument.shape for argument in self.arguments if argument.shape is not None]
        return tuple(dict.fromkeys(name for shape in shapes for name in shape.names))


@dataclasses.dataclass(frozen=True)
class Target:
    """An argument or an output that a kernel's parameter can receive.

    ``number`` is an argument's, or the number of arguments plus an output's.
    """

    name: str
    number: int
    kind: str
    optional: bool = False
    written: bool = False
    output: bool = False

    @property
    def const(self) -> str:
        """The qualifier of a pointer to it in C."""
        return "" if self.written else "const "


# ---- names -----------------------------------------------------------------------------------------------------------


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


def targets(facts: Facts, names: Sequence[str]) -> dict[str, Target]:
    """Return the arguments and outputs by the names that kernels may call them.

    Outputs are called "out", or "out0", "out1", ..., and as in ``names``. An argument of the same name takes precedence.
    """
    found = {
        argument.name: Target(argument.name, number, argument.kind, argument.optional, argument.written)
        for number, argument in enumerate(facts.arguments)
    }
    count = len(facts.outputs)
    common = ["out"] if count == 1 else [f"out{number}" for number in range(count)]
    numbers = {name: number for listed in (common, names) for number, name in enumerate(listed) if name}
    return {**found, **{name: _output(facts, number, name) for name, number in numbers.items() if name not in found}}


def _output(facts: Facts, number: int, name: str) -> Target:
    alias = facts.outputs[number].alias
    if alias is None:
        return Target(name, len(facts.arguments) + number, "tensor", written=True, output=True)
    argument = facts.arguments[alias]
    return Target(name, alias, argument.kind, argument.optional, written=True, output=True)
