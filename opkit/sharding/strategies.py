"""Strategies as data: the placement of each tensor argument and result of a call on one mesh dimension.

They are data of opkit's own, so that rules can be derived, described and checked without importing torch.distributed.tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a tensor lies on one mesh dimension: whole on each device, in pieces, or as what a reduction combines."""

    kind: str  # "replicate", "shard" or "partial"
    dim: int = 0  # of a "shard"
    reduction: str = ""  # of a "partial": "sum", "avg", "max" or "min"

    def __str__(self) -> str:
        return {"replicate": "Replicate", "shard": f"Shard({self.dim})", "partial": f"Partial({self.reduction})"}[
            self.kind
        ]


REPLICATE = Placement("replicate")


def shard(dim: int) -> Placement:
    """Return the placement of a tensor in pieces along a dimension."""
    return Placement("shard", dim)


def partial(reduction: str = "sum") -> Placement:
    """Return the placement of a tensor that is the sum, average, maximum or minimum of what the devices hold."""
    return Placement("partial", reduction=reduction)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One placement for each tensor argument and each tensor result.

    Attributes:
        arguments: the placements of the tensors among the arguments, those in lists one by one, without absent ones.
        results: the placements of the tensor results.
        size: the named size that is sharded; "" where none is.
        origin: "symbolically", "by pieces" or "registered".
        even: whether it holds only where all pieces are equally large.
    """

    arguments: tuple[Placement, ...]
    results: tuple[Placement, ...]
    size: str = ""
    origin: str = "symbolically"
    even: bool = False

    @property
    def trivial(self) -> bool:
        """Whether all arguments are replicated."""
        return all(placement == REPLICATE for placement in self.arguments)

    def backward(self, differentiable: Sequence[bool]) -> Strategy | None:
        """Return the strategy from the gradients of the differentiable results to those of the arguments.

        There is one where each device's results are its own part of the whole, so that no gradient counts twice: then a device
        has the gradients of its pieces, and an argument that all devices have gets a summand from each.
        """
        results = [each for each, wanted in zip(self.results, differentiable, strict=True) if wanted]
        own = all(each.kind == "shard" or each == partial() for each in results) and not self.even
        if not own and not self.trivial:
            return None
        seeds = tuple(each if each.kind == "shard" else REPLICATE for each in results)
        return Strategy(seeds, self.arguments if self.trivial else tuple(map(_of_gradient, self.arguments)), self.size)

    def __str__(self) -> str:
        sides = [", ".join(map(str, side)) or "nothing" for side in (self.arguments, self.results)]
        return " -> ".join(sides) + (" (even pieces)" if self.even else "")


def _of_gradient(placement: Placement) -> Placement:
    return {"shard": placement, "partial": REPLICATE, "replicate": partial()}[placement.kind]


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """The strategies of calls of one form, and the reason for which each other size is not offered."""

    strategies: tuple[Strategy, ...]
    refused: tuple[tuple[str, str], ...] = ()


def replicated(arguments: int, results: int) -> Strategy:
    """Return the strategy that always holds: everything is replicated."""
    return Strategy((REPLICATE,) * arguments, (REPLICATE,) * results)
