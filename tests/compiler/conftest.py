"""Fixtures of the compiler's tests."""

import contextlib
import itertools

import pytest
import torch

import opkit
from opkit import config
from opkit.compiler import backend

_count = itertools.count()


@pytest.fixture
def name():
    """A qualified operator name that no other test has."""
    name = f"compiled::op{next(_count)}"
    yield name
    with contextlib.suppress(opkit.errors.UnknownOperatorError):
        opkit.remove(name)


@pytest.fixture
def fresh():
    """No compiled code of another test's in this process; what is stored, the tests of this run share."""
    torch._dynamo.reset()
    config.get.cache_clear()
    yield
    config.get.cache_clear()


@pytest.fixture
def cache(tmp_path, settings):
    """No compiled code of another test's, and a cache of this test's own: its folder."""
    torch._dynamo.reset()
    settings(cache_dir=tmp_path)
    return tmp_path


@pytest.fixture
def seen():
    """The graphs that the backend compiles during a test."""
    found = []
    token = backend.observer.set(found.append)
    yield found
    backend.observer.reset(token)
