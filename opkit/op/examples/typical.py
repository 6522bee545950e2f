"""Typical calls of an operator, for tuning and compiling: its kernels' ``examples=``, or calls generated from annotations."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from opkit.errors import ArgumentError
from opkit.op.core import Operator
from opkit.op.examples.arguments import ExampleCall, TensorSpec, make_all, named_dtype, parse_arguments
from opkit.op.schema import patterns
from opkit.op.schema.codecs import EnumCodec
from opkit.op.schema.patterns import TensorPattern
from opkit.op.schema.signature import OperatorParameter

_ROWS = 4
_NAMED_SIZES = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2)
_MAX_ELEMENTS = 2**24
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SCALARS: dict[str, Any] = {"int": 1, "float": 0.5, "bool": False, "str": "", "dtype": torch.float32}
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
    return patterns.example_shape(pattern, dict(sizes), _NAMED_SIZES[:1])


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
    if parameter.kind in _SCALARS:
        return dtype if parameter.kind == "dtype" else _SCALARS[parameter.kind]
    raise ArgumentError(
        f"{operator.name}: no value can be made up for {parameter.name} ({parameter.annotation}). Give calls in "
        "examples= of its kernel, or with --shapes."
    )


# ---- calls from examples ---------------------------------------------------------------------------------------------


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
