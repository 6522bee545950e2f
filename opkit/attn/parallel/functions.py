"""The functions among a call's mask and biases, traced before the call is divided: parts of it get parts of their expressions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opkit.attn.functions import graph_calls, known
from opkit.attn.functions.captures import Local
from opkit.attn.functions.pending import Functions
from opkit.attn.functions.trace import Traced, score_dtype
from opkit.attn.masks import biases
from opkit.attn.masks.algebra import And, Dense, Mask, MaskFunction, Not, Or, as_mask, conjuncts
from opkit.attn.masks.block_masks import Blocks
from opkit.attn.masks.program_builder import CallSizes
from opkit.attn.masks.traced import TracedMask, TracedScore
from opkit.attn.operator import attention_operator
from opkit.attn.parallel.blocks import local_bias, local_mask
from opkit.attn.parallel.options import Options

_OPERATOR = attention_operator()


@dataclasses.dataclass
class TracedCall:
    """The mask and the biases of a call for all of its positions, without functions and without floating masks.

    Attributes:
        mask: the mask.
        biases: the biases, with floating masks.
        functions: where Dynamo traces, the functions that the two name by number; None elsewhere.
    """

    mask: Mask | None
    biases: list[Any]
    functions: Functions | None = None

    @classmethod
    def of(cls, mask: Any, bias: Any, sizes: CallSizes, dtype: torch.dtype, local: Local | None = None) -> TracedCall:
        """Return those of the arguments of :func:`opkit.attention`; ``sizes`` are those of all positions.

        ``local`` makes this process's tensor of a ``DTensor`` that a function captures.

        Raises:
            ArgumentError: a function captures a ``DTensor`` that ``local`` does not know.
            ShapeError: a captured tensor is smaller than the number of batches, heads, queries or keys that index it.
        """
        functions: Functions | None = [] if is_dynamo_compiling() else None
        found = None if mask is None else _traced(as_mask(mask), sizes, functions, local)
        listed = biases.listed(bias)
        for number, each in enumerate(listed):
            if biases.is_function(each):
                score = TracedScore.of(each, score_dtype(dtype), sizes.device, functions, local)
                _check(score, sizes)
                listed[number] = score
        return cls(*separated(found, listed), functions)

    def part(self, heads: range, batch: range | None = None) -> TracedCall:
        """Return the call for some of the heads, and of the batch."""
        mask = None if self.mask is None else local_mask(self.mask, heads, batch)
        return TracedCall(mask, [local_bias(each, heads, batch) for each in self.biases], self.functions)

    def run(
        self, options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, at: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the result of the operator and its log-sum-exp; ``at`` as in :meth:`Options.call`."""
        call = options.call(q, k, v, self.mask, self.biases, sinks, at)
        return graph_calls.call(lambda: _OPERATOR(*call), self.functions, q)


def separated(mask: Mask | None, added: list[Any]) -> tuple[Mask | None, list[Any]]:
    """Return a mask with what scores hide, and the biases with what masks add."""
    parts = [] if mask is None else conjuncts(mask)
    floating = [each for each in parts if isinstance(each, Dense) and each.additive]
    hiding = [each for each in parts if not (isinstance(each, Dense) and each.additive)]
    rest: list[Any] = []
    for each in added:
        if isinstance(each, TracedScore) and isinstance(each.traced, Traced):
            root, seen = known.without_hidden(each.traced.root)
            if seen is not None:
                hiding.append(TracedMask(dataclasses.replace(each.traced, root=seen), each.name))
                each = TracedScore(dataclasses.replace(each.traced, root=root), each.name)
        rest.append(each)
    return And(tuple(hiding)) if hiding else None, [*(each.tensor for each in floating), *rest]


def _traced(mask: Mask, sizes: CallSizes, functions: Functions | None, local: Local | None) -> Mask:
    """Return a mask with what its functions say in their place."""
    match mask:
        case And() | Or():
            return type(mask)(tuple([_traced(part, sizes, functions, local) for part in mask.parts]))
        case Not():
            return Not(_traced(mask.part, sizes, functions, local))
        case Blocks():
            mask.check(sizes)
            return _traced(mask.mask, sizes, functions, local)
        case MaskFunction():
            found = TracedMask.of(mask.function, sizes.device, functions, local)
            _check(found, sizes)
            return found
        case _:
            return mask


def _check(found: TracedMask | TracedScore, sizes: CallSizes) -> None:
    if isinstance(found.traced, Traced):
        known.check_sizes(found.traced, found.traced.root, sizes, found.name)
