"""Which keys a query sees: small frozen objects, combined with ``&``, ``|`` and ``~``.

Queries are counted by ``i`` and keys by ``j``, both from 0. Those that have a diagonal are in :mod:`opkit.attn.masks.diagonals`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from opkit.attn.compat import torch_private
from opkit.attn.masks import program
from opkit.attn.place import Place, after
from opkit.errors import ArgumentError, ArgumentTypeError, ShapeError

if TYPE_CHECKING:
    from opkit.attn.masks.lowering import Documents, Lowering


class Mask:
    """What every mask is; use those of :mod:`opkit.masks`, and ``a & b``, ``a | b``, ``~a``.

    In a function that ``torch.compile`` traces, write ``Not(a)`` for ``~a``, which Dynamo does not trace.
    """

    static: ClassVar[bool] = False
    """Whether it holds no tensors, so that its program depends on the numbers of queries and keys alone."""

    def __and__(self, other: object) -> Mask:
        return And((self, as_mask(other)))

    def __rand__(self, other: object) -> Mask:
        return And((as_mask(other), self))

    def __or__(self, other: object) -> Mask:
        return Or((self, as_mask(other)))

    def __ror__(self, other: object) -> Mask:
        return Or((as_mask(other), self))

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise ArgumentTypeError(
            f"{self!r} is neither true nor false. Combine masks with &, | and ~, not and, or and not."
        )

    def lower(self, to: Lowering, documents: Documents | None) -> None:
        """Append the program to ``to``; ``documents`` are those that a :class:`VarLen` beside this mask tells apart."""
        raise NotImplementedError(type(self))

    def at(self, place: Place) -> Tensor:
        """Whether the query sees the key, bool, of the shape to which the integers of ``place`` broadcast."""
        raise NotImplementedError(type(self))

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether query ``q_idx`` sees key ``kv_idx``: a mask is a ``mask_mod`` of torch's flex_attention."""
        return self.at(Place(b, h, q_idx, kv_idx))

    def sized(self, queries: int, keys: int) -> SizedMask:
        """A ``mask_mod`` that knows the numbers of queries and keys, which masks need that are aligned "bottom-right".

        >>> from opkit.masks import Causal
        >>> place = (torch.tensor(n) for n in (0, 0, 0, 2))
        >>> Causal("bottom-right").sized(1, 3)(*place)
        tensor(True)
        """
        return SizedMask(self, queries, keys)


@dataclasses.dataclass(frozen=True)
class SizedMask:
    """A mask beside the numbers of queries and keys for which it is called; see :meth:`Mask.sized`."""

    mask: Mask
    queries: int
    keys: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether query ``q_idx`` sees key ``kv_idx``."""
        return self.mask.at(Place(b, h, q_idx, kv_idx, self.keys - self.queries))


def as_mask(value: object) -> Mask:
    """A mask as it is, a ``CausalBias`` of torch as the diagonal that it stands for, and another tensor as :class:`Dense`.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if isinstance(value, Mask):
        return value
    if isinstance(value, Tensor):
        bias = causal_bias_of(value)
        return Dense(value) if bias is None else CausalOfTorch.of(bias)
    raise ArgumentTypeError(
        f"opkit.attention: a mask is one of opkit.masks or a tensor, got {type(value).__name__}: {value!r}. "
        "Example: mask=opkit.masks.Causal()."
    )


def causal_bias_of(value: object) -> Any:
    """Return a ``torch.nn.attention.bias.CausalBias``, whose elements were never written, as it is; None for what is none.

    Of a fake tensor that torch.export made of one, it is the one.
    """
    if type(value) is Tensor:
        return None
    module: Any = sys.modules.get("torch.nn.attention.bias")  # which takes seconds to import
    original = None if module is None else torch_private.faked(value)
    return original if module is not None and isinstance(original, module.CausalBias) else None


