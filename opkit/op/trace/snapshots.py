"""Convert what objects hold into values that can be compared later."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import collections
import contextvars
import enum
import functools
import sys
import threading
import types
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import torch

_MAX_OBJECTS = 2000
LIBRARIES = frozenset(sys.stdlib_module_names) | {
    Path(torch.__file__).parent.name, "numpy", "scipy", "triton", "jaxtyping", "einops", "opt_einsum", "typing_extensions",
    "_pytest",  # which rewritten asserts call
}  # fmt: skip
"""Libraries whose contents count as constant: references use them, and their versions do not change while a process runs."""
ATOMS = (str, bytes, int, bool, type(None), type(...), torch.dtype, torch.device, torch.Size, range, slice)
_OF_SIZES = (str, bytes, int, bool, torch.dtype, torch.device, torch.Size, range, slice)
_HELD = (types.SimpleNamespace, argparse.Namespace, threading.local, torch.nn.Module)


class _Missing(enum.Enum):
    """The value of a name that does not exist."""

    MISSING = enum.auto()


MISSING = _Missing.MISSING


class Same:
    """An object that is compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


class TooLargeError(Exception):
    """An object holds more than can be compared."""


class Snapshots:
    """A converter of objects into comparable values; with ``versions``, a tensor that was written to is another value."""

    def __init__(self, versions: bool) -> None:
        self.versions = versions
        self.open: dict[int, int] = {}  # the objects that contain the present one, to detect cycles
        self.count = 0

    def take(self, value: Any) -> Hashable:
        """Return the comparable value of ``value``.

        Raises:
            TooLargeError: it holds too much.
        """
        kind = type(value)
        if kind is float or kind is complex:
            return kind, repr(value)
        if isinstance(value, ATOMS):
            return kind, str(value) if kind is slice else value
        if isinstance(value, torch.Tensor):
            return Same(value), self.versions and not value.is_inference() and value._version  # pyright: ignore[reportPrivateUsage]
        if isinstance(value, np.ndarray):
            return kind, value.shape, value.dtype.str, value.tobytes() if value.dtype != object else Same(value)
        if not has_parts(value):
            return Same(value)
        self.count += 1
        if self.count > _MAX_OBJECTS:
            raise TooLargeError
        if id(value) in self.open:
            return "within itself", self.open[id(value)]
        self.open[id(value)] = len(self.open)
        snapshot = kind, tuple([self.take(part) for part in parts_of(value)])
        del self.open[id(value)]
        return snapshot


def has_parts(value: Any) -> bool:
    """Return whether an object is compared by what it holds, and not by identity."""
    kinds = (
        list,
        tuple,
        dict,
        set,
        frozenset,
        collections.deque,
        contextvars.ContextVar,
        types.MethodType,
        functools.partial,
    )
    if isinstance(value, (*kinds, *_HELD)):
        return True
    if isinstance(value, (type, types.FunctionType, types.ModuleType, enum.Enum)) or is_operator(value):
        return False
    return not is_constant(type(value).__module__) and (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))


def parts_of(value: Any) -> list[Any]:
    """Return what an object holds, in a stable order."""
    if isinstance(value, contextvars.ContextVar):
        return [value.get(MISSING)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    parts: list[Any] = []
    if isinstance(value, (set, frozenset)):
        parts += sorted(value, key=repr)
    elif isinstance(value, dict):
        parts += [part for item in list(value.items()) for part in item]
    elif isinstance(value, (list, tuple, collections.deque)):
        parts += value
    parts += [part for name, held in list(getattr(value, "__dict__", {}).items()) for part in (name, held)]
    for base in type(value).__mro__:
        if not is_constant(base.__module__):
            slots = getattr(base, "__slots__", ())
            parts += [getattr(value, name, MISSING) for name in ((slots,) if isinstance(slots, str) else slots)]
            parts += [
                held for held in vars(base).values() if isinstance(held, (*ATOMS, float, list, dict, torch.Tensor))
            ]
    return parts


def decides_sizes(snapshot: Any) -> bool:
    """Return whether a result of :meth:`Snapshots.take` holds a value that may decide sizes: no float, tensor or function."""
    return any(map(decides_sizes, snapshot)) if isinstance(snapshot, tuple) else snapshot in _OF_SIZES


def is_operator(value: Any) -> bool:
    """Return whether ``value`` is an operator of opkit's."""
    return hasattr(type(value), "contract_parts")


def is_constant(module: str | None) -> bool:
    """Return whether what a module defines counts as constant."""
    top = (module or "builtins").split(".")[0]
    return top in LIBRARIES or top == "opkit"
