"""This module serializes cases as JSON, for the pipe to a child process. Only plain values can be serialized."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, cast

import torch

from opkit.contract.calls.cases import Case, TensorCase


class NotSerializable(Exception):
    """A value of the case cannot be written as JSON."""


def written(case: Case) -> str:
    """Return the case as one line of JSON.

    Raises:
        NotSerializable: it has a value that is no number, string, dtype, device, tensor, list or tuple.
    """
    return json.dumps(_encode((case.args, case.kwargs)))


def read(text: str) -> Case:
    """Return the case that was written.

    >>> read(written(Case((TensorCase((2,)), 0.5)))) == Case((TensorCase((2,)), 0.5))
    True
    """
    return Case(*_decode(json.loads(text)))


def _tensor(encoded: list[list[Any]]) -> TensorCase:
    return TensorCase(**{name: _decode(value) for name, value in encoded})


_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(map(_decode, items)),
    "list": lambda items: [*map(_decode, items)],
    "float": float,
    "complex": complex,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
    "tensor": _tensor,
    "plain": lambda value: value,
}


def _encode(value: Any) -> list[Any]:
    if type(value) in (tuple, list):
        return [type(value).__name__, [*map(_encode, cast("list[Any]", value))]]
    if isinstance(value, TensorCase):
        return ["tensor", [[f.name, _encode(getattr(value, f.name))] for f in dataclasses.fields(value)]]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) in (float, complex):  # repr is exact, and spells infinities
        return [type(value).__name__, repr(value)]
    if value is None or type(value) in (bool, int, str):
        return ["plain", value]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    raise NotSerializable(f"{type(value).__name__}: {value!r}")


def _decode(encoded: list[Any]) -> Any:
    kind, value = encoded
    return _READERS[kind](value)
