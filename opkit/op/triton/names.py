"""Resolve the names in a Triton kernel: an argument, an output, a named size, or a measure of a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from opkit.kernels.facts import Facts, measure, targets

_SCALARS = {"int": "SCALAR", "float": "SCALAR", "bool": "SCALAR", "dtype": "SCALAR", "str": "STRING"}
_LISTS = ("ints", "floats", "bools")


def measured(name: str) -> str:
    """Return the tensor of which a name is a measure, or "".

    >>> measured("x_stride_0"), measured("x")
    ('x', '')
    """
    found = measure(name)
    return found[0] if found else ""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a value of a call comes from.

    Attributes:
        name: as the kernel calls it.
        origin: the end of an ``opk_source``'s name: "TENSOR", "SCALAR", "NAMED_SIZE", "STRIDE", ...
        kind: "tensor", "int", "float", "bool", "dtype", "str" or "ints".
        argument: an argument's number, or the number of arguments plus an output's.
        detail: a dimension, or the number of a named size.
    """

    name: str
    origin: str
    kind: str
    argument: int = 0
    detail: int = 0


class KernelNames:
    """The names that an operator gives its kernels."""

    def __init__(self, facts: Facts, outputs: Sequence[str] = ()) -> None:
        self.facts = facts
        self.sizes = facts.sizes
        self._targets = targets(facts, outputs)

    def find(self, name: str) -> Source | None:
        """Return what ``name`` means; None where nothing has it."""
        return self._target(name) or self._size(name) or self._measure(name) or self._pointer(name)

    def known(self) -> list[str]:
        """Return the known names without measures."""
        return [*self._targets, *self.sizes]

    def tensors(self) -> dict[str, int]:
        """Return the numbers of the tensors among arguments and outputs."""
        return {name: target.number for name, target in self._targets.items() if target.kind == "tensor"}

    def _target(self, name: str) -> Source | None:
        target = self._targets.get(name)
        if target is None:
            return None
        if target.kind == "tensor":
            return Source(name, "TENSOR", "tensor", target.number)
        if target.kind in _SCALARS:
            optional = target.optional and target.kind != "str"
            return Source(name, "SCALAR_POINTER" if optional else _SCALARS[target.kind], target.kind, target.number)
        return Source(name, "VALUES", target.kind, target.number) if target.kind in _LISTS else None

    def _size(self, name: str) -> Source | None:
        return Source(name, "NAMED_SIZE", "int", 0, self.sizes.index(name)) if name in self.sizes else None

    def _measure(self, name: str) -> Source | None:
        argument, origin, dimension = measure(name) or ("", "", 0)
        target = self._targets.get(argument)
        if target is None or (target.kind != "tensor") != (origin == "LENGTH"):
            return None
        return Source(name, origin, "int", target.number, dimension)

    def _pointer(self, name: str) -> Source | None:
        bare = name.removesuffix("_ptr")
        found = self._target(bare) if bare != name else None
        return found if found is not None and found.kind == "tensor" else None
