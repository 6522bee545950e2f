"""This module names the tensors of a case: by their place among the arguments, and by the schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opkit.contract.calls.cases import Call, Case, TensorCase


def places(case: Case) -> list[str]:
    """Return the place of each tensor of the case among the arguments, in the order of :meth:`Case.tensors`.

    >>> places(Case((TensorCase((2,)), [TensorCase((2,)), 1.0])))
    ['argument 0', 'argument 1[0]']
    """
    positional = [place for number, value in enumerate(case.args) for place in _within(f"argument {number}", value)]
    return positional + [place for name, value in case.kwargs for place in _within(f"argument {name}", value)]


def owners(case: Case, schema: Any) -> list[str]:
    """Return the name of the schema argument to which each tensor of the case belongs."""
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    found = [name for name, value in zip(names, case.args, strict=False) for _ in _within("", value)]
    return found + [name for name, value in case.kwargs for _ in _within("", value)]


def _within(place: str, value: Any) -> Iterator[str]:
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from _within(f"{place}[{number}]", item)
    elif isinstance(value, (TensorCase, torch.Tensor)):
        yield place


def distinct(call: Call) -> list[tuple[int, torch.Tensor]]:
    """Return the tensors of a call with their numbers; one that is passed twice occurs once."""
    seen: dict[int, tuple[int, torch.Tensor]] = {}
    for number, tensor in enumerate(call.tensors()):
        seen.setdefault(id(tensor), (number, tensor))
    return [*seen.values()]
