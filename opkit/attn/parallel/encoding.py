"""Masks and biases as integers and tensors: operators that compilers call take no other objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.functions.expression import Function
from opkit.attn.functions.pending import Pending
from opkit.attn.functions.trace import Traced
from opkit.attn.masks.algebra import And, CausalOfTorch, Dense, Not, Or, VarLen
from opkit.attn.masks.biases import ALiBi, RelativePosition
from opkit.attn.masks.diagonals import ALIGNS, Causal, PrefixLM, SlidingWindow
from opkit.attn.masks.sequences import KeyPadding, Segments
from opkit.attn.masks.traced import TracedMask, TracedScore
from opkit.errors import ArgumentError

_NONE, _TENSOR, _NUMBER, _ALIGN, _TUPLE, _TRACED, _PENDING, _FIRST_KIND = range(8)
_KINDS: tuple[type[Any], ...] = (
    Causal, CausalOfTorch, SlidingWindow, PrefixLM, KeyPadding, Segments, VarLen, Dense, And, Or, Not, ALiBi, RelativePosition,
    TracedMask, TracedScore,
)  # fmt: skip
_FIELDS = tuple([tuple([field.name for field in dataclasses.fields(kind) if field.name != "name"]) for kind in _KINDS])


def encoded(value: Any) -> tuple[list[int], list[Tensor]]:
    """Return a mask, a bias, or a tuple of them, as integers and tensors.

    Raises:
        ArgumentError: it is of a class that opkit does not know.

    >>> encoded(SlidingWindow(3))
    ([9, 2, 3, 0, 3, 0], [])
    """
    words: list[int] = []
    tensors: list[Tensor] = []
    _encode(value, words, tensors)
    return words, tensors


def decoded(words: Sequence[int], tensors: Sequence[Tensor], functions: Sequence[Traced] = ()) -> Any:
    """Return what :func:`encoded` was given, with other tensors, and with the expressions of functions that were numbers.

    >>> decoded(*encoded((Causal(), None, Not(SlidingWindow(3)))))
    (Causal(align='top-left'), None, Not(part=SlidingWindow(left=3, right=None, align='top-left')))
    """
    return _decode(iter(words), iter(tensors), functions)


def _encode(value: Any, words: list[int], tensors: list[Tensor]) -> None:
    if value is None:
        words.append(_NONE)
    elif isinstance(value, Tensor):
        words.append(_TENSOR)
        tensors.append(value)
    elif isinstance(value, str):
        words += [_ALIGN, ALIGNS.index(value)]
    elif isinstance(value, Pending):
        words += [_PENDING, *value.words()]
    elif isinstance(value, Traced):
        places = tuple(range(len(value.tensors)))
        words += [_TRACED, *Function(value.root, places, value.integers, value.floats).words()]
        tensors += value.tensors
    elif isinstance(value, tuple):
        words += [_TUPLE, len(value)]
        for each in value:
            _encode(each, words, tensors)
    elif type(value) in _KINDS:
        kind = _KINDS.index(type(value))
        words.append(_FIRST_KIND + kind)
        for name in _FIELDS[kind]:
            _encode(getattr(value, name), words, tensors)
    elif isinstance(value, (int, torch.SymInt)):
        words += [_NUMBER, value]
    else:
        raise ArgumentError(f"opkit.attention: {value!r} cannot be divided among processes.")


def _decode(words: Iterator[int], tensors: Iterator[Tensor], functions: Sequence[Traced]) -> Any:
    word = next(words)
    if word == _NONE:
        return None
    if word == _TENSOR:
        return next(tensors)
    if word == _NUMBER:
        return next(words)
    if word == _ALIGN:
        return ALIGNS[next(words)]
    if word == _TUPLE:
        return tuple([_decode(words, tensors, functions) for _ in range(next(words))])
    if word in (_TRACED, _PENDING):
        count = next(words)
        operands = [count, *(next(words) for _ in range(count))]
        if word == _PENDING:
            return Pending.of_words(operands).traced(functions)
        function = Function.of(operands)
        return Traced(function.root, tuple(next(tensors) for _ in function.tensors), function.integers, function.floats)
    kind = word - _FIRST_KIND
    return _KINDS[kind](*[_decode(words, tensors, functions) for _ in _FIELDS[kind]])
