"""The index of a logit, or of a grid of them, as torch's flex_attention passes it to masks and biases."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opkit.errors import ArgumentError


class LogitIndex(NamedTuple):
    """Integers that broadcast to each other: batch, head, query and key; and what a mask needs to know of the call.

    ``shift`` is the number of keys minus the number of queries, or None where it is unknown; ``starts`` are where packed
    sequences begin, in queries and in keys, in a conjunction with a mask that separates them.
    """

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    shift: int | None = None
    starts: tuple[Tensor, Tensor] | None = None

    def distance(self, align: str) -> Tensor:
        """Return how far the key lies behind the diagonal of ``align``, of all queries or of its packed sequence.

        Raises:
            ArgumentError: the numbers of queries and keys are needed and unknown.
        """
        if self.starts is None:
            return self.j - self.i if align == "top-left" else self.j - self.i - self.known_shift()
        queries, keys = self.starts
        if queries is keys:
            return self.j - self.i
        edge = sequence_of(queries, self.i) + (align == "bottom-right")
        return self.j - self.i - (keys[edge] - queries[edge])

    def known_shift(self) -> int:
        """Return the number of keys minus the number of queries."""
        if self.shift is None:
            raise ArgumentError(
                "a mask aligned 'bottom-right' that is called as mask_mod(b, h, q_idx, kv_idx) must know the numbers of queries "
                "and keys. Give mask.sized(queries, keys) in its place."
            )
        return self.shift

    def first(self, lengths: Tensor) -> Tensor:
        """Return whether the key is one of the first ``lengths``: one number for all, for each batch, or for each sequence."""
        if self.starts is None:
            return self.j < (lengths if lengths.dim() == 0 else lengths[_broadcast(self.b, lengths.shape[0])])
        keys = self.starts[1]
        sequence = sequence_of(keys, self.j)
        return self.j - keys[sequence] < (
            lengths if lengths.dim() == 0 else lengths[_broadcast(sequence, lengths.shape[0])]
        )

    def of_queries(self, ids: Tensor) -> Tensor:
        """Return the query's element of ``ids``, (batch or 1, queries) or (queries,)."""
        return ids[self.i] if ids.dim() == 1 else ids[_broadcast(self.b, ids.shape[0]), self.i]

    def of_keys(self, ids: Tensor) -> Tensor:
        """Return the key's element of ``ids``, (batch or 1, keys) or (keys,)."""
        return ids[self.j] if ids.dim() == 1 else ids[_broadcast(self.b, ids.shape[0]), self.j]

    def of_all(self, tensor: Tensor) -> Tensor:
        """Return the logit's element of a tensor that broadcasts to (batch, heads, queries, keys)."""
        indices = (self.b, self.h, self.i, self.j)[4 - tensor.dim() :]
        return tensor[tuple(_broadcast(index, size) for index, size in zip(indices, tensor.shape, strict=True))]


def _broadcast(index: Tensor, size: int) -> Tensor:
    """Return ``index`` into a dimension that broadcasts: 0 where its size is 1."""
    return index * 0 if size == 1 else index


def sequence_of(starts: Tensor, token: Tensor) -> Tensor:
    """Return the number of the packed sequence in which a token lies; of the last sequence for tokens after it."""
    return sequences_before(starts, token).clamp(max=starts.shape[0] - 2)


def sequences_before(starts: Tensor, token: Tensor) -> Tensor:
    """Return how many sequences end at a token or before it, by a binary search that compilers of mask functions support."""
    count = starts.shape[0] - 1
    found = token * 0
    for step in (2**n for n in reversed(range(count.bit_length()))):
        tried = found + step
        fits = (tried <= count) & (starts[tried.clamp(max=count)] <= token)
        found = torch.where(fits, tried, found)
    return found
