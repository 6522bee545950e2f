"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import opkit

NAMES = ["opkit", *(found.name for found in pkgutil.walk_packages(opkit.__path__, "opkit."))]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("opkit.__main__", "opkit._core")])
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, "the failing example is printed above"
