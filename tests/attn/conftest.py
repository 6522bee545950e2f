"""Fixtures of the kernels for processors."""

import pytest
import torch

from opkit import _core, config
from opkit.attn.operator import attention_operator


@pytest.fixture(scope="module", autouse=True)
def _trusted_kernels_too():
    """The first calls of kernels that are trusted are compared with the reference all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPKIT_VERIFY", "all")
        config.get.cache_clear()
        yield
    config.get.cache_clear()


@pytest.fixture(params=_core.isas())
def isa(request, monkeypatch):
    """Each instruction set that runs here, the widest that the kernels of a test may use."""
    monkeypatch.setenv("OPKIT_ISA", request.param)
    return request.param


@pytest.fixture
def operator():
    """The operator of attention, whose kernels are afterwards those that they were."""
    op = attention_operator()
    before = list(op._operator.kernels.kernels)
    yield op
    op._operator.kernels.kernels = before
    op._renew()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