@dataclasses.dataclass(frozen=True)
class CausalOfTorch(Mask):
    """What ``torch.nn.attention.bias.causal_upper_left`` and ``causal_lower_right`` stand for.

    Query ``i`` sees the keys up to ``i + shift``, packed sequences or not; ``sizes`` are the numbers of queries and keys without
    which the diagonal would lie elsewhere, or None.
    """

    shift: int
    sizes: tuple[int, int] | None
    static: ClassVar[bool] = True

    @classmethod
    def of(cls, bias: Any) -> CausalOfTorch:
        """The mask that a ``CausalBias`` stands for."""
        sizes = (bias.seq_len_q, bias.seq_len_kv)
        if sizes[0] == sizes[1] or bias.variant.name == "UPPER_LEFT":
            return cls(0, None)
        return cls(sizes[1] - sizes[0], sizes)

    def lower(self, to: Lowering, documents: Documents | None) -> None:
        """``BAND`` without a lower end."""
        given = (to.sizes.queries, to.sizes.keys)
        if self.sizes is not None and self.sizes != given:
            raise ShapeError(
                f"opkit.attention: causal_lower_right{self.sizes} is for that many (queries, keys); there are {given}. Make one "
                "for these, or give opkit.masks.Causal('bottom-right')."
            )
        to.band(-program.UNLIMITED, self.shift, "top-left", None)

    def at(self, place: Place) -> Tensor:
        return place.j - place.i <= self.shift


