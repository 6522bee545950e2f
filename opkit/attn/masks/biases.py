"""Biases, which are added to the logits, and functions ``score_mod(score, b, h, q_idx, kv_idx)`` made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from opkit.attn.arguments import check_softcap
from opkit.attn.masks import program
from opkit.attn.masks.logit_index import LogitIndex
from opkit.attn.masks.program_builder import CallSizes, broadcasts, check_tensor, dense, number_in
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from opkit.op import torch_private as private

_SCORE_MODS = "Softcap, ALiBi, RelativePosition, a floating tensor that is added, or ScoreMods of several"


class Bias:
    """The base class of biases that are not tensors; use those below."""

    def lower(self, sizes: CallSizes, tensors: list[Tensor]) -> list[int]:
        """Return the program, whose tensors are appended to ``tensors``."""
        raise NotImplementedError(type(self))

    def at(self, index: LogitIndex) -> Tensor:
        """Return what is added to the logit of a query and a key."""
        raise NotImplementedError(type(self))

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return ``score`` plus the bias, which is a ``score_mod`` of torch's flex_attention for as many keys as queries."""
        return score + self.at(LogitIndex(b, h, q_idx, kv_idx, 0))

    def sized(self, queries: int, keys: int) -> SizedBias:
        """Return a ``score_mod`` for these numbers of queries and keys."""
        return SizedBias(self, queries, keys)


