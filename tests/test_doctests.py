"""The examples in docstrings run and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import opkit

ROOT = Path(opkit.__file__).parent
FILES = [path.relative_to(ROOT.parent).with_suffix("") for path in sorted(ROOT.rglob("*.py"))]
NAMES = [".".join(path.parts).removesuffix(".__init__") for path in FILES if path.name != "__main__"]


@pytest.mark.parametrize("name", NAMES)
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, "the failing example is printed above"
