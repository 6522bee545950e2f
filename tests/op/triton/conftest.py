"""A machine of Triton kernels without a GPU: CPU tensors, the fake driver, and a compiler that notes what it is asked."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import opkit
from opkit.kernels.triton import binaries, compiling
from opkit.kernels.triton.binaries import Binary
from opkit.op.triton import variants

_HERE = Path(__file__).parent
_FORMATS = {"fp32": "f", "fp64": "d", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "i1": "?", "ptr": "Q"}


def _imported(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fixtures = _imported("opkit_fake_driver_fixtures", _HERE.parents[1] / "kernels" / "conftest.py")
fake_libraries = _fixtures.fake_libraries
fake = _fixtures.fake


MODEL = "a GPU that is none"
_count = itertools.count()


class Launched(NamedTuple):
    """One launch: what was compiled for it, and the values of its parameters by name."""

    request: compiling.CompileRequest
    grid: tuple[int, ...]
    values: dict[str, Any]


class Machine:
    """What was compiled and launched on CPU tensors as if these lay on a GPU."""

    def __init__(self, fake: Any) -> None:
        self.fake = fake
        self.requests: list[compiling.CompileRequest] = []
        self.binaries: list[Binary] = []

    def build(self, request: compiling.CompileRequest) -> Binary:
        """In place of the compiler: a kernel of the name "k<number>" and its parameters' sizes."""
        compiling._check(request)
        params = binaries.params(request.signature, (), request.offsets)
        name = " ".join([f"k{len(self.requests)}", *(str(param.size) for param in params)])
        self.requests.append(request)
        self.binaries.append(
            Binary(b"image", "cubin", name, 128, 0, (1, 1, 1), False, False, 0, 1, 0, 1, params, (), request.target)
        )
        return self.binaries[-1]

    @property
    def launches(self) -> list[Launched]:
        """All of them, in order."""
        return [self._launched(row) for row in self.fake.launches]

    def _launched(self, row: list[str]) -> Launched:
        number = int(row[1].split(" ")[0][1:])
        packed = [bytes.fromhex(word) for word in row[-1].split(" ")]
        params = self.binaries[number].params
        values = {
            p.name or p.kind: struct.unpack("<" + _FORMATS.get(p.kind, f"{len(b)}s"), b)[0]
            for p, b in zip(params, packed, strict=True)
        }
        return Launched(self.requests[number], tuple(json.loads(f"[{row[2]}]")), values)


@pytest.fixture
def on_cpu(fake, monkeypatch) -> Machine:
    """Triton kernels may be registered for "cpu", and run through the dispatcher and the launcher up to the driver."""
    made = Machine(fake)
    here = variants.Machine("cpu", lambda: fake.driver, lambda _: "sm_90", lambda _: "fake", lambda _: 232448)
    monkeypatch.setitem(variants.MACHINES, "cpu", here)
    monkeypatch.setattr(compiling, "build", made.build)
    return made


@pytest.fixture
def op(settings, tmp_path) -> Iterator[Callable[..., Any]]:
    """Makes operators of functions, named as these are; they are removed afterwards. Tuning results are kept apart."""
    settings(cache_dir=tmp_path)
    names: list[str] = []

    def make(function: Any, **options: Any) -> Any:
        names.append(f"triton_probed::{function.__name__}")
        return opkit.custom_op(names[-1], function, **{"mutates_args": (), **options})

    yield make
    for name in names:
        opkit.remove(name)


@dataclasses.dataclass
class Device:
    """The CPU as a GPU: what was launched on it, and what was to be compiled for it."""

    fake: Any
    requests: list[compiling.CompileRequest] = dataclasses.field(default_factory=list)
    shared: int = 0
    defined: list[str] = dataclasses.field(default_factory=list)

    def build(self, request: compiling.CompileRequest) -> compiling.Binary:
        self.requests.append(request)
        params = binaries.params(request.signature, (), request.offsets)
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
def device(fake: Any, monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path) -> Iterator[Device]:
    made = Device(fake)
    here = variants.Machine("cpu", lambda: fake.driver, lambda _: "sm_90", lambda _: MODEL, lambda _: 232448)
    monkeypatch.setitem(variants.MACHINES, "cpu", here)
    monkeypatch.setattr(compiling, "build", made.build)
    settings(cache_dir=tmp_path, bridge=0)
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
