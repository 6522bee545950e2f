"""Example calls of an operator: those that its kernels name, typical ones, and every variation of small ones.

Kernels are tuned and compiled for what their ``examples=`` name, or else for calls generated from the operator's annotations.
Small calls of a native kernel, of every rank, dtype and flag that a call may have, give ``aot.package`` layout programs
before any call.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from opkit.errors import ArgumentError
from opkit.kernels.binding import ANY_DTYPE
from opkit.kernels.facts import Argument
from opkit.op.core import Operator
from opkit.op.examples.arguments import ExampleCall, TensorSpec, make_all, named_dtype, parse_arguments
from opkit.op.examples.values import EXAMPLE_SIZES, SCALARS, example_shape
from opkit.op.layout.outputs import declared_type, operands, patterns_of_arguments, split_arguments
from opkit.op.layout.program import DTYPES
from opkit.op.native.function import NativeFunction
from opkit.op.schema import patterns
from opkit.op.schema.codecs import EnumCodec
from opkit.op.schema.patterns import TensorPattern
from opkit.op.schema.signature import OperatorParameter

_ROWS = 4
_NAMED_SIZES = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2)
_MAX_ELEMENTS = 2**24
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TYPICAL_KINDS = ("int", "float", "bool", "str")
_TENSORS = ("tensor", "tensors")


def generate(operator: Operator) -> list[ExampleCall]:
    """Generate calls that fit an operator's annotations, in bfloat16, float16 and float32 where these allow it.

    A named size is 1024, or less where a tensor would have more than 2**24 elements; ``*name`` is one size, 4 times that,
    or, where a tensor has no other, two sizes. A parameter with a default keeps it.

    Raises:
        ArgumentError: a parameter without default has a type for which there is no example value.
    """
    sizes = next(
        known for size in _NAMED_SIZES if _fit(operator, known := _sizes(operator, size)) or size == _NAMED_SIZES[-1]
    )
    arguments = [{p.name: _value(operator, p, sizes, dtype) for p in _required(operator)} for dtype in _DTYPES]
    return [ExampleCall(operator.name, each) for number, each in enumerate(arguments) if each not in arguments[:number]]


def _required(operator: Operator) -> list[OperatorParameter]:
    return [parameter for parameter in operator.signature.parameters if parameter.required]


def _shapes(operator: Operator) -> list[TensorPattern]:
    return [p.pattern or patterns.ANY_SHAPE for p in _required(operator) if p.kind in _TENSORS]


def _sizes(operator: Operator, size: int) -> dict[str, Any]:
    """Return the sizes that the annotations' names stand for."""
    shapes = _shapes(operator)
    known: dict[str, Any] = {}
    for dim in (dim for shape in shapes for dim in shape.dims if dim.kind != "many" and dim.text.isidentifier()):
        known[dim.text] = size
    for run in {dim.text for shape in shapes for dim in shape.dims if dim.kind == "many"}:
        others = any(len(shape.dims) > 1 for shape in shapes if run in [d.text for d in shape.dims if d.kind == "many"])
        known[run] = (_ROWS * size,) if others else (_ROWS * size, size)
    return known


def _fit(operator: Operator, sizes: Mapping[str, Any]) -> bool:
    return all(math.prod(_shape(pattern, sizes)) <= _MAX_ELEMENTS for pattern in _shapes(operator))


def _shape(pattern: TensorPattern, sizes: Mapping[str, Any]) -> tuple[int, ...]:
    return example_shape(pattern, dict(sizes), _NAMED_SIZES[:1])


def _value(operator: Operator, parameter: OperatorParameter, sizes: Mapping[str, Any], dtype: torch.dtype) -> Any:
    if parameter.kind in _TENSORS:
        pattern = parameter.pattern or patterns.ANY_SHAPE
        allowed = pattern.dtypes is None or dtype in pattern.dtypes
        spec = TensorSpec(dtype if allowed else pattern.example_dtype(), _shape(pattern, sizes))
        return spec if parameter.kind == "tensor" else [spec, spec]
    if parameter.optional:
        return None
    if parameter.choices:
        return parameter.choices[0]
    if isinstance(parameter.codec, EnumCodec):
        return next(iter(parameter.codec.kind))
    if parameter.kind == "dtype":
        return dtype
    if parameter.kind in _TYPICAL_KINDS:
        return SCALARS[parameter.kind][0]
    raise ArgumentError(
        f"{operator.name}: no value can be made up for {parameter.name} ({parameter.annotation}). Give calls in "
        "examples= of its kernel, or with --shapes."
    )


# ---- calls from examples ---------------------------------------------------------------------------------------------


def calls_of(operator: Operator, examples: Sequence[Mapping[str, Any]]) -> list[ExampleCall]:
    """Return the calls in ``examples``; without any, those that :func:`generate` returns.

    Raises:
        ArgumentError: an example cannot be read, or no call can be generated.
    """
    return from_examples(operator, examples) if examples else generate(operator)


def from_examples(operator: Operator, examples: Iterable[Mapping[str, Any]]) -> list[ExampleCall]:
    """Return the calls in a kernel's ``examples=``.

    Raises:
        ArgumentError: one cannot be read, or is no call of the operator.
    """
    calls: list[ExampleCall] = []
    for number, example in enumerate(examples):
        call = ExampleCall(operator.name, parse_arguments(example, f"{operator.name}, examples[{number}]"))
        check(operator, call)
        calls.append(call)
    return calls


