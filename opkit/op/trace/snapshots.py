"""What objects hold, as values that can be compared later on."""

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
"""What references are written with, and not a part of what they compute."""
ATOMS = (str, bytes, int, bool, type(None), type(...), torch.dtype, torch.device, torch.Size, range, slice)
_OF_SIZES = (str, bytes, int, bool, torch.dtype, torch.device, torch.Size, range, slice)
_HELD = (types.SimpleNamespace, argparse.Namespace, threading.local, torch.nn.Module)


class _Missing(enum.Enum):
    """The value of what is not there."""

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
    """More is held than can be compared."""


class Snapshots:
    """What objects hold, as values that can be compared; ``versions``: whether writes to a tensor make it another one."""

    def __init__(self, versions: bool) -> None:
        self.versions = versions
        self.open: dict[int, int] = {}  # the objects around the one at hand, of which it may be a part
        self.count = 0

    def take(self, value: Any) -> Hashable:
        """The value that stands for ``value``.

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
        found = kind, tuple([self.take(part) for part in parts_of(value)])
        del self.open[id(value)]
        return found


def has_parts(value: Any) -> bool:
    """Whether an object is compared by what it holds, and not by identity."""
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
    """What an object holds, in an order that is the same as long as it holds the same."""
    if isinstance(value, contextvars.ContextVar):
        return [value.get(MISSING)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    found: list[Any] = []
    if isinstance(value, (set, frozenset)):
        found += sorted(value, key=repr)
    elif isinstance(value, dict):
        found += [part for item in list(value.items()) for part in item]
    elif isinstance(value, (list, tuple, collections.deque)):
        found += value
    found += [part for name, held in list(getattr(value, "__dict__", {}).items()) for part in (name, held)]
    for base in type(value).__mro__:
        if not is_constant(base.__module__):
            slots = getattr(base, "__slots__", ())
            found += [getattr(value, name, MISSING) for name in ((slots,) if isinstance(slots, str) else slots)]
            found += [
                held for held in vars(base).values() if isinstance(held, (*ATOMS, float, list, dict, torch.Tensor))
            ]
    return found


def decides_sizes(found: Any) -> bool:
    """Whether what :meth:`Snapshots.take` found holds a value that sizes or dtypes are made of: no float, tensor or function."""
    return any(map(decides_sizes, found)) if isinstance(found, tuple) else found in _OF_SIZES


def is_operator(value: Any) -> bool:
    """Whether ``value`` is an operator of opkit's."""
    return hasattr(type(value), "contract_parts")


def is_constant(module: str | None) -> bool:
    """Whether what a module defines counts as constant."""
    top = (module or "builtins").split(".")[0]
    return top in LIBRARIES or top == "opkit"
