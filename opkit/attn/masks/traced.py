"""Masks and scores of functions that were traced before the call: once for many calls, or for parts of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from opkit.attn.functions import known
from opkit.attn.functions.captures import Local
from opkit.attn.functions.pending import Functions, Pending
from opkit.attn.functions.trace import Kind, Traced, describe, trace
from opkit.attn.masks import program
from opkit.attn.masks.algebra import Mask
from opkit.attn.masks.biases import Bias
from opkit.attn.masks.logit_index import LogitIndex
from opkit.attn.masks.program_builder import CallSizes, PackedSequences, ProgramBuilder


@dataclasses.dataclass(frozen=True)
class TracedMask(Mask):
    """What a function ``mask_mod(b, h, q_idx, kv_idx)`` said when it was traced; ``name`` is the function's, for errors.

    Where Dynamo traces, ``functions`` of :meth:`of` are those of the call, which are traced when its graph runs.
    """

    traced: Traced | Pending
    name: str = "a function"

    @classmethod
    def of(
        cls, function: Callable[..., Any], device: torch.device, functions: Functions | None = None,
        local: Local | None = None,
    ) -> TracedMask:  # fmt: skip
        """Return the mask of a function for calls on a device; ``local`` as in :func:`opkit.attn.functions.trace.trace`."""
        return cls(*_traced(function, "mask", torch.float32, device, functions, local))

    @property
    def static(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it captures no tensors."""
        return not self.traced.tensors

    def part(self, ranges: Mapping[str, range]) -> TracedMask:
        """Return the mask of some of the batches, heads, queries or keys; see :meth:`Traced.part`."""
        return TracedMask(self.traced.part(ranges), self.name)

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit the opcodes that say the same, and ``FUNCTION`` for what is left."""
        if isinstance(self.traced, Pending):
            builder.emit(program.FUNCTION, *self.traced.words())
        else:
            known.lower_mask(self.traced, self.traced.root, builder, self.name)

    def at(self, index: LogitIndex) -> Tensor:
        assert isinstance(self.traced, Traced)
        tensors: list[Tensor] = []
        function = self.traced.function(self.traced.root, tensors)
        return function.evaluate({"b": index.b, "h": index.h, "i": index.i, "j": index.j}, tensors)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedScore(Bias):
    """The same of a function ``score_mod(score, b, h, q_idx, kv_idx)``."""

    traced: Traced | Pending
    name: str = "a function"

    @classmethod
    def of(
        cls, function: Callable[..., Any], dtype: torch.dtype, device: torch.device, functions: Functions | None = None,
        local: Local | None = None,
    ) -> TracedScore:  # fmt: skip
        """Return the score of a function for calls on a device, whose scores have a dtype."""
        return cls(*_traced(function, "score", dtype, device, functions, local))

    def part(self, ranges: Mapping[str, range]) -> TracedScore:
        """Return the score of some of the batches, heads, queries or keys; see :meth:`Traced.part`."""
        return TracedScore(self.traced.part(ranges), self.name)

    def lower(self, sizes: CallSizes, tensors: list[Tensor]) -> list[int]:
        """Return ``BIAS_FUNCTION`` and the function's number among those of the call."""
        assert isinstance(self.traced, Pending)
        return [program.BIAS_FUNCTION, *self.traced.words()]


def _traced(
    function: Callable[..., Any], kind: Kind, dtype: torch.dtype, device: torch.device, functions: Functions | None,
    local: Local | None,
) -> tuple[Traced | Pending, str]:  # fmt: skip
    if functions is not None:
        return Pending.of(function, kind, functions), f"the {kind}_mod"
    return trace(function, kind, dtype, device, local), describe(function)
