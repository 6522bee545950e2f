"""From a function's annotations to what the operator knows of its parameters: schema types, patterns, codecs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkit.errors import DefinitionError
from opkit.op import patterns
from opkit.op.codecs import Codec, ReturnCodec, codec_for, return_codec, without_none

_SCALARS = {int: "int", float: "float", bool: "bool", str: "str", torch.dtype: "dtype", torch.device: "device"}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the operator's Python signature. ``kind`` is "tensor", "tensors", a scalar's name or "other"."""

    name: str
    kind: str
    optional: bool
    keyword_only: bool
    default: Any
    annotation: Any
    pattern: patterns.TensorPattern | None
    codec: Codec | None

    @property
    def required(self) -> bool:
        """Whether a call must give this argument."""
        return self.default is inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Signature:
    """The operator's Python signature, read once at definition."""

    python: inspect.Signature
    parameters: tuple[Parameter, ...]
    return_annotation: Any
    returns: ReturnCodec | None
    return_patterns: tuple[patterns.TensorPattern | None, ...]

    @functools.cached_property
    def flattened(self) -> bool:
        """Whether arguments or results pass through a codec on their way to the schema."""
        return self.returns is not None or any(parameter.codec for parameter in self.parameters)

    @functools.cached_property
    def annotated(self) -> bool:
        """Whether any argument has a shape or dtype to check."""
        return any(parameter.pattern for parameter in self.parameters)

    def encode(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The schema's positional and keyword arguments of a Python call."""
        bound = self.python.bind(*args, **kwargs)
        bound.apply_defaults()
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for parameter in self.parameters:
            for name, value in _encoded(parameter, bound.arguments[parameter.name]):
                if parameter.keyword_only:
                    named[name] = value
                else:
                    positional.append(value)
        return positional, named

    def decode(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The Python arguments of a call through the schema; arguments left out keep their Python defaults."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        remaining = list(args)
        for parameter in self.parameters:
            fields = field_names(parameter)
            if parameter.keyword_only:
                values = [kwargs[name] for name in fields if name in kwargs]
            else:
                values, remaining = remaining[: len(fields)], remaining[len(fields) :]
            if not values:
                continue
            values = _completed(parameter, values, len(fields))
            value = parameter.codec.decode(values) if parameter.codec else values[0]
            if parameter.keyword_only:
                named[parameter.name] = value
            else:
                positional.append(value)
        return positional, named


def field_names(parameter: Parameter) -> list[str]:
    """The schema's argument names for one Python parameter."""
    if parameter.codec is None:
        return [parameter.name]
    return [parameter.name + field.suffix for field in parameter.codec.fields]


def _encoded(parameter: Parameter, value: Any) -> list[tuple[str, Any]]:
    values = (value,) if parameter.codec is None else parameter.codec.encode(value)
    return list(zip(field_names(parameter), values, strict=True))


def _completed(parameter: Parameter, values: list[Any], count: int) -> list[Any]:
    # The dispatcher drops trailing arguments that equal their schema defaults; put them back.
    if len(values) == count or parameter.codec is None:
        return values
    return [*values, *parameter.codec.encode(parameter.default)[len(values) :]]


def read(function: Callable[..., Any]) -> Signature:
    """Read ``function``'s signature.

    Raises:
        DefinitionError: ``function`` is not a Python function, or an annotation has no schema.
    """
    if not isinstance(function, types.FunctionType):
        raise DefinitionError(f"opkit.custom_op takes a Python function, got {type(function).__name__}: {function!r}")
    python = inspect.signature(function)
    scope = {**function.__globals__, **_closure(function)}
    parameters = tuple(_parameter(item, resolve(item.annotation, scope)) for item in python.parameters.values())
    returned = resolve(python.return_annotation, scope)
    plain = strip(returned)
    return Signature(python, parameters, plain, return_codec(plain), _return_patterns(returned))


def _closure(function: types.FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _filled(cell)}


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the name is bound later
        return False
    return True


def resolve(annotation: Any, scope: dict[str, Any]) -> Any:
    """``annotation`` with strings evaluated in ``scope``; what cannot be evaluated stays for torch to report."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, scope)
    except Exception:  # the same evaluation is done, and its failure reported, by torch.library.infer_schema
        return annotation


def strip(annotation: Any) -> Any:
    """``annotation`` with every jaxtyping annotation replaced by the tensor type within it."""
    if patterns.is_jaxtyping(annotation):
        return annotation.array_type
    origin, items = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is None or not items:
        return annotation
    plain = tuple(strip(item) for item in items)
    if plain == items:
        return annotation
    if origin in (typing.Union, types.UnionType):
        return typing.Union[plain]  # noqa: UP007
    return types.GenericAlias(origin, plain)


def _first_pattern(annotation: Any) -> patterns.TensorPattern | None:
    if patterns.is_jaxtyping(annotation):
        return patterns.parse(annotation)
    return next((p for item in typing.get_args(annotation) if (p := _first_pattern(item))), None)


def _return_patterns(annotation: Any) -> tuple[patterns.TensorPattern | None, ...]:
    if typing.get_origin(annotation) is tuple and typing.get_args(annotation)[1:] != (...,):
        return tuple(_first_pattern(item) for item in typing.get_args(annotation))
    return (_first_pattern(annotation),)


def _parameter(item: inspect.Parameter, annotation: Any) -> Parameter:
    plain = strip(annotation)
    codec = None if isinstance(plain, str) else codec_for(plain)
    bare, optional = without_none(plain)
    return Parameter(
        name=item.name,
        kind="other" if codec else _kind(bare),
        optional=optional,
        keyword_only=item.kind is inspect.Parameter.KEYWORD_ONLY,
        default=item.default,
        annotation=plain,
        pattern=None if isinstance(annotation, str) else _first_pattern(annotation),
        codec=codec,
    )


def _kind(bare: Any) -> str:
    if bare is torch.Tensor:
        return "tensor"
    if torch.Tensor in typing.get_args(bare) or typing.Optional[torch.Tensor] in typing.get_args(bare):  # noqa: UP045
        return "tensors"
    return _SCALARS.get(bare, "other") if isinstance(bare, type) else "other"
