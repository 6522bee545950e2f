"""What every test shares: GPU tests are skipped, with the reason, where there is no GPU; child processes find opkit."""

import os
from pathlib import Path

import pytest
import torch

import opkit


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def child_environment():
    """The environment for a child process that must import the opkit under test, installed or not."""
    paths = [str(Path(opkit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
