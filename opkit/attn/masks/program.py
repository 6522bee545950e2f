"""Define the programs of masks and biases, integers over lists of tensors, and interpret them in torch operations.

A mask's program is in postfix: a leaf pushes which keys each query sees, and ``AND``, ``OR`` and ``NOT`` combine what was
pushed. An empty program hides nothing. A bias's program is a list of terms, which are added. Each opcode is followed by
its operands:

=============================  ========================================================================================
mask                           query ``i`` of batch ``b`` and head ``h`` sees key ``j`` if and only if
=============================  ========================================================================================
``BAND lower upper``           ``lower <= j - i <= upper``; ``-UNLIMITED`` and ``UNLIMITED`` are no limits
``SEGMENTS tq tk``             ``tensors[tq][b, i] == tensors[tk][b, j]``: int32, (batch or 1, queries) and (.., keys)
``LENGTH t``                   ``j < tensors[t][b]``: int32, (batch or 1,)
``DENSE t``                    ``tensors[t][b, h, i, j]``: bool, 4 dimensions, each of size 1 or full
``BAND_AT t lower upper``      ``lower <= j - i - tensors[t][b, i] <= upper``: int32, (batch or 1, queries)
=============================  ========================================================================================

=============================  ========================================================================================
bias                           is added to the logit of query ``i`` and key ``j``
=============================  ========================================================================================
``BIAS_DENSE t``               ``tensors[t][b, h, i, j]``: floating, 4 dimensions, each of size 1 or full
``BIAS_ALIBI t``               ``-tensors[t][b, h] * |i + (keys - queries) - j|``: float32, (batch or 1, heads)
``BIAS_REL th tw kw``          ``tensors[th][b, h, i, j // kw] + tensors[tw][b, h, i, j % kw]``: floating
=============================  ========================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

AND, OR, NOT, BAND, SEGMENTS, LENGTH, DENSE, BAND_AT = range(8)
BIAS_DENSE, BIAS_ALIBI, BIAS_REL = range(3)
UNLIMITED = 2**62


@dataclasses.dataclass(frozen=True)
class Grid:
    """The grid of a call's logits: the numbers of queries and keys, and the device."""

    queries: int
    keys: int
    device: torch.device

    @property
    def rows(self) -> Tensor:
        """The numbers of the queries, (queries, 1)."""
        return torch.arange(self.queries, device=self.device).unsqueeze(-1)

    @property
    def columns(self) -> Tensor:
        """The numbers of the keys, (keys,)."""
        return torch.arange(self.keys, device=self.device)


Tensors = Sequence[Tensor]


def visible(program: Sequence[int], tensors: Tensors, grid: Grid) -> Tensor | None:
    """Return which keys each query sees: bool, (batch or 1, heads or 1, queries, keys); None where nothing is hidden."""
    stack: list[Tensor] = []
    at = 0
    while at < len(program):
        operands, operate = _MASK[int(program[at])]
        operate(stack, program[at + 1 : at + 1 + operands], tensors, grid)
        at += 1 + operands
    if not stack:
        return None
    (result,) = stack
    return result.expand(*result.shape[:2], grid.queries, grid.keys)


def _and(stack: list[Tensor], operands: Sequence[int], tensors: Tensors, grid: Grid) -> None:
    stack.append(stack.pop() & stack.pop())


def _or(stack: list[Tensor], operands: Sequence[int], tensors: Tensors, grid: Grid) -> None:
    stack.append(stack.pop() | stack.pop())


def _not(stack: list[Tensor], operands: Sequence[int], tensors: Tensors, grid: Grid) -> None:
    stack.append(~stack.pop())


def _band(stack: list[Tensor], operands: Sequence[int], tensors: Tensors, grid: Grid) -> None:
    stack.append(_between(grid.columns - grid.rows, *operands)[None, None])


def _band_at(stack: list[Tensor], operands: Sequence[int], tensors: Tensors, grid: Grid) -> None:
    offsets = tensors[operands[0]].long().unsqueeze(-1)
    stack.append(_between(grid.columns - grid.rows - offsets, *operands[1:]).unsqueeze(1))


def _between(distances: Tensor, lower: int, upper: int) -> Tensor:
    return (distances >= lower) & (distances <= upper)


def _segments(stack: list[Tensor], operands: Sequence[int], tensors: Tensors, grid: Grid) -> None:
    queries, keys = tensors[operands[0]], tensors[operands[1]]
    stack.append((queries.unsqueeze(-1) == keys.unsqueeze(-2)).unsqueeze(1))


