"""Argument and return types beyond torch.library's, each flattened to types that a schema can hold.

A codec turns one Python value into one or more schema values (``encode``) and back (``decode``):

=============================  =====================================================
annotation                     schema
=============================  =====================================================
an ``enum.Enum``               ``str x``, the member's name
a dataclass of scalars         one argument a field, ``x_field``
``dict[str, Tensor]``          ``Tensor[] x_values, str[] x_keys``
``tuple[T, ...]``, ``tuple[T, T]``  ``T[] x``
``tuple[int, float]``          one argument an item, ``x_0``, ``x_1``
``torch.Generator | None``     ``Generator? x``
=============================  =====================================================
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from opkit.errors import ArgumentTypeError, DefinitionError, OutputError

MISSING: Any = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Field:
    """One schema argument: its name's suffix, a plain annotation, its schema spelling where torch has no annotation
    for it, and where its default is found in the encoded default."""

    suffix: str
    annotation: Any
    spelling: str | None = None


class Codec:
    """How one annotated Python value is held in a schema."""

    fields: tuple[Field, ...]

    def encode(self, value: Any) -> tuple[Any, ...]:
        """The schema values of ``value``, one a field."""
        raise TypeError(type(self))

    def decode(self, values: Sequence[Any]) -> Any:
        """The Python value of the schema values."""
        raise TypeError(type(self))


class EnumCodec(Codec):
    """A member of an enumeration, by name."""

    def __init__(self, kind: type[enum.Enum], optional: bool) -> None:
        self.kind = kind
        self.fields = (Field("", str | None if optional else str),)

    def encode(self, value: Any) -> tuple[Any, ...]:
        if value is None:
            return (None,)
        if not isinstance(value, self.kind):
            raise ArgumentTypeError(f"expected a member of {self.kind.__name__}, got {value!r}")
        return (value.name,)

    def decode(self, values: Sequence[Any]) -> Any:
        return None if values[0] is None else self.kind[values[0]]


class DataclassCodec(Codec):
    """A dataclass whose fields are scalars, one argument a field."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        hints = typing.get_type_hints(kind)
        self.names = tuple(field.name for field in dataclasses.fields(kind) if field.init)
        self.fields = tuple(Field(f"_{name}", hints[name]) for name in self.names)

    def encode(self, value: Any) -> tuple[Any, ...]:
        return tuple(getattr(value, name) for name in self.names)

    def decode(self, values: Sequence[Any]) -> Any:
        return self.kind(**dict(zip(self.names, values, strict=True)))


class DictCodec(Codec):
    """A dictionary from names to tensors."""

    fields = (Field("_values", list[torch.Tensor]), Field("_keys", list[int], "str[]"))

    def encode(self, value: Any) -> tuple[Any, ...]:
        return list(value.values()), list(value.keys())

    def decode(self, values: Sequence[Any]) -> Any:
        return dict(zip(values[1], values[0], strict=True))


class SequenceCodec(Codec):
    """A tuple of items of one type."""

    def __init__(self, item: Any, optional: bool) -> None:
        listed = types.GenericAlias(list, (item,))
        self.fields = (Field("", typing.Optional[listed] if optional else listed),)  # noqa: UP045

    def encode(self, value: Any) -> tuple[Any, ...]:
        return (None if value is None else list(value),)

    def decode(self, values: Sequence[Any]) -> Any:
        return None if values[0] is None else tuple(values[0])


