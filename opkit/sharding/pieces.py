"""Run a function on pieces in one process, and put the results together: what DTensor's devices would do.

The numbers decide where no table knows a step of the reference, and ``opkit.check`` tests every rule with them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from opkit.sharding.propagation import Refused
from opkit.sharding.strategies import REPLICATE, Placement, partial, shard

if TYPE_CHECKING:
    from opkit.sharding.trace import Trace

Cut = Callable[[int], list[int]]

_SHARES = ((2, 3), (3, 3, 1), (1, 1, 1, 1))
_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


def split(tensor: torch.Tensor, placement: Placement, cut: Cut, generator: Any = None) -> list[torch.Tensor]:
    """Return what each device holds of a tensor.

    Args:
        tensor: the whole.
        placement: how it lies.
        cut: returns the sizes of the pieces for a size.
        generator: draws the summands of partial tensors.
    """
    if placement.kind == "shard":
        return [piece.clone() for piece in tensor.split(cut(tensor.shape[placement.dim]), placement.dim)]
    devices = len(cut(0))
    if placement.kind == "replicate":
        return [tensor.clone() for _ in range(devices)]
    drawn = [torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for _ in range(devices - 1)]
    parts = [part.to(tensor.device, tensor.dtype) for part in drawn]
    return [tensor - sum(parts, torch.zeros_like(tensor)), *parts]


def join(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """Return the whole tensor from what each device holds."""
    if placement.kind == "shard":
        return torch.cat(list(parts), placement.dim)
    if placement.kind == "replicate":
        return parts[0]
    stacked = torch.stack(list(parts))
    return _REDUCE[placement.reduction](stacked).to(parts[0].dtype)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a value with other tensors in place of its own."""
    given = iter(tensors)
    return pytree.tree_map_only(torch.Tensor, lambda _: next(given), value)


class Pieces:
    """Tests of one reference on small arguments of random numbers."""

    def __init__(
        self, traced: Trace, reference: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self.traced, self.reference = traced, reference
        self.call = (tuple(args), kwargs)

    def results(self, symbols: frozenset[Any], arguments: Sequence[Placement]) -> tuple[Placement, ...]:
        """Return the placements of the results with which all runs on pieces agree.

        Raises:
            Refused: there are none, or the reference does not run on small tensors of random numbers.
        """
        if not self.traced.general:
            raise Refused("the reference decides by the number of a size, so that small pieces prove nothing")
        candidates = [self._candidates(node, symbols) for node in self.traced.outputs]
        for shares, seed in itertools.product(_SHARES, range(2)):
            try:
                whole, parts = self._run(symbols, arguments, shares, seed)
            except Exception as error:
                raise Refused(f"the reference does not run on small pieces: {type(error).__name__}") from error
            candidates = [
                [p for p in offered if _agrees(results, p, result)]
                for offered, result, results in zip(candidates, whole, zip(*parts, strict=True), strict=True)
            ]
        if not all(candidates):
            raise Refused("the reference gives other numbers on pieces")
        return tuple(offered[0] for offered in candidates)

    def _candidates(self, node: Any, symbols: frozenset[Any]) -> list[Placement]:
        shape = self.traced.shape(node.meta["val"])
        dims = [dim for dim, size in enumerate(shape) if symbols & size.free_symbols]
        if dims:
            return [shard(dim) for dim in dims if shape[dim] in symbols and len(dims) == 1]
        return [REPLICATE, partial("sum"), partial("max"), partial("min")]

    def _run(
        self, symbols: frozenset[Any], arguments: Sequence[Placement], shares: Sequence[int], seed: int
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        generator = torch.Generator().manual_seed(seed)
        tensors = list(self._tensors(symbols, sum(shares), generator))
        split_up = [
            split(t, p, lambda size: [size * share // sum(shares) for share in shares], generator)
            for t, p in zip(tensors, arguments, strict=True)
        ]
        whole = self._outcome(tensors)
        return whole, [self._outcome(list(parts)) for parts in zip(*split_up, strict=True)]

    def _outcome(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = with_tensors(self.call, tensors)
        return tensors_in(self.reference(*args, **kwargs))

    def _tensors(self, symbols: frozenset[Any], size: int, generator: Any) -> Iterator[torch.Tensor]:
        """Yield small arguments: the sharded size is ``size``, others are small and different."""
        shapes = [self.traced.shape(node.meta["val"]) for node in self.traced.inputs]
        others = list(dict.fromkeys(s for shape in shapes for e in shape for s in e.free_symbols if s not in symbols))
        values = {s: 2 * (len(others) - i) + 1 for i, s in enumerate(others)} | dict.fromkeys(
            symbols, size
        )  # kernels last, and smaller
        for node in self.traced.inputs:
            value = node.meta["val"]
            shape = [int(e.subs(values)) for e in self.traced.shape(value)]
            yield _random(shape, value.dtype, generator)


def _random(shape: Sequence[int], dtype: torch.dtype, generator: Any) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)  # valid as indices of any size but 0 and 1


def _agrees(parts: Sequence[torch.Tensor], placement: Placement, whole: torch.Tensor) -> bool:
    if placement == REPLICATE:
        return all(torch.equal(part, whole) for part in parts)
    joined = join(parts, placement)
    return joined.shape == whole.shape and torch.allclose(joined, whole, rtol=1e-9, atol=1e-9, equal_nan=True)
