"""A query and a key, or a grid of them: of what masks and biases are functions where torch's flex_attention calls them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opkit.errors import ArgumentError


class Place(NamedTuple):
    """Integers that broadcast to each other: batches, heads, queries and keys; and what the function of them must know.

    ``shift`` is the number of keys less that of queries, or None where nobody said it; ``starts`` are where documents begin,
    of queries and of keys, beside a mask that tells documents apart.
    """

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    shift: int | None = None
    starts: tuple[Tensor, Tensor] | None = None

    def distance(self, align: str) -> Tensor:
        """By how much the key lies after the diagonal of ``align``, of all queries or of each document.

        Raises:
            ArgumentError: the numbers of queries and keys are needed.
        """
        if self.starts is None:
            return self.j - self.i if align == "top-left" else self.j - self.i - self.known_shift()
        queries, keys = self.starts
        if queries is keys:
            return self.j - self.i
        at = number(queries, self.i) + (align == "bottom-right")
        return self.j - self.i - (keys[at] - queries[at])

    def known_shift(self) -> int:
        """The number of keys less that of queries."""
        if self.shift is None:
            raise ArgumentError(
                "a mask aligned 'bottom-right' that is called as mask_mod(b, h, q_idx, kv_idx) must know the numbers of queries "
                "and keys. Give mask.sized(queries, keys) in its place."
            )
        return self.shift

    def first(self, lengths: Tensor) -> Tensor:
        """Whether the key is one of the first ``lengths``: one for all, one for each batch, or one for each document."""
        if self.starts is None:
            return self.j < (lengths if lengths.dim() == 0 else lengths[_within(self.b, lengths.shape[0])])
        keys = self.starts[1]
        at = number(keys, self.j)
        return self.j - keys[at] < (lengths if lengths.dim() == 0 else lengths[_within(at, lengths.shape[0])])

    def of_queries(self, ids: Tensor) -> Tensor:
        """The query's number in ``ids``, (batch or 1, queries) or (queries,)."""
        return _row(ids, self.b, self.i)

    def of_keys(self, ids: Tensor) -> Tensor:
        """The key's number in ``ids``, (batch or 1, keys) or (keys,)."""
        return _row(ids, self.b, self.j)

    def of_all(self, tensor: Tensor) -> Tensor:
        """The element of a tensor that broadcasts to (batch, heads, queries, keys)."""
        indices = (self.b, self.h, self.i, self.j)[4 - tensor.dim() :]
        return tensor[tuple(_within(at, size) for at, size in zip(indices, tensor.shape, strict=True))]


def _row(ids: Tensor, b: Tensor, at: Tensor) -> Tensor:
    return ids[at] if ids.dim() == 1 else ids[_within(b, ids.shape[0]), at]


def _within(at: Tensor, size: int) -> Tensor:
    """What is one element long is that for every index."""
    return at * 0 if size == 1 else at


def number(starts: Tensor, at: Tensor) -> Tensor:
    """The number of the document in which a token lies, that of the last for tokens after it."""
    return after(starts, at).clamp(max=starts.shape[0] - 2)


def after(starts: Tensor, at: Tensor) -> Tensor:
    """How many documents end at a token or before it, searched for by halves: what compilers of such functions take."""
    count = starts.shape[0] - 1
    found = at * 0
    for step in (2**n for n in reversed(range(count.bit_length()))):
        tried = found + step
        fits = (tried <= count) & (starts[tried.clamp(max=count)] <= at)
        found = torch.where(fits, tried, found)
    return found
