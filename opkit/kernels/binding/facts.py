"""Describe an operator's arguments, outputs and named sizes, to which a kernel's parameters are bound, in plain data.

The operator layer fills these in; nothing here knows of torch.
"""

from __future__ import annotations

import dataclasses

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
