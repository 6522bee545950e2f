"""Calls of operators whose programs may name functions by number."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from opkit.attn.functions.pending import Functions


def call(run: Callable[[], tuple[Tensor, Tensor]], functions: Functions | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of ``run``, which calls an operator once, with ``q`` first."""
    if not functions:  # as everywhere but where Dynamo traces
        return run()
    from opkit.attn.functions import dynamo  # which imports torch's higher-order operators

    return dynamo.call(run, functions, q.dtype, q.device)
