"""Masks: frozen objects that say which keys a query sees, combined with ``&``, ``|`` and ``~``.

Queries are counted by ``i`` and keys by ``j``, both from 0. Masks with a diagonal are in :mod:`opkit.attn.masks.diagonals`,
those of sequences in :mod:`opkit.attn.masks.sequences`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from opkit.attn.compat.torch_private import causal_bias_of
from opkit.attn.functions import known
from opkit.attn.functions.pending import Pending
from opkit.attn.functions.trace import describe, trace
from opkit.attn.masks import program
from opkit.attn.masks.logit_index import LogitIndex, sequences_before
from opkit.attn.masks.picture import picture
from opkit.attn.masks.program_builder import PackedSequences, ProgramBuilder
from opkit.errors import ArgumentError, ArgumentTypeError, ShapeError


class Mask:
    """The base class of masks; use those of :mod:`opkit.masks`, and ``a & b``, ``a | b``, ``~a``.

    In a function that ``torch.compile`` traces, write ``Not(a)`` for ``~a``, which Dynamo does not trace.
    """

    static: ClassVar[bool] = False
    """Whether the mask holds no tensors, so that its program depends on the numbers of queries and keys alone."""

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

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Append the program; ``packed`` are the sequences that a :class:`VarLen` in the same conjunction separates."""
        raise NotImplementedError(type(self))

    def at(self, index: LogitIndex) -> Tensor:
        """Return whether the query sees the key: bool, of the shape to which the integers of ``index`` broadcast."""
        raise NotImplementedError(type(self))

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether query ``q_idx`` sees key ``kv_idx``: a mask is a ``mask_mod`` of torch's flex_attention."""
        return self.at(LogitIndex(b, h, q_idx, kv_idx))

    def sized(self, queries: int, keys: int) -> SizedMask:
        """Return a ``mask_mod`` that knows the numbers of queries and keys, as masks need that are aligned "bottom-right".

        >>> from opkit.masks import Causal
        >>> index = (torch.tensor(n) for n in (0, 0, 0, 2))
        >>> Causal("bottom-right").sized(1, 3)(*index)
        tensor(True)
        """
        return SizedMask(self, queries, keys)

    def _repr_html_(self) -> str | None:
        return picture(self)


@dataclasses.dataclass(frozen=True)
class SizedMask:
    """A mask with the numbers of queries and keys for which it is called; see :meth:`Mask.sized`."""

    mask: Mask
    queries: int
    keys: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether query ``q_idx`` sees key ``kv_idx``."""
        return self.mask.at(LogitIndex(b, h, q_idx, kv_idx, self.keys - self.queries))

    def _repr_html_(self) -> str | None:
        return picture(self.mask, (self.queries, self.keys))


def as_mask(value: object) -> Mask:
    """Return a mask as it is, torch's ``CausalBias`` as the diagonal that it stands for, another tensor as :class:`Dense`.

    A function becomes a :class:`MaskFunction`.

    Raises:
        ArgumentTypeError: ``value`` is none of these.
    """
    if isinstance(value, Mask):
        return value
    if isinstance(value, Tensor):
        bias = causal_bias_of(value)
        return Dense(value) if bias is None else CausalOfTorch.of(bias)
    if callable(value):
        return MaskFunction(value)
    raise ArgumentTypeError(
        f"opkit.attention: a mask is one of opkit.masks, a function or a tensor, got {type(value).__name__}: {value!r}. "
        "Example: mask=opkit.masks.Causal()."
    )


@dataclasses.dataclass(frozen=True)
class CausalOfTorch(Mask):
    """The mask that ``torch.nn.attention.bias.causal_upper_left`` and ``causal_lower_right`` stand for.

    Query ``i`` sees the keys up to ``i + shift``, packed sequences or not; ``sizes`` are the numbers of queries and keys that the
    diagonal holds for, or None where it does not depend on them.
    """

    shift: int
    sizes: tuple[int, int] | None
    static: ClassVar[bool] = True

    @classmethod
    def of(cls, bias: Any) -> CausalOfTorch:
        """Return the mask that a ``CausalBias`` stands for."""
        sizes = (bias.seq_len_q, bias.seq_len_kv)
        if sizes[0] == sizes[1] or bias.variant.name == "UPPER_LEFT":
            return cls(0, None)
        return cls(sizes[1] - sizes[0], sizes)

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit ``BAND`` without a lower end."""
        sizes = (builder.sizes.queries, builder.sizes.keys)
        if self.sizes is not None and self.sizes != sizes:
            raise ShapeError(
                f"opkit.attention: causal_lower_right{self.sizes} is for that many (queries, keys); there are {sizes}. Make one "
                "for these, or give opkit.masks.Causal('bottom-right')."
            )
        builder.band(-program.UNLIMITED, self.shift, "top-left", None)

    def at(self, index: LogitIndex) -> Tensor:
        return index.j - index.i <= self.shift


