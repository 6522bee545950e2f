"""Masks with a diagonal: a query sees keys by their distance from its own position.

Queries are counted by ``i`` and keys by ``j``, both from 0. Where there are fewer queries than keys, or more, the
diagonal of :class:`Causal`, :class:`SlidingWindow` and :class:`PrefixLM` lies where ``align`` says:

- ``"top-left"``, the default: query 0 is at key 0. It is what ``scaled_dot_product_attention(is_causal=True)`` does.
- ``"bottom-right"``: the last query is at the last key. It is what a model wants that decodes with a cache of keys.

With as many queries as keys the two are the same.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from opkit.attn.masks import program
from opkit.attn.masks.algebra import Mask
from opkit.attn.masks.logit_index import LogitIndex
from opkit.attn.masks.program import UNLIMITED
from opkit.attn.masks.program_builder import PackedSequences, ProgramBuilder
from opkit.errors import ArgumentError

Align = Literal["top-left", "bottom-right"]
ALIGNS = ("top-left", "bottom-right")


def _check_align(mask: Mask, align: str) -> None:
    if align not in ALIGNS:
        raise ArgumentError(
            f"{type(mask).__name__}: align={align!r} must be 'top-left' (query 0 is at key 0; the default, as in torch's "
            "is_causal=True) or 'bottom-right' (the last query is at the last key, for decoding with cached keys)."
        )


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys up to its own position: ``j <= i``, or ``j <= i + keys - queries`` for "bottom-right".

    Args:
        align: where the diagonal lies if the numbers of queries and keys differ; "top-left" by default, as in torch.

    Raises:
        ArgumentError: ``align`` is neither of these.

    >>> import opkit, torch
    >>> q, kv = torch.zeros(1, 1, 2, 4), torch.arange(12.0).reshape(1, 1, 3, 4)
    >>> opkit.attention(q, kv, kv, mask=Causal())[0, 0, :, 0]
    tensor([0., 2.])
    >>> opkit.attention(q, kv, kv, mask=Causal("bottom-right"))[0, 0, :, 0]
    tensor([2., 4.])
    """

    align: Align = "top-left"
    static: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_align(self, self.align)

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit ``BAND`` without a lower end."""
        builder.band(-UNLIMITED, 0, self.align, packed)

    def at(self, index: LogitIndex) -> Tensor:
        return index.distance(self.align) <= 0


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees the ``left`` keys before its own position, its own, and the ``right`` keys after it.

    Args:
        left: how many keys before; None: all of them.
        right: how many keys after; None: all of them. ``Causal() & SlidingWindow(left)`` sees ``left + 1`` keys.
        align: where the diagonal lies if the numbers of queries and keys differ; "top-left" by default.

    Raises:
        ArgumentError: a number is below 0, or ``align`` is none of its values.

    >>> import opkit, torch
    >>> q, v = torch.zeros(1, 1, 4, 1), torch.arange(4.0).reshape(1, 1, 4, 1)
    >>> opkit.attention(q, q, v, mask=SlidingWindow(1, 0)).flatten()
    tensor([0.0000, 0.5000, 1.5000, 2.5000])
    """

    left: int | None = None
    right: int | None = None
    align: Align = "top-left"
    static: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_align(self, self.align)
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < 0
            ):
                raise ArgumentError(
                    f"SlidingWindow: {name}={value!r} must be a number of keys, 0 or more, or None for all."
                )

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit ``BAND``."""
        lower = -UNLIMITED if self.left is None else -self.left
        builder.band(lower, UNLIMITED if self.right is None else self.right, self.align, packed)

    def at(self, index: LogitIndex) -> Tensor:
        distance = index.distance(self.align)
        near = distance >= (-UNLIMITED if self.left is None else -self.left)
        return near & (distance <= (UNLIMITED if self.right is None else self.right))


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixLM(Mask):
    """Every query sees the first ``lengths[b]`` keys, and the keys up to its own position.

    Args:
        lengths: integers, (batch,) or a scalar tensor for all batches; with a :class:`VarLen`, (sequences,).
        align: where the diagonal lies if the numbers of queries and keys differ; "top-left" by default.

    Raises:
        ArgumentError: ``align`` is none of its values.
        ShapeError, DtypeError: at a call that ``lengths`` do not fit.

    >>> import opkit, torch
    >>> from opkit.masks import PrefixLM
    >>> q = torch.ones(2, 1, 4, 8)  # batch, heads, queries, head size
    >>> opkit.attention(q, q, q, mask=PrefixLM(torch.tensor([3, 2]))).shape
    torch.Size([2, 1, 4, 8])
    """

    lengths: Tensor
    align: Align = "top-left"

    def __post_init__(self) -> None:
        _check_align(self, self.align)

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit ``LENGTH BAND OR``."""
        builder.lengths("PrefixLM", self.lengths, packed)
        builder.band(-UNLIMITED, 0, self.align, packed)
        builder.emit(program.OR)

    def at(self, index: LogitIndex) -> Tensor:
        return index.first(self.lengths) | (index.distance(self.align) <= 0)
