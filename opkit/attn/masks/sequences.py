"""Masks of batches whose rows hold sequences: segments of a row, and lengths with padding after them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from opkit.attn.masks import program
from opkit.attn.masks.algebra import Mask
from opkit.attn.masks.logit_index import LogitIndex
from opkit.attn.masks.program_builder import PackedSequences, ProgramBuilder


@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Mask):
    """A query sees the keys of its own segment: ``q_ids[b, i] == kv_ids[b, j]``.

    Args:
        q_ids: integers, (batch, queries), or (queries,) for all batches; they are compared as int32.
        kv_ids: integers, (batch, keys) or (keys,); None: those of the queries.

    Raises:
        ShapeError, DtypeError: at a call that the tensors do not fit.

    >>> import opkit, torch
    >>> q = torch.ones(2, 1, 4, 8)  # batch, heads, queries, head size
    >>> opkit.attention(q, q, q, mask=opkit.masks.Segments(torch.tensor([0, 0, 1, 1]))).shape
    torch.Size([2, 1, 4, 8])
    """

    q_ids: Tensor
    kv_ids: Tensor | None = None

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit ``SEGMENTS``."""
        queries = builder.integers("Segments: q_ids", self.q_ids, ("batch", "queries"))
        keys = builder.integers(
            "Segments: kv_ids", self.q_ids if self.kv_ids is None else self.kv_ids, ("batch", "keys")
        )
        builder.emit(program.SEGMENTS, queries, keys)

    def at(self, index: LogitIndex) -> Tensor:
        keys = self.q_ids if self.kv_ids is None else self.kv_ids
        return index.of_queries(self.q_ids).to(torch.int32) == index.of_keys(keys).to(torch.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class KeyPadding(Mask):
    """Every query sees the first ``lengths[b]`` keys; the others are padding.

    Args:
        lengths: integers, (batch,) or a scalar tensor for all batches; with a :class:`VarLen`, (sequences,).

    Raises:
        ShapeError, DtypeError: at a call that ``lengths`` do not fit.

    >>> import opkit, torch
    >>> q = torch.ones(2, 1, 4, 8)  # batch, heads, queries, head size
    >>> opkit.attention(q, q, q, mask=opkit.masks.KeyPadding(torch.tensor([4, 2]))).shape
    torch.Size([2, 1, 4, 8])
    """

    lengths: Tensor

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit ``LENGTH``."""
        builder.lengths("KeyPadding", self.lengths, packed)

    def at(self, index: LogitIndex) -> Tensor:
        return index.first(self.lengths)
