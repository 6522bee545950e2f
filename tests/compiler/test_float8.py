"""Graphs with float8 tensors: kernels move them, torch computes with them, and the rest of the graph is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opkit

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantised_weight_and_quantised_results(dtype: torch.dtype) -> None:
    def function(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2 + 1) @ (weight.t().to(torch.float32) * scale)
        narrow = (y.relu() / 4).to(dtype)
        return narrow, narrow.view(2, -1), narrow.t().clone(), narrow.to(torch.float32) + 1

    torch.manual_seed(0)
    given = torch.randn(4, 8), torch.randn(6, 8).to(dtype), torch.tensor(0.5)
    found = torch.compile(function, backend="opkit", fullgraph=True, options={"strict": True})(*given)
    for each, expected in zip(found, function(*given), strict=True):
        torch.testing.assert_close(each.float(), expected.float(), rtol=1e-5, atol=1e-5)
        assert (each.dtype, each.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_that_is_written_to(dtype: torch.dtype) -> None:
    def function(buffer: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        buffer.copy_(x.to(dtype))
        return buffer.view(torch.uint8) + 1, torch.cat([buffer, buffer]).float()

    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    buffers = [torch.zeros(3, 5).to(dtype) for _ in range(2)]
    compiled = torch.compile(function, backend="opkit", fullgraph=True, options={"strict": True})
    for found, expected in zip(compiled(buffers[0], x), function(buffers[1], x), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(*(each.float() for each in buffers))


def test_pages_of_a_cache() -> None:
    def step(q: Tensor, k: Tensor, pages: Tensor, scales: Tensor, table: Tensor, before: Tensor) -> Tensor:
        opkit.append_kv(k * 2, k * 2, pages, pages, table, before, k_scale=scales, v_scale=scales)
        return opkit.paged_attention(q, pages, pages, table, before + 1, k_scale=scales, v_scale=scales)

    torch.manual_seed(0)
    q, k, table, before = (
        torch.randn(2, 4, 8),
        torch.randn(2, 2, 8),
        torch.tensor([[3, 1], [0, 2]]),
        torch.tensor([5, 2]),
    )
    caches = [(torch.ones(4, 4, 2, 8).to(torch.float8_e4m3fn), torch.ones(4, 4, 2)) for _ in range(2)]
    compiled = torch.compile(step, backend="opkit", fullgraph=True, options={"strict": True})
    torch.testing.assert_close(compiled(q, k, *caches[0], table, before), step(q, k, *caches[1], table, before))
    for found, expected in zip(*caches, strict=True):
        torch.testing.assert_close(found.float(), expected.float())
