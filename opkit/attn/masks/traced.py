"""A mask of a function that was traced before the call, for callers that use one mask in many calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit.attn.functions import known
from opkit.attn.functions.trace import Traced, describe, trace
from opkit.attn.masks.algebra import Mask
from opkit.attn.masks.logit_index import LogitIndex
from opkit.attn.masks.program_builder import PackedSequences, ProgramBuilder


@dataclasses.dataclass(frozen=True)
class TracedMask(Mask):
    """What a function ``mask_mod(b, h, q_idx, kv_idx)`` said when it was traced; ``name`` is the function's, for errors."""

    traced: Traced
    name: str

    @classmethod
    def of(cls, function: Callable[..., Any], device: torch.device) -> TracedMask:
        """Return the mask of a function for calls on a device."""
        return cls(trace(function, "mask", torch.float32, device), describe(function))

    @property
    def static(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it captures no tensors."""
        return not self.traced.tensors

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit the opcodes that say the same, and ``FUNCTION`` for what is left."""
        known.lower_mask(self.traced, self.traced.root, builder, self.name)

    def at(self, index: LogitIndex) -> Tensor:
        tensors: list[Tensor] = []
        function = self.traced.function(self.traced.root, tensors)
        return function.evaluate({"b": index.b, "h": index.h, "i": index.i, "j": index.j}, tensors)
