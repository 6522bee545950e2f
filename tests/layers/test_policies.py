"""Policies by themselves, and ``opkit.offload`` without a GPU."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch

import opkit
from opkit.layers import offloading


def test_nothing_is_moved_without_a_gpu(caplog):
    offloading._remark.cache_clear()
    with caplog.at_level(logging.WARNING, "opkit.layers"):
        for _ in range(2):
            opkit.checkpoint(torch.sin, opkit.offload())(torch.ones(3, requires_grad=True)).sum().backward()
    assert [each.message for each in caplog.records] == [
        "opkit.offload: the tensors are not on a GPU, so nothing is moved to host memory."
    ]


def test_offload_without_a_gpu_keeps_what_torch_keeps():
    memory = []

    def grows(x):
        y = x.exp()
        memory.append(weakref.ref(y.untyped_storage()))
        return y, y.sin()

    x = torch.ones(3, requires_grad=True)
    y, result = opkit.checkpoint(grows, opkit.offload())(x)
    y.mul_(2)
    with pytest.raises(opkit.errors.CheckpointError, match="written to since"):
        result.sum().backward()
    del y, result
    y, result = opkit.checkpoint(grows, opkit.offload())(x)
    del y, result  # without a backward
    assert [each() for each in memory] == [None, None]


def test_bad_policies():
    with pytest.raises(opkit.errors.ArgumentError, match=r"no policy 'save'; expected 'save_all', .*opkit.keep"):
        opkit.checkpoint(torch.sin, "save")
    with pytest.raises(opkit.errors.ArgumentError, match=r"opkit.keep: expected the names of values"):
        opkit.keep()
    assert str(opkit.offload(opkit.keep("a", "b"))) == "offload(keep('a', 'b'))"
    assert str(opkit.offload("recompute_all")) == "offload('recompute_all')"
