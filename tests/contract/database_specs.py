"""From a sample's tensors to specs: which sizes may be others, which of them must be equal, which numbers are allowed.

What a function allows is found by calling it: sizes that can be made larger, all of one value together, or those of one dimension
alone, get a name; an index that may be as large as a size is bounded by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from opkit.contract.calls.cases import TensorCase
from opkit.testing import tensor

Place = tuple[int, int]  # number of a tensor among the arguments, and of a dimension counted from its last: -1, -2, ...
_NAMES = [*"abcdefghjkmnpqrstuvwxyz"]
_ENOUGH = 4  # so many elements tell something of what numbers are allowed


class Plan:
    """Names of sizes, and bounds, of the arguments of one function."""

    def __init__(self, function: Callable[..., Any], plain: Sequence[Any], info: Any, fixed: bool = False) -> None:
        self.function, self.plain, self.info = function, plain, info
        self.groups: list[frozenset[Place]] = []
        for group in () if fixed else self._candidates():
            self._name(group)
        self.bounds = {at: self._bounds(at, value) for at, value in self._tensors()}

    def specs(self, dtypes: tuple[torch.dtype, ...]) -> tuple[Any, ...]:
        """An entry of ``args`` for each argument."""
        return tuple(self._spec(at, dtypes) if isinstance(v, torch.Tensor) else v for at, v in enumerate(self.plain))

    def _tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        return ((at, value) for at, value in enumerate(self.plain) if isinstance(value, torch.Tensor))

    def _candidates(self) -> Iterator[frozenset[Place]]:
        """Sizes that may belong together: all of one value, and of these the ones of one dimension, and pairs."""
        places = {(at, dim): value.shape[dim] for at, value in self._tensors() for dim in range(-value.dim(), 0)}
        for size in dict.fromkeys(size for size in places.values() if size > 1):
            same = [place for place, each in places.items() if each == size]
            yield frozenset(same)
            for _, group in itertools.groupby(sorted(same, key=lambda p: p[1]), key=lambda p: p[1]):
                yield frozenset(group)
            yield from map(frozenset, itertools.combinations(same, 2))
            yield from (frozenset({place}) for place in same)

    def _name(self, group: frozenset[Place]) -> None:
        """Give the group a name of its own if it can vary by itself."""
        if group in self.groups or not all(self._accepts(dict.fromkeys(group, more)) for more in (1, 5)):
            return
        rest = [other - group for other in self.groups]
        self.groups = [other for other in rest if other] + [group]

    def _accepts(self, more: dict[Place, int], indices: dict[int, int] | None = None) -> bool:
        made = []
        for at, value in enumerate(self.plain):
            if isinstance(value, torch.Tensor):
                shape = tuple(size + more.get((at, dim - value.dim()), 0) for dim, size in enumerate(value.shape))
                low, high = numbers_of(value, self.info)
                low = high = (indices or {}).get(at, low) if is_index(value, self.info) else None
                value = (
                    TensorCase(shape, value.dtype, low=low, high=high).make()
                    if low is not None
                    else _like(value, shape)
                )
            made.append(value)
        try:
            self.function(*made)
        except Exception:
            return False
        return True

    def _bounds(self, at: int, value: torch.Tensor) -> tuple[Any, Any]:
        if not is_index(value, self.info):
            return numbers_of(value, self.info)
        most = int(value.max())
        for number, group in enumerate(self.groups):
            size = self._size(group)
            if size > most and self._accepts(dict.fromkeys(group, size), {at: 2 * size - 1}):
                return 0, f"{_NAMES[number]}-1"
        return numbers_of(value, self.info)

    def _size(self, group: frozenset[Place]) -> int:
        at, dim = next(iter(group))
        return self.plain[at].shape[dim]

    def _spec(self, at: int, dtypes: tuple[torch.dtype, ...]) -> Any:
        value = self.plain[at]
        listed = dtypes if value.dtype in dtypes else (value.dtype,)
        low, high = self.bounds[at]
        named = {place: _NAMES[number] for number, group in enumerate(self.groups) for place in group}
        shape = [named.get((at, dim - value.dim()), str(size)) for dim, size in enumerate(value.shape)]
        return tensor(" ".join(shape), listed, low=low, high=high)


def is_index(value: torch.Tensor, info: Any) -> bool:
    """Whether a tensor holds indices or counts beside the floating arguments of its function."""
    whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return whole and torch.float32 in info.dtypes and value.numel() > 0 and int(value.min()) >= 0


def numbers_of(value: torch.Tensor, info: Any) -> tuple[Any, Any]:
    """Bounds that the function's domain and the sample's own numbers suggest."""
    if value.dtype == torch.bool or value.is_complex() or not value.numel():
        return None, None
    least, most = value.min().item(), value.max().item()
    if not value.is_floating_point():
        return least if least >= 0 else None, most if is_index(value, info) else None
    low, high = getattr(info, "domain", (None, None))
    certain = value.numel() >= _ENOUGH and least > 0
    return (
        0.0 if most <= 1 else least
    ) if certain and low is None else low, 1.0 if certain and most <= 1 and high is None else high


def _like(value: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    """The sample's numbers in another shape."""
    shape = tuple(shape)
    if shape == tuple(value.shape) or not value.numel():
        return value.clone() if shape == tuple(value.shape) else value.new_zeros(shape)
    wanted = torch.Size(shape).numel()
    return value.reshape(-1).repeat(wanted // value.numel() + 1)[:wanted].reshape(shape)
