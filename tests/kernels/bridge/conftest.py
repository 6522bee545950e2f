"""The bridge built against the running torch, C kernels to test it with, and operators that have them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from torch import Tensor

import opkit
from opkit import config
from opkit.kernels import bridge
from opkit.op.torch_private import torch_paths

FIXTURE = Path(__file__).with_name("fixture.c")
INCLUDE = Path(bridge.__file__).parents[1] / "include"


class Native:
    """The C fixture, the bridge, and what is installed through it."""

    def __init__(self, kernels: Path, path: Path) -> None:
        self.library = ctypes.CDLL(str(kernels))
        self.library.calls.restype = ctypes.c_int64
        self.bridge = bridge.Bridge(path, self.address("runtime"))
        self.installed: list[bridge.Installed] = []

    def address(self, symbol: str) -> int:
        return ctypes.addressof(ctypes.c_char.in_dll(self.library, symbol))

    def install(self, op: Any, kernel: str, device: str = "cpu") -> bridge.Installed:
        name = op if isinstance(op, str) else op.name
        self.installed.append(self.bridge.install(name, "", device, self.address(f"{kernel}_kernel")))
        return self.installed[-1]

    def calls(self, function: Callable[[], Any]) -> tuple[Any, int]:
        """What ``function`` returns, and how many calls ran in C meanwhile."""
        before = self.library.calls()
        return function(), self.library.calls() - before

    def in_c(self, function: Callable[[], Any]) -> bool:
        """Whether the one call that ``function`` makes ran in C."""
        return self.calls(function)[1] == 1


@pytest.fixture(scope="session")
def built() -> tuple[Path, Path]:
    """The libraries: kernels and bridge. The processes of a run of tests build them once, in the cache that they share."""
    cache, paths = Path(os.environ["OPKIT_CACHE_DIR"]), torch_paths()
    folder = cache / "bridge_of_tests"
    folder.mkdir(exist_ok=True)
    settings = config.Settings(cache_dir=cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "get", lambda: settings)
        path = bridge.build(paths)
        loaded = bridge.load(paths, 0)
        assert loaded is not None
        assert torch.__version__.startswith(loaded.torch_version)
    kernels, made = folder / "fixture.so", folder / "fixture.made"
    command = ["gcc", "-std=c11", "-O1", "-fPIC", "-shared", f"-I{INCLUDE}", str(FIXTURE)]
    command += ["-o", str(made), f"-L{paths.library_dir}", "-ltorch_cpu"]
    with filelock.FileLock(folder / "lock"):
        if not kernels.exists():
            subprocess.run(command, check=True)
            made.rename(kernels)
    return kernels, path


@pytest.fixture
def define() -> Iterator[Callable[..., Any]]:
    """Define an operator with a Python kernel; it is removed afterwards."""
    made: list[Any] = []

    def define(name: str, function: Callable[..., Any], **options: Any) -> Any:
        made.append(opkit.custom_op(f"bridge_test::{name}", **({"mutates_args": ()} | options))(function))
        made[-1].register_kernel("cpu", function, name="python")
        return made[-1]

    yield define
    for op in made:
        opkit.remove(op.name)


@pytest.fixture(scope="session")
def library() -> Callable[[str], torch.library.Library]:
    """A library of torch's own. It is kept: torch 2.11 compiles nothing once an operator it has seen is gone."""
    kept: list[torch.library.Library] = []

    def library(namespace: str) -> torch.library.Library:
        kept.append(torch.library.Library(namespace, "DEF"))
        return kept[-1]

    return library


@pytest.fixture
def native(built, define) -> Iterator[Native]:  # define: operators go after what is installed on them
    native = Native(*built)
    yield native
    for installed in native.installed:
        installed.remove()


@pytest.fixture
def plus_one(native, define) -> types.SimpleNamespace:
    def plus_one(x: Tensor) -> Tensor:
        return x + 1

    op = define("plus_one", plus_one)
    return types.SimpleNamespace(op=op, call=op._opoverload, installed=native.install(op, "plus_one"))


@pytest.fixture
def add_one_(native, define) -> Any:
    def add_one(x: Tensor) -> None:
        x.add_(1)

    op = define("add_one", add_one, mutates_args=("x",))
    native.install(op, "void")
    return op._opoverload
