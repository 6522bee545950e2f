"""This module runs torch's control flow operators over compiled bodies: conditions, loops, scans, and nested regions.

They take and return flat lists, as in AOTAutograd's graphs. A body takes a list of its inputs, which it empties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkit.compiler.run.torch_operators import as_tuple

Body = Callable[[list[Any]], Any]


def cond(predicate: Any, when_true: Body, when_false: Body, operands: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return the results of one of two bodies."""
    return as_tuple((when_true if predicate else when_false)([*operands]))


def switch(index: Any, branches: Sequence[Body], operands: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return the results of one of several bodies, of the nearest one for a number beyond them: torch 2.14's ``switch``."""
    return as_tuple(branches[min(max(int(index), 0), len(branches) - 1)]([*operands]))


def while_loop(condition: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any] = ()) -> Sequence[Any]:
    """Return the values after calling a body on them while a condition holds."""
    values = _copied(carried)
    while as_tuple(condition([*values, *additional]))[0]:
        values = as_tuple(body([*values, *additional]))
    return values


def while_loop_stack_output(
    condition: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any] = ()
) -> list[Any]:
    """Return the values after each call of a ``while_loop``'s body, stacked; those it begins with, if it is never called."""
    values, rows = _copied(carried), []
    while as_tuple(condition([*values, *additional]))[0]:
        values = as_tuple(body([*values, *additional]))
        rows.append(values)
    return [torch.stack(column) for column in zip(*(rows or [values]), strict=True)]


def _copied(values: Sequence[Any]) -> Sequence[Any]:
    """Return copies of values: a loop whose body never runs returns them."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def map_impl(body: Body, xs: Sequence[torch.Tensor], additional: Sequence[Any] = ()) -> list[Any]:
    """Return a body's results for each row of tensors, stacked."""
    return list(scan(body, (), xs, additional))


def scan(body: Body, init: Sequence[Any], xs: Sequence[torch.Tensor], additional: Sequence[Any] = ()) -> Sequence[Any]:
    """Return what a body carries from row to row of tensors, and the other results of each call, stacked."""
    carried: Sequence[Any] = init
    rows: list[list[torch.Tensor] | None] = []
    stacked: list[torch.Tensor | None] = []
    for number, row in enumerate(zip(*(x.unbind(0) for x in xs), strict=True)):
        results = as_tuple(body([*carried, *row, *additional]))
        carried, made = results[: len(init)], results[len(init) :]
        if number == 0:
            stacked = [_stack(each, xs[0].shape[0]) for each in made]
            rows = [None if each is None else list(each.unbind(0)) for each in stacked]
        for row_of, each in zip(rows, made, strict=True):
            if row_of is not None:
                row_of[number].copy_(each)
    return [*carried, *stacked]


def _stack(row: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """Return memory for ``count`` rows; None for a result that does not exist."""
    return None if row is None else row.new_empty((count, *row.shape))


def invoke_subgraph(body: Body, name: str | None, *operands: Any) -> tuple[Any, ...]:
    """Return a body's results."""
    return as_tuple(body([*operands]))


CONTROL_FLOW: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (cond, switch, while_loop, while_loop_stack_output, map_impl, scan, invoke_subgraph)
}
"""By the name of the higher-order operator."""
