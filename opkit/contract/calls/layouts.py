"""This module has tables of memory layouts: functions from sizes to strides, and variants of incoming gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

_MIN_DIMS = {"transposed": 2, "reversed": 2, "padded": 2, "channels_last": 4, "overlapping": 2}


@dataclasses.dataclass(frozen=True)
class MemoryLayout:
    """Strides and an offset, in elements, and the extent of memory that they need."""

    strides: tuple[int, ...]
    offset: int
    elements: int
    negated: bool = False


def _packed(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions are in ``order`` in memory, the slowest first."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _layout(shape: Sequence[int], strides: Sequence[int], offset: int = 0, negated: bool = False) -> MemoryLayout:
    empty = 0 in shape
    reach = 0 if empty else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return MemoryLayout(tuple(strides), offset, offset + reach, negated)


def _contiguous(shape: Sequence[int]) -> MemoryLayout:
    return _layout(shape, _packed(shape, range(len(shape))))


def _offset(shape: Sequence[int]) -> MemoryLayout:
    return _layout(shape, _packed(shape, range(len(shape))), offset=1)


def _transposed(shape: Sequence[int]) -> MemoryLayout:
    order = [*range(len(shape))]
    order[-2:] = reversed(order[-2:])
    return _layout(shape, _packed(shape, order))


def _reversed(shape: Sequence[int]) -> MemoryLayout:
    return _layout(shape, _packed(shape, range(len(shape))[::-1]))


def _strided(shape: Sequence[int]) -> MemoryLayout:
    return _layout(shape, [2 * stride for stride in _packed(shape, range(len(shape)))], offset=1)


def _padded(shape: Sequence[int]) -> MemoryLayout:
    wider = [*shape[:-1], shape[-1] + 3]
    return _layout(shape, _packed(wider, range(len(shape))), offset=2)


def _channels_last(shape: Sequence[int]) -> MemoryLayout:
    return _layout(shape, _packed(shape, [0, *range(2, len(shape)), 1]))


def _expanded(shape: Sequence[int]) -> MemoryLayout:
    rest = _packed((1, *shape[1:]), range(len(shape)))
    return _layout(shape, (0, *rest[1:]))


def _expanded_last(shape: Sequence[int]) -> MemoryLayout:
    rest = _packed((*shape[:-1], 1), range(len(shape)))
    return _layout(shape, (*rest[:-1], 0))


def _overlapping(shape: Sequence[int]) -> MemoryLayout:
    strides = list(_packed(shape, range(len(shape))))
    strides[-2] = 1
    return _layout(shape, strides)


def _negated(shape: Sequence[int]) -> MemoryLayout:
    return _layout(shape, _packed(shape, range(len(shape))), negated=True)


LAYOUTS: dict[str, Callable[[Sequence[int]], MemoryLayout]] = {
    "contiguous": _contiguous,
    "offset": _offset,
    "transposed": _transposed,
    "strided": _strided,
    "padded": _padded,
    "reversed": _reversed,
    "expanded": _expanded,
    "expanded_last": _expanded_last,
    "channels_last": _channels_last,
    "overlapping": _overlapping,
    "negated": _negated,
}
"""The layouts by name, the simplest first. ``negated`` is torch's lazy minus: the numbers in memory have the other sign."""

WRITABLE = ("contiguous", "offset", "transposed", "strided", "padded", "reversed", "channels_last")
"""Layouts in which no two elements share memory, so that a kernel may write to the tensor."""


def fits(name: str, shape: Sequence[int]) -> bool:
    """Return whether tensors of this shape can have the layout, and differ from a contiguous one then.

    >>> fits("transposed", (2, 3)), fits("transposed", (3,))
    (True, False)
    """
    return name in ("contiguous", "offset", "negated") or len(shape) >= _MIN_DIMS.get(name, 1)


def layout_of(name: str, shape: Sequence[int]) -> MemoryLayout:
    """Return the strides, offset and extent of a tensor of ``shape``; one of too few dimensions is contiguous.

    >>> layout_of("transposed", (2, 3)).strides
    (1, 2)
    """
    return LAYOUTS[name if fits(name, shape) else "contiguous"](shape)


# ---- incoming gradients ------------------------------------------------------------------------------------------------


def _incoming_expanded(g: torch.Tensor) -> torch.Tensor:
    return g.reshape(-1)[:1].reshape(()).expand(g.shape)


def _incoming_expanded_last(g: torch.Tensor) -> torch.Tensor:
    return g[..., :1].expand(g.shape)


def _incoming_transposed(g: torch.Tensor) -> torch.Tensor:
    order = [*range(g.dim())][::-1]
    return g.permute(order).contiguous().permute(order)


def _incoming_strided(g: torch.Tensor) -> torch.Tensor:
    return torch.stack([g, g + 1], -1).select(-1, 0)


def _incoming_offset(g: torch.Tensor) -> torch.Tensor:
    return torch.cat([g.new_ones(1), g.reshape(-1)])[1:].view(g.shape)


INCOMING: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "expanded from one number, as by sum().backward()": (0, _incoming_expanded),
    "expanded in the last dimension": (1, _incoming_expanded_last),
    "transposed": (2, _incoming_transposed),
    "strided": (0, _incoming_strided),
    "offset in its memory": (0, _incoming_offset),
}
"""Layouts of an incoming gradient: the smallest number of dimensions, and a function of a contiguous gradient."""
