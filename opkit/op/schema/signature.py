"""Read a function's signature: schema arguments, shape patterns and codecs from its annotations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import ArgumentTypeError, DefinitionError
from opkit.op.schema import annotations, patterns
from opkit.op.schema.codecs import Codec, Field, ReturnCodec, codec_for, return_codec, strip

KINDS = {
    "Tensor": "tensor", "Tensor[]": "tensors", "Tensor?[]": "tensors", "SymInt": "int", "float": "float", "bool": "bool",
    "str": "str", "ScalarType": "dtype", "Device": "device",
}  # fmt: skip
EMPTY: Any = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class SchemaArgument:
    """One argument of the schema.

    ``default`` is its default's text. A default that the schema language cannot spell is in ``stands_for``, and the schema has
    None in its place.
    """

    name: str
    type: str
    default: str | None = None
    stands_for: Any = EMPTY


@dataclasses.dataclass(frozen=True)
class OperatorParameter:
    """One parameter of the operator's Python signature. ``kind`` is "tensor", "tensors", a scalar's name or "other".

    ``choices`` are the values of a ``Literal``; ``problem`` says why the parameter has no schema argument.
    """

    name: str
    kind: str
    optional: bool
    keyword_only: bool
    default: Any
    annotation: Any
    pattern: patterns.TensorPattern | None = None
    codec: Codec | None = None
    choices: tuple[Any, ...] = ()
    arguments: tuple[SchemaArgument, ...] = ()
    problem: str = ""

    @property
    def required(self) -> bool:
        """Whether a call must pass this argument."""
        return self.default is EMPTY

    @functools.cached_property
    def has_stand_in(self) -> bool:
        """Whether None stands for a default that the schema language cannot spell."""
        return any(argument.stands_for is not EMPTY for argument in self.arguments)

    def encode(self, value: Any) -> tuple[Any, ...]:
        """Return the values of its schema arguments for a Python value."""
        return (value,) if self.codec is None else self.codec.encode(value)

    def decode(self, values: Sequence[Any]) -> Any:
        """Return the Python value for its schema arguments; ``EMPTY`` stands for one that was left out."""
        values = [*values] + [EMPTY] * (len(self.arguments) - len(values))
        missing = [value is EMPTY for value in values]
        if all(missing):
            return self.default
        if any(missing):
            default = self.encode(self.default)
            values = [d if value is EMPTY else value for value, d in zip(values, default, strict=True)]
        return self.restore(values)

    def restore(self, values: Sequence[Any]) -> Any:
        """As :meth:`decode`, of all its schema arguments."""
        if self.has_stand_in:
            values = [
                argument.stands_for if value is None and argument.stands_for is not EMPTY else value
                for value, argument in zip(values, self.arguments, strict=True)
            ]
        return values[0] if self.codec is None else self.codec.decode(values)


@dataclasses.dataclass(frozen=True)
class Signature:
    """The operator's Python signature, read once at definition. ``operator`` is its name in errors."""

    operator: str
    python: inspect.Signature
    parameters: tuple[OperatorParameter, ...]
    return_annotation: Any
    returns: ReturnCodec | None
    return_patterns: tuple[patterns.TensorPattern | None, ...]

    @functools.cached_property
    def arguments(self) -> tuple[SchemaArgument, ...]:
        """The schema's arguments."""
        return tuple(argument for parameter in self.parameters for argument in parameter.arguments)

    @functools.cached_property
    def flattened(self) -> bool:
        """Whether a codec converts some argument or result between Python and the schema."""
        stand_ins = [p.has_stand_in for p in self.parameters]
        flattened = self.returns is not None or any(stand_ins) or any(p.codec for p in self.parameters)
        if flattened:
            _ = self._in_order  # now, as Dynamo cannot trace how a cached property is computed
        return flattened

    @functools.cached_property
    def annotated(self) -> bool:
        """Whether any argument has a shape, dtype or choice of values to check."""
        return any(parameter.pattern or parameter.choices for parameter in self.parameters)

    def encode(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the schema's positional and keyword arguments for a Python call.

        Raises:
            ArgumentTypeError: the call does not fit the signature, or an argument is not of its parameter's type.
        """
        try:
            given = self._in_order(*args, **kwargs)
        except TypeError:
            self.bind(args, kwargs)
            raise
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for parameter, value in zip(self.parameters, given, strict=True):
            try:
                values = parameter.encode(value)
                if parameter.has_stand_in and any(
                    v is None and a.stands_for is not EMPTY for v, a in zip(values, parameter.arguments, strict=True)
                ):
                    raise ArgumentTypeError(
                        f"expected a {inspect.formatannotation(parameter.annotation)}, got {value!r}"
                    )
            except ArgumentTypeError as error:
                raise ArgumentTypeError(f"{self.operator}: the argument {parameter.name}: {error}") from None
            if parameter.keyword_only:
                named.update(zip(field_names(parameter), values, strict=True))
            else:
                positional.extend(values)
        return positional, named

    def through(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the Python result of a Python call, by a function of schema values."""
        positional, named = self.encode(args, kwargs)
        result = call(*positional, **named)
        return result if self.returns is None else self.returns.decode(result)

    @functools.cached_property
    def _in_order(self) -> Callable[..., tuple[Any, ...]]:
        """A function with this signature that returns its arguments, which takes less time than :meth:`bind`."""
        parameters = self.python.parameters.values()
        shown = [
            p.replace(annotation=EMPTY, default=p.default if p.default is EMPTY else _Spelled(f"_default_{p.name}"))
            for p in parameters
        ]
        declared = str(self.python.replace(parameters=shown, return_annotation=EMPTY))[1:-1]
        defaults = {f"_default_{p.name}": p.default for p in parameters}
        return eval(f"lambda {declared}: ({''.join(f'{p.name}, ' for p in parameters)})", defaults)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Return the Python arguments of a call by name.

        Raises:
            ArgumentTypeError: one is missing, or one matches no parameter.
        """
        try:
            return self.python.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentTypeError(f"{self.operator}: {error}. Call it as {self.shown}.") from None

    @property
    def shown(self) -> str:
        """The signature as a call, such as ``rms_norm(x: Tensor, eps: float = 1e-06)``."""
        return f"{self.operator.split('::')[-1]}{self.python.replace(return_annotation=EMPTY)}"

    def decode(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the Python arguments for a call through the schema; one that was left out is the parameter's default."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        start, complete = 0, len(args) == len(self.arguments)
        for parameter in self.parameters:
            count = len(parameter.arguments)
            if parameter.keyword_only:
                values = [kwargs.get(name, EMPTY) for name in field_names(parameter)]
            else:
                values = args[start : start + count]
                start += count
            value = parameter.restore(values) if complete else parameter.decode(values)
            if parameter.keyword_only:
                named[parameter.name] = value
            else:
                positional.append(value)
        return positional, named


class _Spelled:
    """A default that is shown as this text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def field_names(parameter: OperatorParameter) -> list[str]:
    """Return the schema's argument names for one Python parameter."""
    return [argument.name for argument in parameter.arguments]


def read(function: Callable[..., Any], operator: str = "opkit.custom_op") -> Signature:
    """Read ``function``'s signature; a parameter that no schema can hold has a ``problem``.

    Raises:
        DefinitionError: ``function`` is not a Python function.
    """
    if not isinstance(function, types.FunctionType):
        raise DefinitionError(f"{operator}: custom_op takes a Python function, got {_described(function)}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise DefinitionError(
            f"{operator}: {function.__name__} is async, or yields. An operator returns its results when called."
        )
    python = inspect.signature(function)
    scope = {**function.__globals__, **_closure(function)}
    parameters = tuple(_parameter(item, scope) for item in python.parameters.values())
    try:
        returned = annotations.resolve(python.return_annotation, scope)
        plain = strip(returned)
        return Signature(operator, python, parameters, plain, return_codec(plain), _return_patterns(returned))
    except Exception:  # reported where the schema is inferred from it
        return Signature(operator, python, parameters, python.return_annotation, None, (None,))


def _described(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, types.MethodType):
        return f"the method {value.__qualname__}: define the operator of a function outside of the class, and call that in it"
    if isinstance(value, (staticmethod, classmethod)):
        return f"a {kind}: write the decorator below @{kind}, or define the operator of a function outside of the class"
    if isinstance(value, functools.partial):
        return "a functools.partial: write a function that calls it, with annotations"
    return f"{kind}: {value!r}"


def _closure(function: types.FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    bound: dict[str, Any] = {}
    for name, cell in cells:
        with contextlib.suppress(ValueError):  # the name is bound later
            bound[name] = cell.cell_contents
    return bound


def _first_pattern(annotation: Any) -> patterns.TensorPattern | None:
    if patterns.is_jaxtyping(annotation):
        return patterns.parse(annotation)
    return next((p for item in typing.get_args(annotation) if (p := _first_pattern(item))), None)


def _return_patterns(annotation: Any) -> tuple[patterns.TensorPattern | None, ...]:
    if typing.get_origin(annotation) is tuple and typing.get_args(annotation)[1:] != (...,):
        return tuple(_first_pattern(item) for item in typing.get_args(annotation))
    return (_first_pattern(annotation),)


def _parameter(item: inspect.Parameter, scope: dict[str, Any]) -> OperatorParameter:
    unread = OperatorParameter(
        name=item.name,
        kind="other",
        optional=item.default is None,
        keyword_only=item.kind is inspect.Parameter.KEYWORD_ONLY,
        default=item.default,
        annotation=item.annotation,
        arguments=(SchemaArgument(item.name, ""),),
    )
    if item.annotation is EMPTY or item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD):
        return dataclasses.replace(unread, problem=_problem_of_form(item))
    try:
        annotation = annotations.resolve(item.annotation, scope)
        if item.default is None:  # ``x: float = None``
            annotation = typing.Optional[annotation]  # noqa: UP045
        plain = strip(annotation)
        kind, codec = annotations.schema_type(plain), codec_for(plain)
    except DefinitionError:
        raise
    except Exception as error:
        shown = item.annotation if isinstance(item.annotation, str) else inspect.formatannotation(item.annotation)
        problem = (
            f"its annotation {shown} cannot be read ({type(error).__name__}: {error}); names in annotations are looked up in the "
            "function's module, so have them there, not under TYPE_CHECKING and not in another function"
        )
        return dataclasses.replace(unread, problem=problem)
    read = dataclasses.replace(
        unread,
        kind="other" if codec else KINDS.get((kind or "").removesuffix("?"), "other"),
        optional=annotations.without_none(plain)[1],
        annotation=plain,
        pattern=_first_pattern(annotation),
        codec=codec,
        choices=() if codec else annotations.choices(plain),
    )
    if kind is None and codec is None:
        shown = inspect.formatannotation(plain)
        return dataclasses.replace(read, problem=f"no operator takes a {shown}; {annotations.advice(plain)}")
    return _with_arguments(read, codec.fields if codec else (Field("", kind or ""),))


def _with_arguments(parameter: OperatorParameter, fields: Sequence[Field]) -> OperatorParameter:
    """Return ``parameter`` with its schema arguments, or with the problem of its default."""
    defaults: Sequence[Any] = [EMPTY] * len(fields)
    try:
        defaults = defaults if parameter.required else parameter.encode(parameter.default)
        wrong = any(d is not EMPTY and not annotations.fits(d, f.type) for d, f in zip(defaults, fields, strict=True))
    except ArgumentTypeError:
        wrong = True
    if wrong or (parameter.choices and not parameter.required and parameter.default not in parameter.choices):
        shown = inspect.formatannotation(parameter.annotation)
        problem = f"its default {parameter.default!r} is not a {shown}; change one of them"
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(defaults)):
            problem = "a schema holds no tensor as a default; make the default None, and the tensor in the function"
        return dataclasses.replace(parameter, problem=problem)
    arguments = [_argument(parameter.name + f.suffix, f.type, d) for f, d in zip(fields, defaults, strict=True)]
    return dataclasses.replace(parameter, arguments=tuple(arguments))


def _argument(name: str, kind: str, default: Any) -> SchemaArgument:
    if default is EMPTY:
        return SchemaArgument(name, kind)
    text = annotations.default_text(default, kind)
    if text is None and not kind.endswith("?"):
        return SchemaArgument(name, f"{kind}?", "None", default)
    return SchemaArgument(name, kind, text)


def _problem_of_form(item: inspect.Parameter) -> str:
    if item.kind is item.VAR_POSITIONAL:
        return f"an operator has a fixed number of arguments; take a list, as in {item.name}: list[Tensor]"
    if item.kind is item.VAR_KEYWORD:
        return f"an operator has a fixed number of arguments; take a dictionary, as in {item.name}: dict[str, Tensor]"
    if item.name in ("self", "cls"):
        return (
            "an operator is not a method; define it of a function outside of the class that takes the tensors which the method "
            "reads, and call it from the method"
        )
    return f"it has no annotation; write its type, as in {item.name}: Tensor or {item.name}: float"
