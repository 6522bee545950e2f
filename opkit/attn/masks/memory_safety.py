"""Check that tensors have the shapes and dtypes that a call's programs say: kernels read memory accordingly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opkit.attn.calls import AnyCall, GradientCall
from opkit.attn.masks import program

GridSizes = tuple[int, int, int, int]  # batch, heads, queries, keys


def shapes_fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether queries, keys and values have four dimensions, one dtype, and sizes that agree."""
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    heads = q.shape[1] % k.shape[1] == 0 if k.shape[1] else q.shape[1] == 0
    return heads and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]


def sinks_fit(sinks: Tensor | None, q: Tensor) -> bool:
    """Return whether there is one sink for each head, or no sinks."""
    return sinks is None or tuple(sinks.shape) == (q.shape[1],)


def results_fit(call: GradientCall) -> bool:
    """Return whether the results of the forward and their gradients have the shapes and dtypes that they must have."""
    results = [each.shape == (*call.q.shape[:3], call.v.shape[3]) for each in (call.out, call.gradient)]
    sums = [call.lse] if call.of_lse is None else [call.lse, call.of_lse]
    same = call.out.dtype == call.gradient.dtype == call.q.dtype
    return same and all(results) and all(x.shape == call.q.shape[:3] and x.dtype == torch.float32 for x in sums)


def mask_fits(call: AnyCall) -> bool:
    """Return whether each tensor that a mask's program names exists and has the right shape and dtype."""
    return _fits(call.mask, call.mask_tensors, _sizes(call), _MASK)


def bias_fits(call: AnyCall) -> bool:
    """Return the same for a bias's program."""
    return _fits(call.bias, call.bias_tensors, _sizes(call), _BIAS)


def _sizes(call: AnyCall) -> GridSizes:
    return call.q.shape[0], call.q.shape[1], call.q.shape[2], call.k.shape[2]


_Check = Callable[[Sequence[int], Sequence[Tensor], GridSizes], bool]


def _fits(
    words: Sequence[int], tensors: Sequence[Tensor], sizes: GridSizes, checks: dict[int, tuple[int, int, _Check]]
) -> bool:
    at = 0
    while at < len(words):
        if words[at] not in checks:
            return False
        operands, named, check = checks[words[at]]
        operand_words = words[at + 1 : at + 1 + operands]
        if len(operand_words) < operands or not all(0 <= n < len(tensors) for n in operand_words[:named]):
            return False
        if not check(operand_words, [tensors[n] for n in operand_words[:named]], sizes):
            return False
        at += 1 + operands
    return True


def _broadcasts(tensor: Tensor, *sizes: int) -> bool:
    return tensor.dim() == len(sizes) and all(mine in (1, full) for mine, full in zip(tensor.shape, sizes, strict=True))


def _nothing(operand_words: Sequence[int], tensors: Sequence[Tensor], sizes: GridSizes) -> bool:
    return True


def _segments(operand_words: Sequence[int], tensors: Sequence[Tensor], sizes: GridSizes) -> bool:
    (batch, _, queries, keys), (mine, theirs) = sizes, tensors
    return (
        all(t.dtype == torch.int32 for t in tensors)
        and _broadcasts(mine, batch, queries)
        and _broadcasts(theirs, batch, keys)
    )


def _length(operand_words: Sequence[int], tensors: Sequence[Tensor], sizes: GridSizes) -> bool:
    return tensors[0].dtype == torch.int32 and _broadcasts(tensors[0], sizes[0])


def _dense(operand_words: Sequence[int], tensors: Sequence[Tensor], sizes: GridSizes) -> bool:
    return tensors[0].dtype == torch.bool and _broadcasts(tensors[0], *sizes)


def _band_at(operand_words: Sequence[int], tensors: Sequence[Tensor], sizes: GridSizes) -> bool:
    return tensors[0].dtype == torch.int32 and _broadcasts(tensors[0], sizes[0], sizes[2])


def _added(operand_words: Sequence[int], tensors: Sequence[Tensor], sizes: GridSizes) -> bool:
    return _broadcasts(tensors[0], *sizes)


def _alibi(operand_words: Sequence[int], tensors: Sequence[Tensor], sizes: GridSizes) -> bool:
    return _broadcasts(tensors[0], *sizes[:2])


def _relative(operand_words: Sequence[int], tensors: Sequence[Tensor], sizes: GridSizes) -> bool:
    (high, wide), width = tensors, operand_words[2]
    if high.dim() != 4 or wide.dim() != 4 or width < 1 or wide.shape[3] != width:
        return False
    return all(_broadcasts(t[..., 0], *sizes[:3]) for t in tensors) and high.shape[3] * width >= sizes[3]


_MASK: dict[int, tuple[int, int, _Check]] = {  # operands, how many of them name tensors, what these must be
    program.AND: (0, 0, _nothing),
    program.OR: (0, 0, _nothing),
    program.NOT: (0, 0, _nothing),
    program.BAND: (2, 0, _nothing),
    program.SEGMENTS: (2, 2, _segments),
    program.LENGTH: (1, 1, _length),
    program.DENSE: (1, 1, _dense),
    program.BAND_AT: (3, 1, _band_at),
}
_BIAS: dict[int, tuple[int, int, _Check]] = {
    program.BIAS_DENSE: (1, 1, _added),
    program.BIAS_ALIBI: (1, 1, _alibi),
    program.BIAS_REL: (3, 2, _relative),
}
