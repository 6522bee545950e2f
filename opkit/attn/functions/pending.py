"""Functions in code that Dynamo traces: numbers in programs, until the graph runs and their expressions are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from opkit.attn.functions.affine import AXES
from opkit.attn.functions.trace import Kind, Traced

Functions = list[tuple[Kind, Callable[..., Any]]]
"""The functions of a call, which programs name by number, each with its kind."""

SUBSTITUTES: dict[str, Callable[..., Sequence[Any]]] = {}
"""Of operators whose programs name functions: what returns the arguments with the expressions of ``functions``, a keyword."""


@dataclasses.dataclass(frozen=True)
class Pending:
    """What stands for a :class:`Traced` function: its number among those of the call, and which part of it is meant."""

    number: int
    ranges: Mapping[str, range]
    tensors: ClassVar[tuple[Tensor, ...]] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], kind: Kind, functions: Functions) -> Pending:
        """Return what stands for a function, which is appended to those of the call."""
        functions.append((kind, function))
        return cls(len(functions) - 1, {})

    def part(self, ranges: Mapping[str, range]) -> Pending:
        """Return what stands for :meth:`Traced.part`."""
        found = dict(self.ranges)
        for axis, own in ranges.items():
            first = found[axis].start if axis in found else 0
            found[axis] = range(first + own.start, first + own.stop)
        return Pending(self.number, found)

    def words(self) -> list[int]:
        """Return operands that stand for those of :meth:`Function.words`."""
        places = [word for axis, own in self.ranges.items() for word in (AXES.index(axis), own.start, own.stop)]
        return [1 + len(places), self.number, *places]

    @classmethod
    def of_words(cls, operands: Sequence[int]) -> Pending:
        """Return what :meth:`words` returned as an object.

        >>> Pending.of_words(Pending(1, {"h": range(2, 4)}).words())
        Pending(number=1, ranges={'h': range(2, 4)})
        """
        places = zip(*[iter(operands[2:])] * 3, strict=True)
        return cls(operands[1], {AXES[axis]: range(start, stop) for axis, start, stop in places})

    def traced(self, functions: Sequence[Traced]) -> Traced:
        """Return the function, from the expressions of all."""
        found = functions[self.number]
        return found.part(self.ranges) if self.ranges else found


def with_kernel(substitute: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Return the same for the operator whose last argument names the kernel."""
    return lambda *arguments, functions: (*substitute(*arguments[:-1], functions=functions), arguments[-1])
