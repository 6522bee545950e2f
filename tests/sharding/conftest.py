"""Fixtures of the sharding tests: meshes of a fake process group, on which collectives move nothing."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import opkit

_count = itertools.count()


@pytest.fixture(scope="module")
def fake_group():
    """A process group of 512 ranks, of which this process is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=512)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(fake_group):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(4))


@pytest.fixture
def grid(fake_group):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(8).reshape(2, 4))


@pytest.fixture
def name():
    """A qualified operator name that no other test has; what opkit defines under it is removed afterwards."""
    name = f"sharded::op{next(_count)}"
    yield name
    with contextlib.suppress(opkit.errors.UnknownOperatorError):
        opkit.remove(name)
