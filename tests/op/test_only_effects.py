"""Operators that only have effects: they need no fake, and run at every run of a compiled program, in order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opkit

log: list[tuple[str, float | None]] = []


def by_value(x: Tensor, tag: str) -> None:
    log.append((tag, float(x.sum())))


def by_size(x: Tensor, tag: str) -> None:
    log.append((tag, float(x.numel())))


@pytest.mark.sweep
@pytest.mark.parametrize("inline", [None, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("function", [by_value, by_size], ids=["opaque", "torch"])
def test_effects_happen_at_every_run_and_in_order(
    name: str, function: Callable[..., None], backend: str, inline: bool | None
) -> None:
    op = opkit.custom_op(name, function, mutates_args=(), inline=inline)

    def program(x: Tensor) -> Tensor:
        op(x, "first")
        y = x * 2
        op(y, "second")
        return y

    compiled = torch.compile(program, fullgraph=True, backend=backend)
    log.clear()
    program(torch.ones(3))
    expected = list(log)
    compiled(torch.ones(3))
    for _ in range(2):
        log.clear()
        compiled(torch.ones(3))
        assert log == expected
