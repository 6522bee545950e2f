"""Fixtures of the kernels for processors."""

import pytest
import torch

from opkit import _core


@pytest.fixture(params=_core.isas())
def isa(request, monkeypatch):
    """Each instruction set that runs here, the widest that the kernels of a test may use."""
    monkeypatch.setenv("OPKIT_ISA", request.param)
    return request.param


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
