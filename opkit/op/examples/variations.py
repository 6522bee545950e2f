"""Generate small calls of a native kernel from its operator's annotations: every rank, dtype and flag that a call may have.

``aot.package`` derives layout programs from them before any call.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from opkit.kernels.binding import ANY_DTYPE
from opkit.kernels.facts import Argument
from opkit.op.core import Operator
from opkit.op.layout.outputs import operands
from opkit.op.layout.program import DTYPES
from opkit.op.native.function import NativeFunction
from opkit.op.schema import patterns
from opkit.op.schema.patterns import TensorPattern
from opkit.op.schema_facts import declared_type, patterns_of_arguments

_RUN = (2, 6, 9, 10)
"""The sizes that ``*name`` stands for, from the first on; none of them is one of ``patterns.EXAMPLE_SIZES``."""

_MAX_VARIATIONS = 16
_TENSORS = ("DATA", "TENSOR")  # how the sources of slots that hold tensors begin

_VALUES: dict[str, tuple[Any, ...]] = {
    "int": (1, 0, -1),
    "float": (0.5,),
    "bool": (False, True),
    "str": ("",),
    "dtype": (torch.float32,),
    "ints": ([2], [2, 3], [2, 3, 4], [2, 3, 4, 6]),
    "floats": ([0.5], [0.5, 2.0]),
    "bools": ([False], [True]),
    "tensor": (1,),
    "tensors": (2, 1, 3),
}
"""The values of arguments of each kind, the usual first; for tensors, how many."""


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of a call.

    ``run`` is what ``*name`` stands for, ``names`` holds the named sizes that are 1, and ``numbers`` those for the others.
    """

    run: tuple[int, ...]
    names: Mapping[str, int]
    numbers: Sequence[int]


