"""What the calls for all parts of a divided sequence have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn import api
from opkit.attn.calls import AttentionCall
from opkit.attn.masks.algebra import Mask, conjuncts

_SPREAD = 0x9E3779B1  # odd: numbers of heads and sequences do not add up to those of positions


class Options(NamedTuple):
    """Options of a call; ``seed`` is None without dropout."""

    scale: float | None
    softcap: float | None
    dropout_p: float
    seed: Tensor | None

    @classmethod
    def drawn(
        cls,
        scale: float | None,
        softcap: float | None,
        dropout_p: float,
        device: torch.device,
        at: Sequence[int] = (0, 0),
    ) -> Options:
        """Return options with a seed from torch's generator, which the first head and sequence of a shard, ``at``, change."""
        seed = api.drawn_seed(dropout_p, device)
        if seed is not None and any(at):
            seed = seed + seed.new_tensor(at) * _SPREAD
        return cls(scale, softcap, dropout_p, seed)

    def described(self, mask: Mask | None, biases: Sequence[Any]) -> str:
        """Return what all processes must have in common, beyond the tensors."""
        masks = [type(each).__name__ for each in ([] if mask is None else conjuncts(mask))]
        names = f"mask: {masks}, biases: {[type(each).__name__ for each in biases]}"
        return f"{names}, scale: {self.scale}, softcap: {self.softcap}, dropout_p: {self.dropout_p}"

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: list[Any],
        sinks: Tensor | None,
        at: Sequence[int],
    ) -> AttentionCall:
        """Return the operator's arguments for a part; dropout is another one for each part, which begins ``at`` two numbers."""
        call = AttentionCall(*api.lowered(q, k, v, mask, bias or None, self.scale, self.softcap, sinks, 0.0, "bhsd"))
        if self.seed is None:
            return call
        return call._replace(seed=self.seed + self.seed.new_tensor(at), dropout_p=float(self.dropout_p))
