"""A GPU that is none: Triton kernels registered for the CPU, compiled by a stub, and launched through the fake driver."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import opkit
from opkit import config
from opkit.kernels.triton import compiling, layout
from opkit.op.triton import machine

_HERE = Path(__file__).parent


def _imported(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fixtures = _imported("opkit_fake_driver_fixtures", _HERE.parents[1] / "kernels" / "conftest.py")
fake_libraries, fake = _fixtures.fake_libraries, _fixtures.fake

MODEL = "a GPU that is none"
_count = itertools.count()


@dataclasses.dataclass
class Device:
    """The CPU as a GPU: what was launched on it, and what was to be compiled for it."""

    fake: Any
    requests: list[compiling.Request] = dataclasses.field(default_factory=list)
    shared: int = 0
    defined: list[str] = dataclasses.field(default_factory=list)

    def build(self, request: compiling.Request) -> compiling.Binary:
        self.requests.append(request)
        params = layout.params(request.signature, (), request.offsets)
        name = " ".join([request.function.fn.__name__, *(str(param.size) for param in params)])
        return compiling.Binary(
            b"image\0", "cubin", name, 128, self.shared, (1, 1, 1), False, False, 0, 1, 0, 1, params, (), request.target
        )

    def define(self, reference: Callable[..., Any], kernel: Any, name: str = "", **options: Any) -> Any:
        """An operator of ``reference``, with a kernel."""
        chosen = name or f"triton_launching::op{next(_count)}"
        op = opkit.custom_op(chosen, reference, **options)
        self.defined.append(chosen)
        op.register_kernel("cpu", kernel)
        return op

    @property
    def launches(self) -> Sequence[Sequence[str]]:
        """Function, kernel, grid, block, shared, stream, attributes, parameters."""
        return self.fake.launches

    @property
    def grids(self) -> list[str]:
        return [row[2] for row in self.launches]


@pytest.fixture
def device(fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Device]:
    made = Device(fake)
    here = machine.Machine("cpu", lambda: fake.driver, lambda _: "sm_90", lambda _: MODEL, lambda _: 232448)
    monkeypatch.setitem(machine.MACHINES, "cpu", here)
    monkeypatch.setattr(compiling, "build", made.build)
    monkeypatch.setattr(config, "get", lambda: config.Config(cache_dir=tmp_path, bridge=False))
    yield made
    for name in made.defined:
        if name in {op.name for op in opkit.operators()}:
            opkit.remove(name)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Captures programs; torch finds a target to analyse Triton kernels for."""
    import triton

    module = _imported("opkit_captured_programs", _HERE / "captured.py")
    monkeypatch.setattr(triton.runtime.driver, "_active", module.Target())
    return module.Captured()
