"""Codecs for argument and return types that no single schema argument can hold.

A codec converts one Python value into one or more schema values (``encode``) and back (``decode``):

==================================  =====================================================
annotation                          schema
==================================  =====================================================
an ``enum.Enum``                    ``str x``, the member's name
an ``enum.Flag``                    ``SymInt x``, the number
a ``Literal`` of different types    ``str x``, the value as Python writes it
a dataclass, a ``NamedTuple``       one argument a field, ``x_field``
``dict[str, T]``                    ``T[] x_values, str[] x_keys``
``tuple[T, ...]``, ``tuple[T, T]``  ``T[] x``
``tuple[int, float]``               one argument an item, ``x_0``, ``x_1``
any of them, or ``None``            the same, optional; if there are several, with ``bool x_given``
==================================  =====================================================

Fields, items and values may be of these types themselves.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from opkit.errors import ArgumentTypeError, OutputError
from opkit.op.schema import patterns
from opkit.op.schema.annotations import LISTS, rebuilt, schema_type, without_none


@dataclasses.dataclass(frozen=True)
class Field:
    """One schema argument: the suffix to the parameter's name, and its type."""

    suffix: str
    type: str


class Codec:
    """The conversion between one annotated Python value and its schema values. The base class passes the value unchanged."""

    fields: tuple[Field, ...]

    def __init__(self, *fields: Field) -> None:
        self.fields = fields

    def encode(self, value: Any) -> tuple[Any, ...]:
        """Return the schema values of ``value``, one for each field."""
        return (value,)

    def decode(self, values: Sequence[Any]) -> Any:
        """Return the Python value of the schema values."""
        return values[0]


class EnumCodec(Codec):
    """A member of an enumeration, by name."""

    def __init__(self, kind: type[enum.Enum]) -> None:
        super().__init__(Field("", "str"))
        self.kind = kind

    def encode(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, self.kind):
            raise ArgumentTypeError(f"expected a member of {self.kind.__name__}, got {value!r}")
        return (value.name,)

    def decode(self, values: Sequence[Any]) -> Any:
        return self.kind[values[0]]


class LiteralCodec(Codec):
    """One of several values of different types, by its ``repr``."""

    def __init__(self, choices: Sequence[Any]) -> None:
        super().__init__(Field("", "str"))
        self.choices = {repr(choice): choice for choice in choices}

    def encode(self, value: Any) -> tuple[Any, ...]:
        if repr(value) not in self.choices:
            raise ArgumentTypeError(f"expected {' or '.join(self.choices)}, got {value!r}")
        return (repr(value),)

    def decode(self, values: Sequence[Any]) -> Any:
        return self.choices[values[0]]


class ConvertedCodec(Codec):
    """A value of a class whose constructor takes the one schema value."""

    def __init__(self, type: str, convert: Callable[[Any], Any], kind: Callable[[Any], Any]) -> None:
        super().__init__(Field("", type))
        self.convert, self.kind = convert, kind

    def encode(self, value: Any) -> tuple[Any, ...]:
        return (self.convert(value),)

    def decode(self, values: Sequence[Any]) -> Any:
        return self.kind(values[0])