@dataclasses.dataclass(frozen=True, eq=False)
class VarLen(Mask):
    """Sequences packed one after another; a query sees the keys of its own sequence.

    In a conjunction, :class:`Causal`, :class:`SlidingWindow` and :class:`PrefixLM` count within each sequence and are
    aligned within it, and the lengths of :class:`KeyPadding` and :class:`PrefixLM` are one for each sequence.

    Args:
        cu_seqlens_q: int32 or int64, (sequences + 1,): where each sequence's queries begin, and where the last ends; the
            first number is 0 and none is below the one before it. Queries from the last number on see nothing.
        cu_seqlens_k: the same of the keys; None: those of the queries.

    Raises:
        ShapeError, DtypeError: at a call that the tensors do not fit; their numbers are not checked.
        ArgumentError: at a call whose mask combines two of these by ``&``.

    >>> import opkit, torch
    >>> from opkit.masks import Causal
    >>> q, v = torch.zeros(5, 1, 1), torch.arange(5.0).reshape(5, 1, 1)
    >>> opkit.attention(q, q, v, layout="thd", mask=VarLen(torch.tensor([0, 2, 5])) & Causal()).flatten()
    tensor([0.0000, 0.5000, 2.0000, 2.5000, 3.0000])
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None = None

    @property
    def starts(self) -> tuple[Tensor, Tensor]:
        """Where each sequence begins and the last ends, in queries and in keys."""
        return self.cu_seqlens_q, self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit ``SEGMENTS`` of the sequences' numbers."""
        if packed is None or any(x is not y for x, y in zip(packed.starts, self.starts, strict=True)):
            packed = builder.packed_sequences(self.starts)
        builder.emit(program.SEGMENTS, builder.tensor(packed.of_queries), builder.tensor(packed.of_keys))

    def at(self, index: LogitIndex) -> Tensor:
        queries, keys = self.starts
        own = sequences_before(queries, index.i)
        return (own == sequences_before(keys, index.j)) & (own < queries.shape[0] - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A tensor: True where a query sees a key; or, if it is floating, a number that is added to the logit.

    Args:
        tensor: bool or floating, of a shape that broadcasts to (batch, heads, queries, keys). A floating one can only be
            combined with ``&``; its minus infinities hide, but NaN and infinity in hidden values reach the result as
            ``0 * NaN``, which bool masks rule out.

    Raises:
        ShapeError, DtypeError: at a call that the tensor does not fit.
        ArgumentError: at a call whose mask combines a floating one by ``|`` or ``~``.
        ArgumentTypeError: it is no tensor, or a ``CausalBias`` of torch, which is a mask itself.
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise ArgumentTypeError(
                f"Dense: tensor={self.tensor!r} must be a tensor, got {type(self.tensor).__name__}."
            )
        if causal_bias_of(self.tensor) is not None:
            raise ArgumentTypeError(
                "Dense: the tensor is a CausalBias of torch, whose elements were never written. Give it as mask= itself, or "
                "combined with other masks by & and |."
            )

    @property
    def additive(self) -> bool:
        """Whether the tensor is added to the logits, and so is a bias."""
        return self.tensor.is_floating_point()

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit ``DENSE``."""
        if self.additive:
            raise ArgumentError(
                "opkit.attention: a floating Dense mask is added to the logits and can only be combined with &. Give a bool "
                "tensor to combine it with | or ~: Dense(tensor > float('-inf'))."
            )
        builder.emit(program.DENSE, builder.dense("Dense", self.tensor, floating=False))

    def at(self, index: LogitIndex) -> Tensor:
        if self.additive:
            raise ArgumentError(
                "a floating Dense mask is added to the logits: it is a bias, not a mask_mod(b, h, q_idx, kv_idx)."
            )
        return index.of_all(self.tensor)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskFunction(Mask):
    """A function ``mask_mod(b, h, q_idx, kv_idx)``, as of torch's flex_attention: True where the query sees the key.

    It is traced once, with int32 tensors of unknown values. It may read any tensor, of the call's device, and any number around
    it; another value of a captured number costs nothing. A function that is passed as ``mask=`` or combined by ``&`` and ``|``
    with a mask becomes this; ``~`` needs it written.

    Comparisons of ``q_idx`` and ``kv_idx``, of elements of two integer tensors at them (as int32), and of ``kv_idx`` and an
    element at ``b`` are as fast as the masks that say the same. Elements beyond a tensor's end must not be needed.

    Args:
        function: of four int32 tensors, which returns a bool one of the shape to which they broadcast.

    Raises:
        ArgumentTypeError: at a call: it cannot be called with four arguments.
        ArgumentError: at a call: it branches on a value, or does what cannot be traced.
        DtypeError: at a call: it does not return bool.

    >>> import opkit, torch
    >>> q, width = torch.ones(1, 2, 5, 8), 2
    >>> near = MaskFunction(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < width)
    >>> opkit.attention(q, q, q, mask=~near).shape
    torch.Size([1, 2, 5, 8])
    """

    function: Callable[..., Any]

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit the opcodes that say the same, and ``FUNCTION`` for what is left."""
        if builder.functions is not None:
            builder.emit(program.FUNCTION, *Pending.of(self.function, "mask", builder.functions).words())
            return
        traced = trace(self.function, "mask", torch.float32, builder.sizes.device)
        known.lower_mask(traced, traced.root, builder, describe(self.function))

    def at(self, index: LogitIndex) -> Tensor:
        return self.function(index.b, index.h, index.i, index.j)


@dataclasses.dataclass(frozen=True)
class _Combination(Mask):
    """A mask made of several."""

    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, (tuple, list)):
            raise ArgumentTypeError(f"{type(self).__name__}: parts={self.parts!r} must be a tuple of masks.")
        object.__setattr__(self, "parts", tuple(self.parts))  # a hash is needed
        if not self.parts:
            raise ArgumentError(f"{type(self).__name__}: there are no parts, expected one or more masks.")
        _check_parts(self, self.parts)

    @property
    def static(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether no part holds tensors."""
        return all(part.static for part in self.parts)


class And(_Combination):
    """A query sees the keys that it sees by every one of ``parts``; written ``a & b``.

    Raises:
        ArgumentError: there are no parts.
        ArgumentTypeError: ``parts`` is no tuple, or a part is no mask.
    """

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit each part, and ``AND`` after all but the first."""
        parts = conjuncts(self)
        packed = packed_sequences_of(parts, builder) or packed
        for number, part in enumerate(parts):
            part.lower(builder, packed)
            if number:
                builder.emit(program.AND)

    def at(self, index: LogitIndex) -> Tensor:
        parts = conjuncts(self)
        packed = [part for part in parts if isinstance(part, VarLen)]
        index = index._replace(starts=packed[0].starts) if packed else index
        return functools.reduce(operator.and_, [part.at(index) for part in parts])


class Or(_Combination):
    """A query sees the keys that it sees by any one of ``parts``; written ``a | b``.

    Raises:
        ArgumentError: there are no parts.
        ArgumentTypeError: ``parts`` is no tuple, or a part is no mask.
    """

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit each part, and ``OR`` after all but the first."""
        for number, part in enumerate(self.parts):
            part.lower(builder, packed)
            if number:
                builder.emit(program.OR)

    def at(self, index: LogitIndex) -> Tensor:
        return functools.reduce(operator.or_, [part.at(index) for part in self.parts])


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """A query sees the keys that it does not see by ``part``; written ``~a``.

    Raises:
        ArgumentTypeError: ``part`` is no mask.
    """

    part: Mask

    def __post_init__(self) -> None:
        _check_parts(self, (self.part,))

    @property
    def static(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the part holds no tensors."""
        return self.part.static

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit the part, and ``NOT``."""
        self.part.lower(builder, packed)
        builder.emit(program.NOT)

    def at(self, index: LogitIndex) -> Tensor:
        return ~self.part.at(index)


def _check_parts(mask: Mask, parts: tuple[object, ...]) -> None:
    for part in parts:
        if not isinstance(part, Mask):
            raise ArgumentTypeError(
                f"{type(mask).__name__}: a part is a mask of opkit.masks, got {type(part).__name__}: {part!r}. Combine functions "
                "and tensors with masks by &, | and ~."
            )


def conjuncts(mask: Mask) -> list[Mask]:
    """Return the parts of a conjunction, with those of nested conjunctions in place of these; a list of any other mask alone."""
    return [leaf for part in mask.parts for leaf in conjuncts(part)] if isinstance(mask, And) else [mask]


def packed_sequences_of(parts: list[Mask], builder: ProgramBuilder) -> PackedSequences | None:
    """Return the sequences that the VarLen among the parts of a conjunction separates; raise for several of them."""
    masks = list({id(mask): mask for mask in parts if isinstance(mask, VarLen)}.values())
    if len(masks) > 1:
        raise ArgumentError(
            f"opkit.attention: a conjunction holds {len(masks)} VarLen masks, one is allowed. Use Segments for the others."
        )
    return builder.packed_sequences(masks[0].starts) if masks else None
