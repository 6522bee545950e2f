"""This module holds every private torch name that the benchmarks use. Read in torch 2.13 and 2.14."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters as _counters


def reset() -> None:
    """Drop everything that Dynamo compiled, and its counters."""
    torch.compiler.reset()
    _counters.clear()


def graph_breaks() -> list[str]:
    """Return the first line of the reason of each graph break since the counters were cleared."""
    return [str(reason).strip().splitlines()[0] for reason in _counters["graph_break"]]


def captured_graphs() -> int:
    """Return how many graphs Dynamo captured since the counters were cleared."""
    return int(_counters["stats"]["unique_graphs"])
