"""Functions ``score_mod(score, b, h, q_idx, kv_idx)`` that change logits, for the flex_attention of torch and of opkit."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from opkit.attn.arguments import check_softcap
from opkit.attn.masks.biases import Bias, SizedBias
from opkit.attn.masks.logit_index import LogitIndex
from opkit.errors import ArgumentError, ArgumentTypeError

_KINDS = "Softcap, ALiBi, RelativePosition, a floating tensor that is added, or ScoreMods of several"


@dataclasses.dataclass(frozen=True)
class Softcap:
    """A ``score_mod``: the logits become ``cap * tanh(logits / cap)``. In :func:`opkit.attention` it is ``softcap=cap``.

    Args:
        cap: above 0.

    >>> Softcap(2.0)(torch.tensor(100.0), *torch.zeros(4, dtype=torch.int64))
    tensor(2.)
    """

    cap: float

    def __post_init__(self) -> None:
        check_softcap(self.cap)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return ``score``, bounded."""
        return self.cap * torch.tanh(score / self.cap)


class ScoreMods:
    """A ``score_mod`` that applies several, one after another.

    Args:
        parts: a :class:`Softcap`, which must be the first; biases of :mod:`opkit.masks`; floating tensors that broadcast to
            (batch, heads, queries, keys), which are added.

    >>> from opkit.masks import ALiBi
    >>> mods = ScoreMods(Softcap(2.0), ALiBi(torch.tensor([0.5])))
    >>> mods(torch.tensor(100.0), *torch.tensor([0, 0, 3, 1]))
    tensor(1.)
    """

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        parsed(self)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return ``score`` after all parts were applied."""
        for part in self.parts:
            if isinstance(part, Tensor):
                score = score + LogitIndex(b, h, q_idx, kv_idx).of_all(part)
            else:
                score = part(score, b, h, q_idx, kv_idx)
        return score


def parsed(score_mod: Any) -> tuple[float | None, list[Any]]:
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
        _check(part)
    return (caps[0] if caps else None), others


def _check(part: Any) -> None:
    if isinstance(part, (Bias, SizedBias)) or (isinstance(part, Tensor) and part.is_floating_point()):
        return
    name = getattr(part, "__qualname__", None) or f"{type(part).__name__}: {part!r}"
    raise ArgumentTypeError(
        f"opkit: a score_mod is one of opkit.masks ({_KINDS}), got {name}. A Python function is not run: express it by "
        "these, pass what it adds to the logits as a tensor, or call torch.nn.attention.flex_attention.flex_attention."
    )
