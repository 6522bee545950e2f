"""Map Python annotations to schema types.

torch.library's own inference knows tensors, lists of them, numbers, strings, dtypes and devices. The schema language and the
dispatcher carry more: complex numbers, layouts, memory formats, generators, and lists of all of these.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import numbers
import types
import typing
from typing import Any

import torch

from opkit.op import torch_private as private

_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    int: "SymInt",
    torch.SymInt: "SymInt",
    float: "float",
    torch.SymFloat: "float",
    bool: "bool",
    torch.SymBool: "bool",
    complex: "complex",
    numbers.Number: "Scalar",
    str: "str",
    torch.dtype: "ScalarType",
    torch.device: "Device",
    torch.layout: "Layout",
    torch.memory_format: "MemoryFormat",
    torch.Generator: "Generator?",
}
_CHOICES: dict[type, str] = {str: "str", int: "SymInt", bool: "bool"}
UNIONS = (typing.Union, types.UnionType)
LISTS = (list, collections.abc.Sequence)


def resolve(annotation: Any, scope: dict[str, Any]) -> Any:
    """Return ``annotation`` with strings evaluated in ``scope``, and ``Annotated``, ``NewType`` and aliases looked through.

    Raises:
        Exception: the error of evaluating a string.
    """
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return resolve(eval(annotation, scope), scope)
    if isinstance(annotation, typing.NewType):
        return resolve(annotation.__supertype__, scope)
    if type(annotation).__name__ == "TypeAliasType":  # ``type Name = ...``, Python 3.12 and newer
        return resolve(annotation.__value__, scope)
    if annotation is None:
        return None
    origin, items = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return resolve(items[0], scope)
    if origin is None or origin is typing.Literal or not items:
        return annotation
    return rebuilt(annotation, tuple(resolve(item, scope) for item in items))


def rebuilt(annotation: Any, items: tuple[Any, ...]) -> Any:
    """Return a generic annotation or union with other type arguments."""
    if items == typing.get_args(annotation):
        return annotation
    if typing.get_origin(annotation) in UNIONS:
        return typing.Union[items]  # noqa: UP007
    return types.GenericAlias(typing.get_origin(annotation), items)  # pyright: ignore[reportArgumentType]


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Return ``annotation`` without ``None``, and whether ``None`` was one of its choices."""
    if typing.get_origin(annotation) in UNIONS:
        items = typing.get_args(annotation)
        rest = tuple(item for item in items if item is not type(None))
        if rest and len(rest) < len(items):
            return typing.Union[rest], True  # noqa: UP007
    return annotation, False


def schema_type(annotation: Any) -> str | None:
    """Return the type of the one schema argument that holds an annotated value as it is; None where there is none.

    >>> schema_type(list[int] | None), schema_type(int | float), schema_type(dict[str, int])
    ('SymInt[]?', 'Scalar', None)
    """
    bare, optional = without_none(annotation)
    kind = _bare_type(bare)
    optional |= typing.get_origin(bare) is typing.Literal and None in typing.get_args(bare)
    return f"{kind}?" if kind and optional and not kind.endswith("?") else kind


def _bare_type(bare: Any) -> str | None:
    origin, items = typing.get_origin(bare), typing.get_args(bare)
    if origin in UNIONS:
        return "Scalar" if set(items) <= {int, float, bool, complex} else None
    if origin is typing.Literal:
        kinds = {type(item) for item in items if item is not None}
        return _CHOICES.get(kinds.pop()) if len(kinds) == 1 else None
    if origin in LISTS and items:
        item = schema_type(items[0])
        return (
            f"{item}[]" if item and "[" not in item else None
        )  # autograd and torch.export.save know no lists of lists
    if isinstance(bare, type) and bare in _TYPES:
        return _TYPES[bare]
    known_here = origin or (isinstance(bare, type) and issubclass(bare, enum.Enum))  # torch 2.13 takes enumerations
    return None if known_here else _type_by_torch(bare)


def _type_by_torch(annotation: Any) -> str | None:
    """Return the type that torch.library's own inference has for a class, such as one registered as an opaque type."""

    def prototype(x: Any) -> None: ...

    prototype.__annotations__ = {"x": annotation, "return": None}
    try:
        text: str = torch.library.infer_schema(prototype, mutates_args=())
    except Exception:  # it raises for types that it does not know, and for those that it cannot hash
        return None
    return text[1 : text.index(" x)")]


def choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a ``Literal``, which may be optional; nothing for other annotations."""
    bare, optional = without_none(annotation)
    if typing.get_origin(bare) is not typing.Literal:
        return ()
    return (*typing.get_args(bare), *((None,) if optional else ()))


# ---- defaults --------------------------------------------------------------------------------------------------------

_NUMBERS = {"SymInt": int, "float": float, "bool": bool}
_PASSED_ON: dict[str, Any] = {
    "ScalarType": torch.dtype,
    "Device": (torch.device, str),
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
}


def fits(value: Any, kind: str) -> bool:
    """Return whether ``value`` can be the default of an argument of a schema type."""
    if kind.endswith("?"):
        return value is None or fits(value, kind[:-1])
    if kind.endswith("[]"):
        return isinstance(value, (list, tuple)) and all(fits(item, kind[:-2]) for item in value)
    allowed: dict[str, Any] = {
        **_PASSED_ON, "SymInt": int, "float": (int, float), "bool": (bool, int), "str": str,
        "complex": (int, float, complex), "Scalar": (int, float, complex),
    }  # fmt: skip
    return isinstance(value, allowed[kind]) if kind in allowed else kind not in ("Tensor", "Generator")


def default_text(value: Any, kind: str) -> str | None:
    """Return a default as the schema language writes it; None where it cannot, as for infinity.

    >>> default_text((1, 2), "SymInt[]"), default_text('a"b', "str"), default_text(float("inf"), "float")
    ('[1, 2]', '"a\\\\042b"', None)
    """
    text = _text(value, kind.removesuffix("?"))
    try:
        argument = private.parse_schema(f"f({kind} x={text}) -> ()").arguments[0]
    except (RuntimeError, IndexError, ValueError):  # the last two come from the C++ library's reading of numbers
        return None
    bare = kind.removesuffix("?").removesuffix("[]")
    same = bare in _PASSED_ON or argument.default_value == (list(value) if isinstance(value, tuple) else value)
    return text if same else None


def _text(value: Any, kind: str) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, kind.removesuffix('[]')) for item in value)}]"
    if isinstance(value, str):
        return f'"{"".join(map(_character, value))}"'
    if isinstance(value, torch.device):
        return f'"{value}"'
    if kind in _NUMBERS and value is not None:
        return repr(_NUMBERS[kind](value))
    return str(value).removeprefix("torch.")


def _character(char: str) -> str:
    plain = char.isascii() and char.isprintable() and char not in '"\\'
    return char if plain else "".join(f"\\{byte:03o}" for byte in char.encode())


# ---- what to write instead -------------------------------------------------------------------------------------------

_ADVICE: dict[Any, str] = {
    dict: "write dict[str, Tensor], or dict[str, T] with another T that an operator takes",
    list: "write the type of its items, as in list[Tensor] or list[int]",
    tuple: "write the type of its items, as in tuple[int, ...] or tuple[Tensor, Tensor]",
    set: "pass a list, as in list[int]",
    frozenset: "pass a list, as in list[int]",
    bytes: "pass a str, or a tensor of torch.uint8",
    bytearray: "pass a tensor of torch.uint8",
    slice: "pass its start, stop and step as integers",
    range: "pass its start, stop and step as integers",
    object: "write the type that it has; each operator takes one",
    Any: "write the type that it has; each operator takes one",
    collections.abc.Callable: "an operator takes no functions; define an operator for each, or pass an enum.Enum that says which",
}


def advice(annotation: Any) -> str:
    """Return what to write in place of an annotation that no operator takes."""
    bare, _ = without_none(annotation)
    origin = typing.get_origin(bare) or bare
    if origin in UNIONS:
        return "an argument has one type; take each in an argument of its own that may be None, or define an operator for each"
    if isinstance(bare, typing.TypeVar):
        return "a type variable stands for many types; write one of them"
    items = typing.get_args(bare)
    if origin in LISTS and items and typing.get_origin(items[0]) in LISTS:
        return "pass one list of all items, and a list of the lengths"
    if origin in (list, tuple, dict, *LISTS) and items:
        return next(
            (advice(item) for item in items if item is not ... and schema_type(item) is None),
            "take its items in arguments of their own",
        )
    if isinstance(bare, type):
        return _advice_on_class(bare)
    return _ADVICE.get(origin, "write the type that it has; each operator takes one")


def _advice_on_class(bare: type) -> str:
    if bare in _ADVICE:
        return _ADVICE[bare]
    if issubclass(bare, torch.Tensor):
        return "write Tensor; an operator takes a tensor of any class"
    if issubclass(bare, torch.nn.Module):
        return "an operator takes no modules; pass the parameters that it reads as tensors, and call it from the module's forward"
    if bare.__module__.split(".")[0] == "numpy":
        return (
            "write Tensor and pass torch.from_numpy(...)" if bare.__name__ == "ndarray" else "write int, float or bool"
        )
    if issubclass(bare, tuple) and hasattr(bare, "_fields"):
        return "give its fields types that an operator takes, as a typing.NamedTuple does"
    if dataclasses.is_dataclass(bare):
        return "give its fields types that an operator takes"
    return "pass what the operator reads of it in arguments of their own, or in a dataclass"