@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Mask):
    """A query sees the keys of its own segment: ``q_ids[b, i] == kv_ids[b, j]``.

    Args:
        q_ids: integers, (batch, queries), or (queries,) for all batches; they are compared as int32.
        kv_ids: integers, (batch, keys) or (keys,); None: those of the queries.
    """

    q_ids: Tensor
    kv_ids: Tensor | None = None

    def lower(self, to: Lowering, documents: Documents | None) -> None:
        """``SEGMENTS``."""
        queries = to.integers(self, "q_ids", self.q_ids, ("batch", "queries"))
        keys = to.integers(self, "kv_ids", self.q_ids if self.kv_ids is None else self.kv_ids, ("batch", "keys"))
        to.emit(program.SEGMENTS, queries, keys)

    def at(self, place: Place) -> Tensor:
        keys = self.q_ids if self.kv_ids is None else self.kv_ids
        return place.of_queries(self.q_ids).to(torch.int32) == place.of_keys(keys).to(torch.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class VarLen(Mask):
    """Documents packed one after another; a query sees the keys of its own document.

    In a conjunction, :class:`Causal`, :class:`SlidingWindow` and :class:`PrefixLM` count within each document and are
    aligned within it, and the lengths of :class:`KeyPadding` and :class:`PrefixLM` are one for each document.

    Args:
        cu_seqlens_q: int32 or int64, (documents + 1,): where each document's queries begin, and where the last ends; the
            first number is 0 and none is below the one before it. Queries from the last number on see nothing.
        cu_seqlens_k: the same of the keys; None: the queries' own.

    >>> import opkit, torch
    >>> from opkit.masks import Causal
    >>> q, v = torch.zeros(5, 1, 1), torch.arange(5.0).reshape(5, 1, 1)
    >>> opkit.attention(q, q, v, layout="thd", mask=VarLen(torch.tensor([0, 2, 5])) & Causal()).flatten()
    tensor([0.0000, 0.5000, 2.0000, 2.5000, 3.0000])
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None = None

    @property
    def of_keys(self) -> Tensor:
        """Where each document's keys begin, and where the last ends."""
        return self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k

    def lower(self, to: Lowering, documents: Documents | None) -> None:
        """``SEGMENTS`` of the documents' numbers."""
        own = to.documents(self) if documents is None or documents.mask is not self else documents
        to.emit(program.SEGMENTS, to.tensor(own.of_queries), to.tensor(own.of_keys))

    def at(self, place: Place) -> Tensor:
        own = after(self.cu_seqlens_q, place.i)
        return (own == after(self.of_keys, place.j)) & (own < self.cu_seqlens_q.shape[0] - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class KeyPadding(Mask):
    """Every query sees the first ``lengths[b]`` keys; the others are padding.

    Args:
        lengths: integers, (batch,) or a scalar tensor for all batches; beside a :class:`VarLen`, (documents,).
    """

    lengths: Tensor

    def lower(self, to: Lowering, documents: Documents | None) -> None:
        """``LENGTH``."""
        to.lengths(self, self.lengths, documents)

    def at(self, place: Place) -> Tensor:
        return place.first(self.lengths)


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A tensor says it: True where a query sees a key; or, if it is floating, what is added to the logits.

    Args:
        tensor: bool or floating, of a shape that broadcasts to (batch, heads, queries, keys). A floating one can only be
            combined with ``&``; its minus infinities hide, but NaN and infinity in hidden values get through as
            ``0 * NaN``, which bool masks rule out.
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        if causal_bias_of(self.tensor) is not None:
            raise ArgumentTypeError(
                "Dense: the tensor is a CausalBias of torch, whose elements were never written. Give it as mask= itself, or "
                "combined with other masks by & and |."
            )

    @property
    def additive(self) -> bool:
        """Whether it is added to the logits, and so a bias."""
        return self.tensor.is_floating_point()

    def lower(self, to: Lowering, documents: Documents | None) -> None:
        """``DENSE``."""
        if self.additive:
            raise ArgumentError(
                "opkit.attention: a floating Dense mask is added to the logits and can only be combined with &. Give a bool "
                "tensor to combine it with | or ~: Dense(tensor > float('-inf'))."
            )
        to.emit(program.DENSE, to.dense("Dense", self.tensor, floating=False))

    def at(self, place: Place) -> Tensor:
        if self.additive:
            raise ArgumentError(
                "a floating Dense mask is added to the logits: it is a bias, not a mask_mod(b, h, q_idx, kv_idx)."
            )
        return place.of_all(self.tensor)


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """A query sees the keys that it sees by every one of ``parts``; written ``a & b``."""

    parts: tuple[Mask, ...]

    @property
    def static(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether no part holds tensors."""
        return all(part.static for part in self.parts)

    def lower(self, to: Lowering, documents: Documents | None) -> None:
        """Each part, and ``AND`` after all but the first."""
        found = conjuncts(self)
        documents = to.documents_among(found) or documents
        for number, part in enumerate(found):
            part.lower(to, documents)
            if number:
                to.emit(program.AND)

    def at(self, place: Place) -> Tensor:
        found = conjuncts(self)
        packed = [part for part in found if isinstance(part, VarLen)]
        place = place._replace(starts=(packed[0].cu_seqlens_q, packed[0].of_keys)) if packed else place
        return functools.reduce(operator.and_, [part.at(place) for part in found])


@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """A query sees the keys that it sees by any one of ``parts``; written ``a | b``."""

    parts: tuple[Mask, ...]

    @property
    def static(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether no part holds tensors."""
        return all(part.static for part in self.parts)

    def lower(self, to: Lowering, documents: Documents | None) -> None:
        """Each part, and ``OR`` after all but the first."""
        for number, part in enumerate(self.parts):
            part.lower(to, documents)
            if number:
                to.emit(program.OR)

    def at(self, place: Place) -> Tensor:
        return functools.reduce(operator.or_, [part.at(place) for part in self.parts])


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """A query sees the keys that it does not see by ``part``; written ``~a``."""

    part: Mask

    @property
    def static(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the part holds no tensors."""
        return self.part.static

    def lower(self, to: Lowering, documents: Documents | None) -> None:
        """The part, and ``NOT``."""
        self.part.lower(to, documents)
        to.emit(program.NOT)

    def at(self, place: Place) -> Tensor:
        return ~self.part.at(place)


def conjuncts(mask: Mask) -> list[Mask]:
    """The masks of which a conjunction consists, those of the conjunctions in it too; of any other mask, itself."""
    return [leaf for part in mask.parts for leaf in conjuncts(part)] if isinstance(mask, And) else [mask]
