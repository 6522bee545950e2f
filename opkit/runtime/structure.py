"""The structures of a saved model's arguments and results: tuples, lists, named tuples and dictionaries of leaves, as JSON."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

from opkit.errors import ArgumentError

Structure = Any
"""None for a leaf; ``[kind, keys, children]`` for a container, where ``keys`` are those of a dictionary or the fields' names."""


def flatten(structure: Structure, value: Any, path: str) -> Iterator[Any]:
    """Yield the leaves of a value.

    Raises:
        ArgumentError: it has another structure.
    """
    if structure is None:
        yield value
        return
    kind, keys, children = structure
    if kind == "dict":
        names = list(value) if isinstance(value, Mapping) else [key for key in keys if hasattr(value, str(key))]
        if set(names) != set(keys):
            raise ArgumentError(f"{path} has {_listed(names)}, and the model was exported with {_listed(keys)}.")
        for key, child in zip(keys, children, strict=True):
            each = value[key] if isinstance(value, Mapping) else getattr(value, key)
            yield from flatten(child, each, f"{path}[{key!r}]")
        return
    if not isinstance(value, tuple if kind == "namedtuple" else (tuple, list)) or len(value) != len(children):
        found = f"{len(value)} values" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
        raise ArgumentError(f"{path} has {found}, and the model was exported with a {kind} of {len(children)}.")
    for number, (each, child) in enumerate(zip(value, children, strict=True)):
        yield from flatten(child, each, f"{path}[{number}]")


def _listed(names: list[Any]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Return the value of these leaves."""
    if structure is None:
        return next(leaves)
    kind, keys, children = structure
    values = [unflatten(each, leaves) for each in children]
    if kind == "dict":
        return dict(zip(keys, values, strict=True))
    if kind == "namedtuple":
        return _class(*keys)(*values)
    return tuple(values) if kind == "tuple" else values


@functools.cache
def _class(name: str, *fields: str) -> Any:
    return namedtuple(name, fields)
