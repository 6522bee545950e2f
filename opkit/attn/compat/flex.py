"""``torch.nn.attention.flex_attention`` by :func:`opkit.attention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opkit.attn.api import attention
from opkit.attn.masks.algebra import Mask, MaskFunction, SizedMask
from opkit.attn.masks.biases import SizedBias, parse_score_mod
from opkit.attn.masks.block_masks import Blocks
from opkit.errors import ArgumentError, ArgumentTypeError, ShapeError
from opkit.op import torch_private as private

_NAME = "opkit.nn.functional.flex_attention"


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """``torch.nn.attention.flex_attention.flex_attention``, with its arguments and their meaning, compiled or not.

    Args:
        query: (batch, heads, queries, d).
        key: (batch or 1, key heads, keys, d).
        value: (batch or 1, key heads, keys, d_v).
        score_mod: a function, or of :mod:`opkit.masks` ``Softcap``, ``ALiBi``, ``RelativePosition``, ``ScoreMods`` of several, or
            what their ``sized`` gives; a floating tensor is added to the logits.
        block_mask: a ``BlockMask`` of torch, a function ``mask_mod``, or a mask of :mod:`opkit.masks`. A ``BlockMask`` with the
            blocks of its function is that function; of other blocks it is made a bool tensor, once.
        scale: of logits; ``1 / sqrt(d)`` by default.
        enable_gqa: whether several heads of queries may share one of keys.
        return_lse: also give the log-sum-exp; torch has put ``return_aux`` in its place.
        kernel_options: of torch's kernels; not read.
        return_aux: an ``AuxRequest`` of torch, of the log-sum-exp.

    Returns:
        (batch, heads, queries, d_v) of ``query``'s dtype; with ``return_lse`` also the log-sum-exp, (batch, heads, queries), of
        base e; with ``return_aux`` also torch's ``AuxOutput``. A query that sees nothing gives zeros and minus infinity.

    Raises:
        ArgumentTypeError: ``score_mod`` or ``block_mask`` is none of these.
        ArgumentError: ``return_aux`` asks for the greatest logits, or is passed together with ``return_lse``.
        ShapeError: a shape does not fit, or a ``BlockMask`` is for other numbers of queries or keys.

    >>> import torch
    >>> from opkit.masks import ALiBi, Causal, ScoreMods, Softcap
    >>> q = torch.ones(1, 2, 3, 4)
    >>> mods = ScoreMods(Softcap(20.0), ALiBi(torch.tensor([0.5, 0.25])))
    >>> flex_attention(q, q, q, score_mod=mods, block_mask=Causal()).shape
    torch.Size([1, 2, 3, 4])
    """
    _check_returns(return_lse, return_aux)
    if not enable_gqa and query.shape[-3:-2] != key.shape[-3:-2]:
        raise ShapeError(
            f"{_NAME}: query of shape {tuple(query.shape)} and key of {tuple(key.shape)} differ in heads. Give enable_gqa=True "
            "if heads share keys."
        )
    sizes = (query.shape[-2], key.shape[-2])
    softcap, parts = parse_score_mod(score_mod)
    biases = [_of_sizes(part, part.bias, sizes) if isinstance(part, SizedBias) else part for part in parts]
    key, value = (
        x.expand(query.shape[0], *x.shape[1:]) if private.or_false(x.shape[0] == 1) else x for x in (key, value)
    )
    out, lse = attention(
        query, key, value, mask=_mask(block_mask, sizes), bias=biases or None, scale=scale, softcap=softcap, return_lse=True
    )  # fmt: skip
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _check_returns(return_lse: bool, return_aux: Any) -> None:
    if return_lse and return_aux is not None:
        raise ArgumentError(f"{_NAME}: give return_lse=True or return_aux=AuxRequest(lse=True), not both.")
    if return_aux is not None and return_aux.max_scores:
        raise ArgumentError(f"{_NAME}: return_aux asks for max_scores, which no kernel keeps. Ask for lse alone.")


def _mask(given: Any, sizes: tuple[int, int]) -> Mask | None:
    if given is None or isinstance(given, Mask):
        return given
    if isinstance(given, SizedMask):
        return _of_sizes(given, given.mask, sizes)
    if not hasattr(given, "kv_num_blocks"):
        if callable(given):
            return MaskFunction(given)
        raise ArgumentTypeError(
            f"{_NAME}: block_mask is a BlockMask of torch, a function or a mask of opkit.masks, got {type(given).__name__}: "
            f"{given!r}."
        )
    if not _may_be(tuple(given.seq_lengths), sizes):
        raise ShapeError(
            f"{_NAME}: block_mask is for (queries, keys) = {tuple(given.seq_lengths)}; there are {sizes}. Make one for these."
        )
    return Blocks(given)


def _may_be(known: tuple[int, int], sizes: tuple[int, int]) -> bool:
    return private.or_true(known[0] == sizes[0]) and private.or_true(known[1] == sizes[1])


def _of_sizes(sized: SizedMask | SizedBias, inner: Any, sizes: tuple[int, int]) -> Any:
    if not _may_be((sized.queries, sized.keys), sizes):
        raise ShapeError(
            f"{_NAME}: {type(inner).__name__} was made for (queries, keys) = {(sized.queries, sized.keys)}; there are {sizes}."
        )
    return inner
