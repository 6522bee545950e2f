"""Lists among the arguments of an operator, as autograd nodes take them: item by item, lists of numbers and empty ones whole.

A call's *counts* have of each argument that is a list how many items it has, ``~`` that if the node takes it whole, and None for
the others.
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
    """The counts of arguments like these; None where none is a list."""
    counts = [_count(arg) for arg in args]
    return None if counts.count(None) == len(counts) else counts


def spreads(counts: Counts | None) -> bool:
    """Whether the node takes some list item by item."""
    return counts is not None and any(count is not None and count >= 0 for count in counts)


def wholes(counts: Counts | None) -> list[tuple[int, int]]:
    """The place and the number of items of each list that the node takes whole."""
    return [(place, ~count) for place, count in enumerate(counts or ()) if count is not None and count < 0]


def leaves_of(args: Sequence[Any], counts: Counts | None) -> list[Any]:
    """The arguments as the node takes them."""
    if counts is None:
        return list(args)
    leaves: list[Any] = []
    for arg, count in zip(args, counts, strict=True):
        leaves.extend([arg] if count is None or count < 0 else arg)
    return leaves


def grouped(leaves: Sequence[Any], counts: Counts) -> list[Any]:
    """What :func:`leaves_of` spread, as arguments again; what follows in ``leaves`` is left out."""
    found: list[Any] = []
    at = 0
    for count in counts:
        if count is None or count < 0:
            found.append(leaves[at])
            at += 1
        else:
            found.append(list(leaves[at : at + count]))
            at += count
    return found


def grouped_needs(needs: Sequence[bool], counts: Counts, spread: bool = True) -> list[Any]:
    """Which arguments need a gradient, those in lists one by one; ``spread`` as :func:`spreads` says, if it is known."""
    found = grouped(needs, counts) if spread else needs
    return [
        each if count is None or count >= 0 else [False] * ~count for each, count in zip(found, counts, strict=False)
    ]


def flattened(grads: Sequence[Any], counts: Counts, spread: bool = True) -> list[Any]:
    """Gradients as the node gives them; there is none of a list that it takes whole. ``spread`` as for :func:`grouped_needs`."""
    if not spread:
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
