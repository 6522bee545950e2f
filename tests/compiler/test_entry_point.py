"""Where opkit is installed, its backend has a name: torch finds it with no import of opkit."""

import importlib.metadata

import fresh_process
import pytest

_INSTALLED = any(point.name == "opkit" for point in importlib.metadata.entry_points(group="torch_dynamo_backends"))

_PROGRAM = """
import sys
import torch

assert "opkit" not in sys.modules
compiled = torch.compile(lambda x: torch.softmax(x, -1) * 2, backend="opkit", options={"strict": True})
x = torch.randn(8, 100)
torch.testing.assert_close(compiled(x), torch.softmax(x, -1) * 2)
assert "opkit" in sys.modules
"""


@pytest.mark.skipif(not _INSTALLED, reason="opkit runs from its sources, and is not installed")
def test_the_backend_is_found_by_name(tmp_path):
    fresh_process.run(["-c", _PROGRAM], cwd=tmp_path)
