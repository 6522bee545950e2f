"""The process in which Triton interprets the kernels of the examples."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from opkit.testing import Interpreter


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreter]:
    """One process for all the kernels: token_kernels.py imports row_kernels.py."""
    with Interpreter("token_kernels", Path(__file__).parent / "token_kernels.py") as run:
        yield run