def _length(stack: list[Tensor], operands: Sequence[int], tensors: Tensors, grid: Grid) -> None:
    stack.append((grid.columns < tensors[operands[0]].unsqueeze(-1))[:, None, None])


def _dense(stack: list[Tensor], operands: Sequence[int], tensors: Tensors, grid: Grid) -> None:
    stack.append(tensors[operands[0]])


_Operate = Callable[[list[Tensor], Sequence[int], Tensors, Grid], None]
_MASK: dict[int, tuple[int, _Operate]] = {
    AND: (0, _and),
    OR: (0, _or),
    NOT: (0, _not),
    BAND: (2, _band),
    SEGMENTS: (2, _segments),
    LENGTH: (1, _length),
    DENSE: (1, _dense),
    BAND_AT: (3, _band_at),
}


def biased(logits: Tensor, program: Sequence[int], tensors: Tensors, grid: Grid) -> Tensor:
    """Return ``logits``, (batch, heads, queries, keys), with each term of a bias's program added in their dtype."""
    at = 0
    while at < len(program):
        operands, term = _BIAS[int(program[at])]
        logits = logits + term(program[at + 1 : at + 1 + operands], tensors, grid, logits.dtype)
        at += 1 + operands
    return logits


def _bias_dense(operands: Sequence[int], tensors: Tensors, grid: Grid, dtype: torch.dtype) -> Tensor:
    return tensors[operands[0]].to(dtype)


def _bias_alibi(operands: Sequence[int], tensors: Tensors, grid: Grid, dtype: torch.dtype) -> Tensor:
    distances = (grid.rows + (grid.keys - grid.queries) - grid.columns).abs()
    return -tensors[operands[0]].to(dtype)[..., None, None] * distances.to(dtype)


def _bias_rel(operands: Sequence[int], tensors: Tensors, grid: Grid, dtype: torch.dtype) -> Tensor:
    high, wide = tensors[operands[0]].to(dtype), tensors[operands[1]].to(dtype)
    return (high.unsqueeze(-1) + wide.unsqueeze(-2)).flatten(-2)[..., : grid.keys]


_Term = Callable[[Sequence[int], Tensors, Grid, torch.dtype], Tensor]
_BIAS: dict[int, tuple[int, _Term]] = {
    BIAS_DENSE: (1, _bias_dense),
    BIAS_ALIBI: (1, _bias_alibi),
    BIAS_REL: (3, _bias_rel),
}


def bias_gradients(of_logits: Tensor, program: Sequence[int], tensors: Tensors) -> list[Tensor | None]:
    """Return the gradients of a bias's tensors, in their dtypes, from that of the logits; None for one that no term names."""
    gradients: list[Tensor | None] = [None] * len(tensors)
    at = 0
    while at < len(program):
        kind = int(program[at])
        operands = program[at + 1 : at + 1 + _BIAS[kind][0]]
        for number, gradient in zip(operands, _BIAS_GRADIENTS[kind](of_logits, operands, tensors), strict=False):
            summed = gradient.sum_to_size(tensors[number].shape).to(tensors[number].dtype)
            earlier = gradients[number]
            gradients[number] = summed if earlier is None else earlier + summed
        at += 1 + len(operands)
    return gradients


def _of_dense(of_logits: Tensor, operands: Sequence[int], tensors: Tensors) -> list[Tensor]:
    return [of_logits]


def _of_alibi(of_logits: Tensor, operands: Sequence[int], tensors: Tensors) -> list[Tensor]:
    grid = Grid(of_logits.shape[-2], of_logits.shape[-1], of_logits.device)
    distances = (grid.rows + (grid.keys - grid.queries) - grid.columns).abs()
    return [-(of_logits * distances.to(of_logits.dtype)).sum((-1, -2))]


def _of_rel(of_logits: Tensor, operands: Sequence[int], tensors: Tensors) -> list[Tensor]:
    high, wide = tensors[operands[0]].shape[-1], tensors[operands[1]].shape[-1]
    missing = high * wide - of_logits.shape[-1]
    spread = torch.nn.functional.pad(of_logits, (0, missing)).unflatten(-1, (high, wide))
    return [spread.sum(-1), spread.sum(-2)]


_BIAS_GRADIENTS: dict[int, Callable[[Tensor, Sequence[int], Tensors], list[Tensor]]] = {
    BIAS_DENSE: _of_dense,
    BIAS_ALIBI: _of_alibi,
    BIAS_REL: _of_rel,
}
