"""What every test shares: GPU tests are skipped, with the reason, where there is no GPU; child processes find opkit."""

import importlib.metadata
import os
import tomllib
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
def child_environment(tmp_path_factory):
    """The environment for a child process that must import the opkit under test, installed or not."""
    paths = [str(Path(opkit.__file__).parents[1]), _entry_points(tmp_path_factory), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _entry_points(tmp_path_factory):
    """A folder by which torch finds the backend of an opkit that is not installed."""
    if importlib.metadata.entry_points(group="torch_dynamo_backends", name="opkit"):
        return ""
    project = tomllib.loads((Path(opkit.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = opkit.__version__
    folder = tmp_path_factory.mktemp("installed")
    made = folder / f"opkit-{version}.dist-info"
    made.mkdir()
    made.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: opkit\nVersion: {version}\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["torch_dynamo_backends"].items()]
    made.joinpath("entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines, ""]))
    return str(folder)