@dataclasses.dataclass(frozen=True)
class SizedBias:
    """A bias with the numbers of queries and keys for which it is called; see :meth:`Bias.sized`."""

    bias: Bias
    queries: int
    keys: int

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return ``score`` plus the bias."""
        return score + self.bias.at(LogitIndex(b, h, q_idx, kv_idx, self.keys - self.queries))


@dataclasses.dataclass(frozen=True, eq=False)
class ALiBi(Bias):
    """Adds ``-slope * |i + keys - queries - j|``: the farther a key, the less it counts; the last query is at the last key.

    Args:
        slopes: floating, (heads,) or (batch, heads), used as float32; gradients reach them.

    Raises:
        ShapeError, DtypeError, ArgumentTypeError: at a call that ``slopes`` do not fit.

    Source: Press, Smith and Lewis, "Train Short, Test Long", 2021, https://arxiv.org/abs/2108.12409.

    >>> import opkit, torch
    >>> q = torch.zeros(1, 2, 3, 4)
    >>> opkit.attention(q, q, q, bias=ALiBi(torch.tensor([0.5, 0.25]))).shape
    torch.Size([1, 2, 3, 4])
    """

    slopes: Tensor

    def lower(self, sizes: CallSizes, tensors: list[Tensor]) -> list[int]:
        """Return ``BIAS_ALIBI`` and its operand."""
        _check_floating("ALiBi: slopes", self.slopes, sizes)
        slopes = self.slopes.unsqueeze(0) if self.slopes.dim() == 1 else self.slopes
        if (
            slopes.dim() != 2
            or not private.or_true(slopes.shape[1] == sizes.heads)
            or not broadcasts(slopes.shape[0], sizes.batch)
        ):
            raise ShapeError(
                f"opkit.attention: ALiBi: slopes of shape {tuple(self.slopes.shape)} must be (heads,) = ({sizes.heads},) or "
                f"(batch, heads) = ({sizes.batch}, {sizes.heads})."
            )
        return [program.BIAS_ALIBI, number_in(tensors, slopes.float())]

    def at(self, index: LogitIndex) -> Tensor:
        slopes = self.slopes.float()[..., None, None]
        return -index.of_all(slopes) * (index.i + index.known_shift() - index.j).abs()


@dataclasses.dataclass(frozen=True, eq=False)
class RelativePosition(Bias):
    """Adds ``rel_h[..., j // kw] + rel_w[..., j % kw]``, for keys that are a grid of ``kh`` rows and ``kw`` columns.

    Args:
        rel_h: floating, (batch, heads, queries, kh); any of the first three may be 1.
        rel_w: floating, (batch, heads, queries, kw); ``kh * kw`` is the number of keys.

    Raises:
        ShapeError, DtypeError, ArgumentTypeError: at a call that the tensors do not fit.

    Source: Li et al., "MViTv2: Improved Multiscale Vision Transformers for Classification and Detection", 2021,
    https://arxiv.org/abs/2112.01526; it is the ``add_decomposed_rel_pos`` of SAM, without its matrix in memory.

    >>> import opkit, torch
    >>> from opkit.masks import RelativePosition
    >>> q = torch.ones(1, 2, 6, 8)  # six keys, a grid of 2 rows and 3 columns
    >>> opkit.attention(q, q, q, bias=RelativePosition(torch.zeros(1, 2, 6, 2), torch.zeros(1, 2, 6, 3))).shape
    torch.Size([1, 2, 6, 8])
    """

    rel_h: Tensor
    rel_w: Tensor

    def lower(self, sizes: CallSizes, tensors: list[Tensor]) -> list[int]:
        """Return ``BIAS_REL`` and its operands."""
        full = [self._part("rel_h", self.rel_h, sizes), self._part("rel_w", self.rel_w, sizes)]
        kh, kw = full[0].shape[-1], full[1].shape[-1]
        if not private.or_true(kh * kw == sizes.keys):
            raise ShapeError(
                f"opkit.attention: RelativePosition: rel_h has {kh} rows and rel_w {kw} columns, that is {kh * kw} keys; there "
                f"are {sizes.keys}."
            )
        return [program.BIAS_REL, *(number_in(tensors, part) for part in full), kw]

    def at(self, index: LogitIndex) -> Tensor:
        wide = self.rel_w.shape[-1]
        row, column = (index._replace(j=j) for j in (index.j // wide, index.j % wide))
        return row.of_all(self.rel_h) + column.of_all(self.rel_w)

    @staticmethod
    def _part(name: str, tensor: Tensor, sizes: CallSizes) -> Tensor:
        name = f"RelativePosition: {name}"
        _check_floating(name, tensor, sizes)
        want = (sizes.batch, sizes.heads, sizes.queries)
        if tensor.dim() != 4 or not all(map(broadcasts, tensor.shape, want)):
            shape = ", ".join(map(str, want))
            raise ShapeError(
                f"opkit.attention: {name} of shape {tuple(tensor.shape)} must be (batch, heads, queries, n) = ({shape}, n), "
                "each of the first three that or 1."
            )
        return tensor.expand(*want, tensor.shape[-1])


def lower(bias: object, sizes: CallSizes, tensors: list[Tensor]) -> list[int]:
    """Return the program of a bias, of a floating tensor, or of several; its tensors are appended to ``tensors``.

    Raises:
        ArgumentTypeError: ``bias`` is none of these.
        ShapeError, DtypeError, ArgumentError: a tensor does not fit the call.
    """
    if isinstance(bias, Bias):
        return bias.lower(sizes, tensors)
    if isinstance(bias, Tensor):
        return [program.BIAS_DENSE, number_in(tensors, dense("bias", bias, sizes, floating=True))]
    if isinstance(bias, (list, tuple)):
        return [word for part in bias for word in lower(part, sizes, tensors)]
    raise ArgumentTypeError(
        "opkit.attention: a bias is a floating tensor, ALiBi, RelativePosition, a function, or a list of them, got "
        f"{type(bias).__name__}: {bias!r}."
    )


def listed(bias: Any) -> list[Any]:
    """Return the biases of an argument ``bias`` of :func:`opkit.attention`."""
    return [] if bias is None else [*bias] if isinstance(bias, list | tuple) else [bias]


def is_function(bias: object) -> bool:
    """Return whether a bias is a user's ``score_mod``."""
    return callable(bias) and not isinstance(bias, (Bias, Tensor))


def has_alibi(bias: object) -> bool:
    """Return whether ``bias`` depends on distances between packed positions."""
    return any(map(has_alibi, bias)) if isinstance(bias, (list, tuple)) else isinstance(bias, ALiBi)


def _check_floating(name: str, tensor: Tensor, sizes: CallSizes) -> None:
    check_tensor(name, tensor, sizes.device)
    if not tensor.is_floating_point():
        raise DtypeError(f"opkit.attention: {name} has dtype {tensor.dtype}, expected a floating one.")


def refuse_moved(bias: object) -> None:
    """Raise for a bias that counts packed positions, where packed sequences of keys lie elsewhere than those of queries."""
    if has_alibi(bias):
        raise ArgumentError(
            "opkit.attention: ALiBi counts distances in the packed sequences, where VarLen's queries and keys lie at different "
            "places. Give a tensor of distances as the bias, or one sequence of lengths to VarLen."
        )


@dataclasses.dataclass(frozen=True)
class Softcap:
    """A ``score_mod``: the logits become ``cap * tanh(logits / cap)``. In :func:`opkit.attention` it is ``softcap=cap``.

    Args:
        cap: above 0.

    Raises:
        ArgumentError: it is not, or no number.

    >>> Softcap(2.0)(torch.tensor(100.0), *torch.zeros(4, dtype=torch.int64))
    tensor(2.)
    """

    cap: float

    def __post_init__(self) -> None:
        check_softcap(self.cap, "Softcap: cap", "a number above 0")

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return ``score``, bounded."""
        return self.cap * torch.tanh(score / self.cap)


class ScoreMods:
    """A ``score_mod`` that applies several, one after another.

    Args:
        parts: a :class:`Softcap`, which must be the first; biases of :mod:`opkit.masks`; floating tensors that broadcast to
            (batch, heads, queries, keys), which are added.

    Raises:
        ArgumentError: a :class:`Softcap` is not the first.
        ArgumentTypeError: a part is none of these.

    >>> from opkit.masks import ALiBi
    >>> mods = ScoreMods(Softcap(2.0), ALiBi(torch.tensor([0.5])))
    >>> mods(torch.tensor(100.0), *torch.tensor([0, 0, 3, 1]))
    tensor(1.)
    """

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        parse_score_mod(self)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return ``score`` after all parts were applied."""
        for part in self.parts:
            if isinstance(part, Tensor):
                score = score + LogitIndex(b, h, q_idx, kv_idx).of_all(part)
            else:
                score = part(score, b, h, q_idx, kv_idx)
        return score


def parse_score_mod(score_mod: Any) -> tuple[float | None, list[Any]]:
    """Return the soft cap and the biases, some with their sizes, that a ``score_mod`` consists of.

    Raises:
        ArgumentTypeError: it is a function of another kind.
        ArgumentError: a soft cap comes after a bias, or after a soft cap.
    """
    parts = [] if score_mod is None else list(score_mod.parts) if isinstance(score_mod, ScoreMods) else [score_mod]
    caps = [part.cap for part in parts if isinstance(part, Softcap)]
    if len(caps) > 1 or (caps and not isinstance(parts[0], Softcap)):
        raise ArgumentError(
            f"opkit: a Softcap must be the first of {parts!r}, and the only one: biases are added to capped logits."
        )
    others = parts[1:] if caps else parts
    for part in others:
        _check_score_mod(part)
    return (caps[0] if caps else None), others


def _check_score_mod(part: Any) -> None:
    if is_function(part) or isinstance(part, Bias) or (isinstance(part, Tensor) and part.is_floating_point()):
        return
    raise ArgumentTypeError(
        f"opkit: a score_mod is a function, or one of opkit.masks ({_SCORE_MODS}), got {type(part).__name__}: {part!r}."
    )
