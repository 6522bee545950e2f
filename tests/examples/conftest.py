"""The process in which Triton interprets the kernels of the examples."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from opkit.testing import Interpreter


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreter]:
    """One process for all the kernels: token_kernels.py imports row_kernels.py."""
    with Interpreter("token_kernels", Path(__file__).parent / "token_kernels.py") as run:
        yield run


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Give torch its threads back, whose number examples set: compiled functions depend on it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