def split_arguments(operator: Operator, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    pairs = list(zip(operator.schema.arguments, values, strict=True))
    return [v for a, v in pairs if not a.kwarg_only], {a.name: v for a, v in pairs if a.kwarg_only}


def example_calls(function: NativeFunction) -> Iterator[list[Any]]:
    """Yield the values of each schema argument of calls that the kernel may get, the more usual ones first.

    They differ in: the element types of the kernel; how many sizes ``*name``, or a tensor without annotation, stands for
    (0 to 4); which of the leading sizes are 1; optional arguments, flags, numbers, and lengths of lists.
    """
    calls = _Calls(function)
    usual, others = calls.variations[:1], calls.variations[1:]
    for variations, ones in itertools.product((usual, others), (False, True)):
        for sizes in calls.sizes(ones):
            for choice, dtypes in itertools.product(variations, calls.dtypes):
                values = calls.values(choice, dtypes, sizes)
                if values is not None:
                    yield values


class _Calls:
    """The ways in which calls of one kernel differ."""

    def __init__(self, function: NativeFunction) -> None:
        self.operator = function.operator
        self.bound = function.bound
        self.arguments = function.bound.facts.arguments
        self.patterns = patterns_of_arguments(function.operator)
        self.shapes = [self._pattern(a) for a in self.arguments if a.kind in ("tensor", "tensors")]
        self.runs = list(dict.fromkeys(d.text for shape in self.shapes for d in shape.dims if d.kind == "many"))
        self.names = list(dict.fromkeys(d.text for shape in self.shapes for d in shape.dims if d.kind == "name"))
        listed = [[getattr(torch, name) for name in function.native.variables[v]] for v in self.bound.variables]
        self.dtypes = [dict(zip(self.bound.variables, each, strict=True)) for each in itertools.product(*listed)]
        self.choices = [self._choices(number) for number in range(len(self.arguments))]
        self.variations = _variations([len(listed) for listed in self.choices])
        self.numbers = self._numbers()

    def _pattern(self, argument: Argument) -> TensorPattern:
        return self.patterns.get(argument.name, patterns.ANY_SHAPE)

    def _choices(self, number: int) -> list[Any]:
        """Return the values that an argument may have; for tensors, how many."""
        argument, declared = self.arguments[number], self.operator.schema.arguments[number]
        listed = list(_VALUES.get(argument.kind, ()))
        if declared_type(declared) == "Device":
            listed = [torch.device("cpu")]
        if declared.has_default_value() and declared.default_value is not None:
            others = {a.name: None for i, a in enumerate(self.operator.schema.arguments) if i != number}
            default = operands(self.operator, [], others)[number]
            listed = [default, *(other for other in listed if argument.kind in ("int", "bool") and other != default)]
        return [*listed, None] if argument.optional else listed

    def _numbers(self) -> Sequence[int]:
        """Return the numbers for named sizes: odd ones, or those with which the reference can be traced."""
        for numbers in patterns.EXAMPLE_SIZES:
            sizes = _Sizes(_RUN[:1], {}, numbers)
            calls = (self.values(*each, sizes) for each in itertools.product(self.variations[:1], self.dtypes))
            if any(values is not None and self._traceable(values) for values in calls):
                return numbers
        return patterns.EXAMPLE_SIZES[0]

    def _traceable(self, values: Sequence[Any]) -> bool:
        return self.operator.registered.fake is not None or self.operator.transparent(
            *split_arguments(self.operator, values)
        )

    def sizes(self, ones: bool) -> Iterator[_Sizes]:
        """Yield each choice of sizes; with ``ones``, some of the leading ones are 1."""
        for rank in range(len(_RUN) + 1) if self.runs else (0,):
            count = rank if self.runs else len(self.names)
            for places in _leading(count) if ones else [()]:
                run = tuple(1 if self.runs and i in places else n for i, n in enumerate(_RUN[:rank]))
                names = {} if self.runs else {self.names[i]: 1 for i in places}
                yield _Sizes(run, names, self.numbers)

    def values(self, choice: Sequence[int], dtypes: Mapping[str, torch.dtype], sizes: _Sizes) -> list[Any] | None:
        """Return the values of one call; None where an annotation forbids one."""
        known: dict[str, Any] = dict(zip(self.names, itertools.cycle(sizes.numbers), strict=False))
        known |= {**sizes.names, **dict.fromkeys(self.runs, sizes.run)}
        values = [self.choices[number][chosen] for number, chosen in enumerate(choice)]
        for number, argument in enumerate(self.arguments):
            if argument.kind in ("tensor", "tensors") and values[number] is not None:
                tensor = self._tensor(number, dtypes, known, sizes.numbers)
                if tensor is None:
                    return None
                values[number] = tensor if argument.kind == "tensor" else [tensor] * values[number]
        return values

    def _tensor(
        self, number: int, dtypes: Mapping[str, torch.dtype], known: dict[str, Any], numbers: Sequence[int]
    ) -> torch.Tensor | None:
        pattern = self._pattern(self.arguments[number])
        dtype = self._dtype(number, dtypes) or pattern.example_dtype()
        if pattern.dtypes is not None and dtype not in pattern.dtypes:
            return None
        return torch.zeros(patterns.example_shape(pattern, known, numbers), dtype=dtype)

    def _dtype(self, number: int, dtypes: Mapping[str, torch.dtype]) -> torch.dtype | None:
        """Return the dtype as which the kernel takes an argument; None where any will do."""
        declared = (
            slot.dtype for slot in self.bound.slots if slot.argument == number and slot.source.startswith(_TENSORS)
        )
        dtype = next(declared, ANY_DTYPE)
        if dtype < ANY_DTYPE:
            return dtypes[self.bound.variables[-2 - dtype]]
        return next((known for known, code in DTYPES.items() if code == dtype), None)


def _variations(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return which of its values each argument takes: all combinations, or, if they are many, those that differ in one."""
    combinations = list(itertools.islice(itertools.product(*map(range, counts)), _MAX_VARIATIONS + 1))
    if len(combinations) <= _MAX_VARIATIONS or 0 in counts:
        return combinations
    usual = (0,) * len(counts)
    single = [(*usual[:i], n, *usual[i + 1 :]) for i, count in enumerate(counts) for n in range(1, count)]
    return [usual, *single][:_MAX_VARIATIONS]


def _leading(count: int) -> list[tuple[int, ...]]:
    """Return which of some sizes are 1: each of them alone, and the first two, three, ... together."""
    alone = [(i,) for i in range(count)]
    return [*alone, *(tuple(range(n)) for n in range(2, count + 1))]
