"""The atoms of indices: loop variables, sizes, quotients, remainders, and computed integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from opkit.compiler.ir.index import Index


class Axis(NamedTuple):
    """The variable of a loop: 0 <= value < extent."""

    number: int
    extent: Index

    def __str__(self) -> str:
        return f"a{self.number}"


class Size(NamedTuple):
    """A size that is known when the program runs: at least ``least``."""

    name: str
    least: int = 1

    def __str__(self) -> str:
        return self.name


class Div(NamedTuple):
    """The quotient rounded down; the divisor is positive."""

    dividend: Index
    divisor: Index
    operator: str = "//"  # tuples of other classes are equal to this one if their fields are

    def __str__(self) -> str:
        return f"({self.dividend})//({self.divisor})"


class Mod(NamedTuple):
    """What :class:`Div` leaves: 0 <= value < divisor."""

    dividend: Index
    divisor: Index
    operator: str = "%"

    def __str__(self) -> str:
        return f"({self.dividend})%({self.divisor})"


class Value(NamedTuple):
    """An integer that is computed: an expression of the IR (``opkit.compiler.ir.expr.Expr``)."""

    expr: Any

    def __str__(self) -> str:
        return f"[{self.expr}]"


Atom: TypeAlias = Axis | Size | Div | Mod | Value
Monomial: TypeAlias = tuple[Atom, ...]
