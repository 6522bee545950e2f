"""Fixtures of the operator tests."""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import opkit

_count = itertools.count()


@pytest.fixture(params=[torch.library.custom_op, opkit.custom_op], ids=["torch", "opkit"])
def custom_op(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Both decorators: what a test asserts holds for torch's (since 2.13) and for opkit's."""
    if request.param is torch.library.custom_op and not hasattr(torch.Tag, "inplace"):
        pytest.skip("what these tests hold torch's own decorator to came with torch 2.13")
    return request.param


@pytest.fixture
def name() -> str:
    """A qualified operator name that no other test has."""
    return f"drop_in::op{next(_count)}"


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget compiled programs afterwards, so that no test runs into the limit of recompilations."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def shifted(custom_op: Any, name: str) -> Any:
    """An operator of a tensor and a number whose body leaves torch."""

    @custom_op(name, mutates_args=())
    def shifted(x: Tensor, y: float) -> Tensor:
        return torch.from_numpy(x.cpu().numpy() + y).to(x.device)

    return shifted


@pytest.fixture
def sine(custom_op: Any, name: str) -> Any:
    """An operator of one tensor whose body leaves torch."""

    @custom_op(name, mutates_args=())
    def sine(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.detach().cpu().numpy()))

    return sine


@pytest.fixture
def product(custom_op: Any, name: str) -> Any:
    """An operator of two tensors whose body stays in torch."""

    @custom_op(name, mutates_args=())
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    return product
