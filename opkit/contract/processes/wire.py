"""Cases as JSON, for the pipe to a child process. What is no plain value cannot be written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, cast

import torch

from opkit.contract.calls.cases import Case, TensorCase


class Unwritten(Exception):
    """A value of the case has no spelling."""


def written(case: Case) -> str:
    """The case as one line of JSON.

    Raises:
        Unwritten: it has a value that is no number, string, dtype, device, tensor, list or tuple.
    """
    return json.dumps(_spelled((case.args, case.kwargs)))


def read(text: str) -> Case:
    """The case that was written.

    >>> read(written(Case((TensorCase((2,)), 0.5)))) == Case((TensorCase((2,)), 0.5))
    True
    """
    return Case(*_meant(json.loads(text)))


def _tensor(spelled: list[list[Any]]) -> TensorCase:
    return TensorCase(**{name: _meant(value) for name, value in spelled})


_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(map(_meant, items)),
    "list": lambda items: [*map(_meant, items)],
    "float": float,
    "complex": complex,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
    "tensor": _tensor,
    "plain": lambda value: value,
}


def _spelled(value: Any) -> list[Any]:
    if type(value) in (tuple, list):
        return [type(value).__name__, [*map(_spelled, cast("list[Any]", value))]]
    if isinstance(value, TensorCase):
        return ["tensor", [[f.name, _spelled(getattr(value, f.name))] for f in dataclasses.fields(value)]]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) in (float, complex):  # repr is exact, and spells infinities
        return [type(value).__name__, repr(value)]
    if value is None or type(value) in (bool, int, str):
        return ["plain", value]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    raise Unwritten(f"{type(value).__name__}: {value!r}")


def _meant(spelled: list[Any]) -> Any:
    kind, value = spelled
    return _READERS[kind](value)
