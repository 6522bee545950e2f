"""Flatten lists among an operator's arguments for autograd nodes, which take tensors one by one.

A node takes a list of tensors item by item, and a list of numbers or an empty one unflattened. The *counts* of a call hold a
number for each argument: of a list that is flattened its length, of an unflattened one ``~length``, and None for the others.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Counts = list[int | None]
_NUMBERS = frozenset((int, float, bool))


def _count(arg: Any) -> int | None:
    if type(arg) is not list and type(arg) is not tuple:
        return None
    return len(arg) if arg and type(arg[0]) not in _NUMBERS else ~len(arg)


def counts_of(args: Sequence[Any]) -> Counts | None:
    """Return the counts of arguments like these; None where none is a list."""
    counts = [_count(arg) for arg in args]
    return None if counts.count(None) == len(counts) else counts


def has_flattened_lists(counts: Counts | None) -> bool:
    """Return whether the node takes some list item by item."""
    return counts is not None and any(count is not None and count >= 0 for count in counts)


def unflattened_lists(counts: Counts | None) -> list[tuple[int, int]]:
    """Return the position and the length of each list that the node takes unflattened."""
    return [(position, ~count) for position, count in enumerate(counts or ()) if count is not None and count < 0]


def leaves_of(args: Sequence[Any], counts: Counts | None) -> list[Any]:
    """Return the arguments as the node takes them."""
    if counts is None:
        return list(args)
    leaves: list[Any] = []
    for arg, count in zip(args, counts, strict=True):
        leaves.extend([arg] if count is None or count < 0 else arg)
    return leaves


def grouped(leaves: Sequence[Any], counts: Counts) -> list[Any]:
    """Return the arguments that :func:`leaves_of` flattened; what follows them in ``leaves`` is left out."""
    args: list[Any] = []
    at = 0
    for count in counts:
        if count is None or count < 0:
            args.append(leaves[at])
            at += 1
        else:
            args.append(list(leaves[at : at + count]))
            at += count
    return args


def grouped_needs(needs: Sequence[bool], counts: Counts, has_flattened: bool = True) -> list[Any]:
    """Return which arguments need a gradient, those in lists one by one.

    ``has_flattened`` is :func:`has_flattened_lists` of the counts, if the caller knows it.
    """
    structured = grouped(needs, counts) if has_flattened else needs
    return [
        each if count is None or count >= 0 else [False] * ~count
        for each, count in zip(structured, counts, strict=False)
    ]


def flattened(grads: Sequence[Any], counts: Counts, has_flattened: bool = True) -> list[Any]:
    """Return gradients as the node returns them; an unflattened list has none. ``has_flattened`` as for :func:`grouped_needs`."""
    if not has_flattened:
        return [grad if count is None else None for grad, count in zip(grads, counts, strict=True)]
    flat: list[Any] = []
    for grad, count in zip(grads, counts, strict=True):
        if count is None:
            flat.append(grad)
        elif count < 0:
            flat.append(None)
        elif grad is None:
            flat.extend([None] * count)
        else:
            flat.extend(grad if isinstance(grad, (list, tuple)) else [grad])
    return flat
