"""Tables of rules by operator name. A rule lowers an operator of a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Rule = Callable[..., Any]
"""Takes a ``Builder``, then the operator's arguments: tensors as ``Tensor``, dtypes as their names, sizes as ``Index``.

It returns the operator's result: a ``Tensor``, or a tuple of them with None for a result that does not exist.
"""

R = TypeVar("R", bound=Rule)


class NoRule(Exception):
    """A rule does not cover these arguments; the message says which, and becomes the extern call's reason."""


class WrongResult(NoRule):
    """The result of a rule has another type than that of the operator."""


class Table(dict[str, Rule]):
    """Rules by the names of the operators.

    >>> table = Table()
    >>> @table.rule("aten.alias.default", "aten.detach.default")
    ... def same(b, x):
    ...     return x
    >>> sorted(table)
    ['aten.alias.default', 'aten.detach.default']
    """

    def rule(self, *names: str) -> Callable[[R], R]:
        """Register a function for operators, named with their overloads."""

        def register(function: R) -> R:
            for name in names:
                assert name not in self, f"{name} has two rules"
                self[name] = function
            return function

        return register


def overloads(operator: str, *names: str) -> tuple[str, ...]:
    """Return the full names of an ATen operator's overloads.

    >>> overloads("add", "Tensor", "Scalar")
    ('aten.add.Tensor', 'aten.add.Scalar')
    """
    return tuple(f"aten.{operator}.{name}" for name in names or ("default",))
