"""How an incoming gradient may lie in memory: a table of layouts, each a function of a contiguous gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _expanded(g: torch.Tensor) -> torch.Tensor:
    return g.reshape(-1)[:1].reshape(()).expand(g.shape)


def _expanded_last(g: torch.Tensor) -> torch.Tensor:
    return g[..., :1].expand(g.shape)


def _reversed(g: torch.Tensor) -> torch.Tensor:
    order = [*range(g.dim())][::-1]
    return g.permute(order).contiguous().permute(order)


def _strided(g: torch.Tensor) -> torch.Tensor:
    return torch.stack([g, g + 1], -1).select(-1, 0)


def _offset(g: torch.Tensor) -> torch.Tensor:
    return torch.cat([g.new_ones(1), g.reshape(-1)])[1:].view(g.shape)


INCOMING: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "expanded from one number, as by sum().backward()": (0, _expanded),
    "expanded in the last dimension": (1, _expanded_last),
    "transposed": (2, _reversed),
    "strided": (0, _strided),
    "offset in its memory": (0, _offset),
}
"""Layouts of an incoming gradient, and the fewest dimensions that each needs."""
