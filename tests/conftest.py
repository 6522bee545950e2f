"""What every test shares: GPU tests are skipped, with the reason, where there is no GPU; child processes find opkit.

``--budget SECONDS`` is for slow machines: the first case of every test function is run before further ones, and what has not
begun when the time is spent is skipped, with the reason.
"""

import importlib.metadata
import os
import time
import tomllib
from pathlib import Path

import pytest
import torch

import opkit

_STARTED = time.monotonic()


def pytest_addoption(parser):
    text = "run the first case of every test function first, and skip what has not begun after so many seconds"
    parser.addoption("--budget", type=float, metavar="SECONDS", help=text)


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        skip_those_for_gpus(items)
    if config.getoption("budget") is not None:
        items[:] = first_cases_first(items)


def skip_those_for_gpus(items):
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def first_cases_first(items):
    """The first case of each function, then all others; of cases that are run here, if there are some.

    Those on emulated GPUs, which take longest, come after those of the rest.
    """
    first = {}
    for item in sorted(items, key=lambda item: item.get_closest_marker("skip") is not None):
        first.setdefault(item.nodeid.partition("[")[0], item)

    def later(item):
        return first[item.nodeid.partition("[")[0]] is not item, "gpu" in item.path.parts

    return sorted(items, key=later)


def pytest_runtest_setup(item):
    budget = item.config.getoption("budget")
    if budget is not None and time.monotonic() - _STARTED > budget:
        pytest.skip(f"had not begun when {budget:.0f} seconds, the budget, were spent")


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