class TupleCodec(Codec):
    """A tuple of items of different types."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.fields = tuple(Field(f"_{i}", item) for i, item in enumerate(items))

    def encode(self, value: Any) -> tuple[Any, ...]:
        if len(value) != len(self.fields):
            raise TypeError(f"expected a tuple of {len(self.fields)} items, got {len(value)}: {value!r}")
        return tuple(value)

    def decode(self, values: Sequence[Any]) -> Any:
        return tuple(values)


class GeneratorCodec(Codec):
    """A random number generator, which schemas know but torch.library's annotations do not."""

    fields = (Field("", str | None, "Generator?"),)

    def encode(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def decode(self, values: Sequence[Any]) -> Any:
        return values[0]


def without_none(annotation: Any) -> tuple[Any, bool]:
    """``annotation`` without ``None``, and whether ``None`` was one of its choices."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [item for item in typing.get_args(annotation) if item is not type(None)]
        if len(rest) == 1 and len(rest) < len(typing.get_args(annotation)):
            return rest[0], True
    return annotation, False


def codec_for(annotation: Any) -> Codec | None:
    """The codec of an annotation that torch.library does not take; None for the rest.

    Raises:
        DefinitionError: an optional of a type that has no optional form in a schema.
    """
    kind, optional = without_none(annotation)
    if kind is torch.Generator:
        return GeneratorCodec()
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return EnumCodec(kind, optional)
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if items[1:] == (...,) or len(set(items)) == 1:
            return SequenceCodec(items[0], optional)
        return _required(TupleCodec(items), annotation, optional)
    if typing.get_origin(kind) in (dict, Mapping) and typing.get_args(kind) == (str, torch.Tensor):
        return _required(DictCodec(), annotation, optional)
    if _is_dataclass(kind):
        return _required(DataclassCodec(kind), annotation, optional)
    return None


def _is_dataclass(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _required(codec: Codec, annotation: Any, optional: bool) -> Codec:
    if optional:
        raise DefinitionError(f"{annotation} has no schema: make it required, or make its parts optional one by one")
    return codec


class ReturnCodec:
    """How the returned value is held in a schema: ``annotation`` is what torch.library reads."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation

    def encode(self, value: Any) -> Any:
        """The schema's return value."""
        return value

    def decode(self, value: Any) -> Any:
        """What the caller of the operator receives."""
        return value


class OptionalReturn(ReturnCodec):
    """``Tensor | None``, held as a list of no or one tensor."""

    def __init__(self) -> None:
        super().__init__(list[torch.Tensor])

    def encode(self, value: Any) -> Any:
        return [] if value is None else [value]

    def decode(self, value: Any) -> Any:
        return value[0] if value else None


class ListReturn(ReturnCodec):
    """``tuple[Tensor, ...]``, held as a list."""

    def __init__(self) -> None:
        super().__init__(list[torch.Tensor])

    def encode(self, value: Any) -> Any:
        return list(value)

    def decode(self, value: Any) -> Any:
        return tuple(value)


class DictReturn(ReturnCodec):
    """``dict[str, Tensor]``, held as a list; the keys are those of the first result and must stay the same."""

    def __init__(self) -> None:
        super().__init__(list[torch.Tensor])
        self.keys: tuple[str, ...] | None = None

    def encode(self, value: Any) -> Any:
        keys = tuple(value)
        if self.keys is not None and self.keys != keys:
            raise OutputError(f"the returned dictionary has keys {keys}, but an earlier call returned {self.keys}")
        self.keys = keys
        return list(value.values())

    def decode(self, value: Any) -> Any:
        return dict(zip(self.keys or (), value, strict=True))


class TupleReturn(ReturnCodec):
    """A tuple, named tuple or dataclass, item by item."""

    def __init__(self, items: Sequence[ReturnCodec], build: Any, names: tuple[str, ...] | None) -> None:
        self.items, self.build, self.names = tuple(items), build, names
        super().__init__(types.GenericAlias(tuple, tuple(item.annotation for item in items)))

    def encode(self, value: Any) -> Any:
        parts = value if self.names is None else [getattr(value, name) for name in self.names]
        return tuple(item.encode(part) for item, part in zip(self.items, parts, strict=True))

    def decode(self, value: Any) -> Any:
        return self.build(item.decode(part) for item, part in zip(self.items, value, strict=True))


def return_codec(annotation: Any) -> ReturnCodec | None:
    """The codec of a return annotation that torch.library does not take; None for the rest."""
    kind, optional = without_none(annotation)
    if optional and kind is torch.Tensor:
        return OptionalReturn()
    if typing.get_origin(kind) in (dict, Mapping):
        return DictReturn()
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if items[1:] == (...,):
            return ListReturn()
        return _tuple_return(items, tuple, None)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        return _tuple_return(list(hints.values()), _builder(kind), tuple(hints))
    return None


def _builder(kind: Any) -> Any:
    def build(parts: Iterable[Any]) -> Any:
        return kind(*parts)

    return build


def _tuple_return(items: Sequence[Any], build: Any, names: tuple[str, ...] | None) -> ReturnCodec | None:
    codecs = [return_codec(item) for item in items]
    if names is None and not any(codecs):
        return None
    return TupleReturn([codec or ReturnCodec(item) for codec, item in zip(codecs, items, strict=True)], build, names)