class SequenceCodec(Codec):
    """A tuple or a list of items of one type."""

    def __init__(self, item: Codec, build: Callable[[Iterable[Any]], Any]) -> None:
        super().__init__(Field("", f"{item.fields[0].type}[]"))
        self.item, self.build = item, build

    def encode(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise ArgumentTypeError(f"expected a list or tuple, got {value!r}")
        return ([self.item.encode(item)[0] for item in value],)

    def decode(self, values: Sequence[Any]) -> Any:
        return self.build([self.item.decode((value,)) for value in values[0]])


class RecordCodec(Codec):
    """A dataclass, a named tuple or a tuple of different types: one or more schema arguments for each field."""

    def __init__(self, kind: Any, parts: Mapping[str, Codec]) -> None:
        super().__init__(*[Field(f"_{name}{f.suffix}", f.type) for name, part in parts.items() for f in part.fields])
        self.kind, self.parts = kind, parts
        self._as_they_are = all(type(part) is Codec for part in parts.values())

    def encode(self, value: Any) -> tuple[Any, ...]:
        if self._as_they_are:
            return tuple(self._items(value))
        return tuple(
            [
                item
                for part, part_value in zip(self.parts.values(), self._items(value), strict=True)
                for item in part.encode(part_value)
            ]
        )

    def _items(self, value: Any) -> Sequence[Any]:
        if issubclass(self.kind, tuple):
            if not isinstance(value, (tuple, list)) or len(value) != len(self.parts):
                raise ArgumentTypeError(f"expected a {self.kind.__name__} of {len(self.parts)} items, got {value!r}")
            return value
        if not isinstance(value, self.kind):
            raise ArgumentTypeError(f"expected a {self.kind.__name__}, got {value!r}")
        return [getattr(value, name) for name in self.parts]

    def decode(self, values: Sequence[Any]) -> Any:
        items: list[Any] = [*values] if self._as_they_are else []
        start = 0
        for part in () if self._as_they_are else self.parts.values():
            items.append(part.decode(values[start : start + len(part.fields)]))
            start += len(part.fields)
        return tuple(items) if self.kind is tuple else self.kind(**dict(zip(self.parts, items, strict=True)))


class DictCodec(Codec):
    """A dictionary from names or numbers to values of one type."""

    def __init__(self, key: str, item: str) -> None:
        super().__init__(Field("_values", f"{item}[]"), Field("_keys", f"{key}[]"))

    def encode(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, Mapping):
            raise ArgumentTypeError(f"expected a dictionary, got {value!r}")
        return list(value.values()), list(value.keys())

    def decode(self, values: Sequence[Any]) -> Any:
        return dict(zip(values[1], values[0], strict=True))


class OptionalCodec(Codec):
    """None, or a value of another codec; where that has several arguments, a flag comes first that says which."""

    def __init__(self, inner: Codec) -> None:
        self.flag = [] if len(inner.fields) == 1 else [Field("_given", "bool")]
        super().__init__(*self.flag, *[Field(f.suffix, f"{f.type.removesuffix('?')}?") for f in inner.fields])
        self.inner = inner

    def encode(self, value: Any) -> tuple[Any, ...]:
        values = (None,) * len(self.inner.fields) if value is None else self.inner.encode(value)
        return (value is not None, *values) if self.flag else values

    def decode(self, values: Sequence[Any]) -> Any:
        present, inner = (values[0], values[1:]) if self.flag else (values[0] is not None, values)
        return self.inner.decode(inner) if present else None


def codec_for(annotation: Any) -> Codec | None:
    """Return the codec of an annotation that no single schema argument can hold; None for the rest."""
    if schema_type(annotation) is not None:
        return None
    bare, optional = without_none(annotation)
    codec = _codec(bare)
    return OptionalCodec(codec) if codec is not None and optional else codec


def _part(annotation: Any) -> Codec | None:
    plain = schema_type(annotation)
    return codec_for(annotation) if plain is None else Codec(Field("", plain))


def _codec(bare: Any) -> Codec | None:
    origin, items = typing.get_origin(bare), typing.get_args(bare)
    if origin is typing.Literal:
        return LiteralCodec(items)
    if origin is tuple and items:
        if items[1:] == (...,) or len(set(items)) == 1:
            return _sequence(items[0], tuple)
        return _record(tuple, {str(i): item for i, item in enumerate(items)})
    if origin in LISTS and items:
        return _sequence(items[0], list)
    if origin in (dict, Mapping):
        key, item = schema_type(items[0]), schema_type(items[1])
        return DictCodec(key, item) if key in ("str", "SymInt") and item else None
    if bare is torch.Size:
        return ConvertedCodec("SymInt[]", list, torch.Size)
    if not isinstance(bare, type):
        return None
    if issubclass(bare, enum.Flag):
        return ConvertedCodec("SymInt", lambda flag: flag.value, bare)
    if issubclass(bare, enum.Enum):
        return EnumCodec(bare)
    return _record(bare, _hints(bare))


def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass or named tuple; nothing for other classes, or if a field has none."""
    names = list(getattr(kind, "_fields", ()))
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.init]
    hints = {name: strip(hint) for name, hint in typing.get_type_hints(kind).items()} if names else {}
    return {name: hints[name] for name in names} if hints.keys() >= set(names) else {}


def _sequence(item: Any, build: Callable[[Iterable[Any]], Any]) -> Codec | None:
    part = _part(item)
    flat = part is not None and len(part.fields) == 1 and "[" not in part.fields[0].type
    return SequenceCodec(part, build) if part is not None and flat else None


def _record(kind: Any, hints: Mapping[str, Any]) -> Codec | None:
    parts = {name: part for name, hint in hints.items() if (part := _part(hint)) is not None}
    return RecordCodec(kind, parts) if parts and len(parts) == len(hints) else None


def strip(annotation: Any) -> Any:
    """Return ``annotation`` with every jaxtyping annotation replaced by the tensor type within it."""
    if patterns.is_jaxtyping(annotation):
        return annotation.array_type
    if typing.get_origin(annotation) is typing.Literal:
        return annotation
    return rebuilt(annotation, tuple(strip(item) for item in typing.get_args(annotation)))


class ReturnCodec:
    """The conversion between a returned value and the schema's; torch.library reads ``annotation``."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation

    def encode(self, value: Any) -> Any:
        """Return the schema's return value."""
        return value

    def decode(self, value: Any) -> Any:
        """Return the value that the caller of the operator receives."""
        return value


class OptionalReturn(ReturnCodec):
    """``Tensor | None``, held as a list of zero or one tensor."""

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
    """Return the codec of a return annotation that torch.library does not take; None for the rest."""
    kind, optional = without_none(annotation)
    if optional:
        return OptionalReturn() if kind is torch.Tensor else None
    if typing.get_origin(kind) in (dict, Mapping) and typing.get_args(kind) == (str, torch.Tensor):
        return DictReturn()
    if typing.get_origin(kind) is Sequence and typing.get_args(kind) == (torch.Tensor,):
        return ReturnCodec(list[torch.Tensor])
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if items[1:] == (...,):
            return ListReturn() if items[0] is torch.Tensor else None
        return _tuple_return(items, tuple, None)
    hints = _hints(kind)

    def build(parts: Iterable[Any]) -> Any:
        return kind(*parts)

    return _tuple_return(list(hints.values()), build, tuple(hints)) if hints else None


def _tuple_return(items: Sequence[Any], build: Any, names: tuple[str, ...] | None) -> ReturnCodec | None:
    codecs = [return_codec(item) for item in items]
    if names is None and not any(codecs):
        return None
    return TupleReturn([codec or ReturnCodec(item) for codec, item in zip(codecs, items, strict=True)], build, names)
