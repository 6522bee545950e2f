"""This module holds every private torch name that the benchmarks use. Read in torch 2.13 and 2.14."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters as _counters


def reset() -> None:
    """Drop everything that Dynamo compiled, and its counters."""
    torch.compiler.reset()
    _counters.clear()


def graph_breaks() -> list[str]:
    """Return the reason of each graph break since the counters were cleared: its first line, and what Dynamo says of the code."""
    return [_short(str(reason).strip().splitlines()) for reason in _counters["graph_break"]]


def captured_graphs() -> int:
    """Return how many graphs Dynamo captured since the counters were cleared."""
    return int(_counters["stats"]["unique_graphs"])


_CONTEXT = "Developer debug context:"


def _short(lines: list[str]) -> str:
    context = next((line.strip().removeprefix(_CONTEXT).strip() for line in lines if _CONTEXT in line), "")
    return f"{lines[0]} ({context})" if context else lines[0]