def check(operator: Operator, call: ExampleCall) -> None:
    """Refuse a call that the operator does not take.

    Raises:
        ArgumentError: it names an unknown argument, leaves one out, or has something else in place of a tensor.
    """
    parameters = {parameter.name: parameter for parameter in operator.signature.parameters}
    for name in call.arguments:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ArgumentError(
                f"{call}: {operator.name} has no argument {name}; it has {', '.join(parameters)}.{hint}"
            )
    missing = [p.name for p in parameters.values() if p.required and p.name not in call.arguments]
    if missing:
        raise ArgumentError(f"{call}: {', '.join(missing)} is missing. {operator.name} takes {', '.join(parameters)}.")
    for name, value in call.arguments.items():
        _check_tensor(call, parameters[name], value)


def _check_tensor(call: ExampleCall, parameter: OperatorParameter, value: Any) -> None:
    wanted = parameter.kind == "tensor" and not (value is None and parameter.optional)
    if wanted != isinstance(value, TensorSpec) and (wanted or parameter.codec is None):
        what = "a tensor such as bf16[4096, 1024]" if wanted else f"{parameter.annotation}, which is no tensor"
        raise ArgumentError(f"{call}: {parameter.name} must be {what}.")


def arguments_of(
    operator: Operator, call: ExampleCall, device: str | torch.device = "cpu", seed: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of a call, made as :func:`opkit.op.examples.arguments.make` makes them.

    Raises:
        ArgumentError: the operator does not take the call, or a tensor cannot be made.
    """
    check(operator, call)
    arguments = make_all(call.arguments, device, seed)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in operator.signature.parameters:
        value = (
            _converted(call, parameter, arguments[parameter.name]) if parameter.name in arguments else parameter.default
        )
        if parameter.keyword_only:
            named[parameter.name] = value
        else:
            positional.append(value)
    return positional, named


def _converted(call: ExampleCall, parameter: OperatorParameter, value: Any) -> Any:
    """Return the dtype or the enumeration's member that ``value`` names; any other value as it is."""
    if isinstance(value, str) and parameter.kind == "dtype":
        converted: Any = named_dtype(value)
    elif isinstance(value, str) and isinstance(parameter.codec, EnumCodec):
        converted = parameter.codec.kind.__members__.get(value)
    else:
        return value
    if converted is None:
        choices = "a dtype such as bf16"
        if isinstance(parameter.codec, EnumCodec):
            choices = f"one of {', '.join(parameter.codec.kind.__members__)}"
        raise ArgumentError(f"{call}: {parameter.name} must be {choices}, got {value!r}.")
    return converted


# ---- variations of small calls ---------------------------------------------------------------------------------------


_RUN = (2, 6, 9, 10)
"""The sizes that ``*name`` stands for, from the first on; none of them is one of ``EXAMPLE_SIZES``."""

_MAX_VARIATIONS = 16
_TENSOR_SOURCES = ("DATA", "TENSOR")  # how the sources of slots that hold tensors begin

_COUNTS = {"tensor": (1,), "tensors": (2, 1, 3)}
"""How many tensors an argument of a kind may hold, the usual number first."""


@dataclasses.dataclass(frozen=True)
class _CallSizes:
    """The sizes of a call.

    ``run`` is what ``*name`` stands for, ``names`` holds the named sizes that are 1, and ``numbers`` those for the others.
    """

    run: tuple[int, ...]
    names: Mapping[str, int]
    numbers: Sequence[int]


def variations_of(function: NativeFunction) -> Iterator[list[Any]]:
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
        kind = "device" if declared_type(declared) == "Device" else argument.kind
        listed = list(SCALARS.get(kind, _COUNTS.get(kind, ())))
        if declared.has_default_value() and declared.default_value is not None:
            others = {a.name: None for i, a in enumerate(self.operator.schema.arguments) if i != number}
            default = operands(self.operator, [], others)[number]
            listed = [default, *(other for other in listed if argument.kind in ("int", "bool") and other != default)]
        return [*listed, None] if argument.optional else listed

    def _numbers(self) -> Sequence[int]:
        """Return the numbers for named sizes: odd ones, or those with which the reference can be traced."""
        for numbers in EXAMPLE_SIZES:
            sizes = _CallSizes(_RUN[:1], {}, numbers)
            calls = (self.values(*each, sizes) for each in itertools.product(self.variations[:1], self.dtypes))
            if any(values is not None and self._traceable(values) for values in calls):
                return numbers
        return EXAMPLE_SIZES[0]

    def _traceable(self, values: Sequence[Any]) -> bool:
        return self.operator.registered.fake is not None or self.operator.transparent(
            *split_arguments(self.operator, values)
        )

    def sizes(self, ones: bool) -> Iterator[_CallSizes]:
        """Yield each choice of sizes; with ``ones``, some of the leading ones are 1."""
        for rank in range(len(_RUN) + 1) if self.runs else (0,):
            count = rank if self.runs else len(self.names)
            for places in _leading_ones(count) if ones else [()]:
                run = tuple(1 if self.runs and i in places else n for i, n in enumerate(_RUN[:rank]))
                names = {} if self.runs else {self.names[i]: 1 for i in places}
                yield _CallSizes(run, names, self.numbers)

    def values(self, choice: Sequence[int], dtypes: Mapping[str, torch.dtype], sizes: _CallSizes) -> list[Any] | None:
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
        return torch.zeros(example_shape(pattern, known, numbers), dtype=dtype)

    def _dtype(self, number: int, dtypes: Mapping[str, torch.dtype]) -> torch.dtype | None:
        """Return the dtype as which the kernel takes an argument; None where any will do."""
        declared = (
            slot.dtype
            for slot in self.bound.slots
            if slot.argument == number and slot.source.startswith(_TENSOR_SOURCES)
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


def _leading_ones(count: int) -> list[tuple[int, ...]]:
    """Return which of some sizes are 1: each of them alone, and the first two, three, ... together."""
    alone = [(i,) for i in range(count)]
    return [*alone, *(tuple(range(n)) for n in range(2, count + 1))]
