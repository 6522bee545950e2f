"""Attention within torch.distributed's context parallelism, where each rank has a part of the keys."""

import contextlib

import pytest
import torch
from attention_inputs import randn

import opkit
from opkit.errors import ArgumentError


@contextlib.contextmanager
def context_parallelism():
    """As ``context_parallel`` has it, without ranks."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    torchs._enable_cp_dtensor_dispatcher()
    try:
        yield
    finally:
        torchs._disable_cp_dtensor_dispatcher()


def test_refused_eagerly_and_compiled():
    q = randn(1, 2, 4, 8)
    compiled = torch.compile(lambda q: opkit.attention(q, q, q), backend="eager")
    want = compiled(q)
    with context_parallelism():
        for call in (compiled, lambda q: opkit.attention(q, q, q)):
            with pytest.raises(ArgumentError, match=r"context parallelism is on.*scaled_dot_product_attention"):
                call(q)
    torch.testing.assert_close(opkit.attention(q, q, q), want)
    torch.testing.assert_close(compiled(q), want)
