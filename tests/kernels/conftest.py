"""A GPU's driver without a GPU (fake_driver.c), and operators whose kernels are launched through it."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from opkit import _core
from opkit.op import torch_private as private

SOURCE = Path(__file__).with_name("fake_driver.c")
NAMESPACE = "opkit_launched"
_numbers = itertools.count()
_KINDS = {"Tensor": "tensor", "List[int]": "ints", "ScalarType": "dtype"}
_BYTES = {"ptr": 8, "scratch": 8, "profile_scratch": 8, "map": 128, "offset": 4, "total": 4, "const": 8}

Miss = Callable[[_core.Call], Any]


class Tensor(ctypes.Structure):
    """An ``opk_tensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
    )

    @classmethod
    def at(cls, address: int, sizes: Sequence[int] = (4,), device: int = -1, dtype: int = 6) -> Tensor:
        strides = row_major(sizes)
        array = ctypes.c_int64 * len(sizes)
        return cls(address, array(*sizes), array(*strides), len(sizes), dtype, device)


class _Parameter(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("source", ctypes.c_int32),
        ("argument", ctypes.c_int32),
        ("detail", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("constant", ctypes.c_int64),
    )


class _Instance(ctypes.Structure):
    _fields_ = (
        ("dtypes", ctypes.c_void_p),
        ("call", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p))),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int32),
        *((name, ctypes.c_char_p) for name in ("operator", "kernel", "schema")),
        *((name, ctypes.c_int32) for name in ("cuda", "arguments", "outputs", "parameter_count")),
        *((name, ctypes.c_int32) for name in ("sizes", "variables", "instances_count")),
        *((name, ctypes.c_void_p) for name in ("argument_rows", "output_rows")),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("size_names", ctypes.c_void_p),
        ("instances", ctypes.POINTER(_Instance)),
    )


def row_major(sizes: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return strides[: len(sizes)]


class Launched:
    """An operator with one kernel, whose calls a launcher runs."""

    def __init__(
        self, schema: str, rows: Sequence[tuple[Any, ...]], miss: Miss, cuda: bool = False, **facts: Any
    ) -> None:
        self.name = f"{schema.split('(')[0]}_{next(_numbers)}"
        self.schema = torch._C.parse_schema(f"{NAMESPACE}::{self.name}{schema[schema.index('(') :]}")
        self.missed: list[list[Any]] = []
        self._miss = miss
        ask: Any = weakref.WeakMethod(self.miss)  # a launcher lives as long as the process
        roles = [row[-1] for row in rows]
        self.launcher = _core.Launcher(f"t::{self.name}", "_k", roles, lambda call: ask()(call), cuda=cuda)
        self.library = _core.launch_kernel(self.description([row[:-1] for row in rows], cuda, facts), self.launcher)
        self.kernel = _Kernel.from_address(self.library.address)
        self._kept: list[Any] = []

    def miss(self, call: _core.Call) -> Any:
        self.missed.append(call.values)
        return self._miss(call)

    def description(self, rows: Sequence[tuple[Any, ...]], cuda: bool, facts: dict[str, Any]) -> dict[str, Any]:
        names = [argument.name for argument in self.schema.arguments]
        names += [f"out{i}" if i else "out" for i in range(len(self.schema.returns))]
        padded = [(source, *rest, 0, -1, None)[:5] if len(rest) < 4 else (source, *rest) for source, *rest in rows]
        return {
            "operator": f"t::{self.name}",
            "kernel": "_k",
            "schema": str(self.schema),
            "cuda": cuda,
            "arguments": [argument_row(a, facts.get("shapes", {}).get(a.name)) for a in self.schema.arguments],
            "outputs": [{"name": name, "alias": None} for name in names[len(self.schema.arguments) :]],
            "size_names": facts.get("size_names", []),
            "sources": [(s, names.index(a) if isinstance(a, str) else a, *rest) for s, a, *rest in padded],
        }

    def register(self) -> Launched:
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        key = "CUDA" if self.kernel.cuda else "CPU"
        head, _, returns = str(self.schema).removeprefix(f"{NAMESPACE}::").rpartition(" -> ")
        library.define(f"{head[:-1]}, *, int[]? opk_layout=None) -> {returns}")
        self._kept = [library, self.library.register(f"{NAMESPACE}::{self.name}", key, True)]
        self._overload = private.hidden_operator(
            f"{NAMESPACE}::{self.name}"
        )  # here: threads that look it up list it twice
        return self

    def __call__(self, *args: Any, layout: Sequence[int] | None = None) -> Any:
        """Outputs are like the first tensor, unless a layout is given."""
        like = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if layout is None and like is not None:
            layout = [6, like.dim(), *like.shape, *row_major(like.shape)] * len(self.schema.returns)
        return self._overload(*args, opk_layout=layout)

    def direct(self, *values: Tensor | int | float | None, stream: int | None = None) -> None:
        """Call the trampoline with these values of the sources, without torch."""
        words = [
            self.kernel.parameters[0].constant,
            *(word(v) for v in values),
            *([stream] if stream is not None else []),
        ]
        problem = ctypes.c_char_p()
        self.kernel.instances[0].call((ctypes.c_int64 * len(words))(*words), ctypes.byref(problem))
        if problem.value is not None:
            raise RuntimeError(problem.value.decode())


def word(value: Tensor | int | float | None) -> int:
    if isinstance(value, float):
        return ctypes.c_int64.from_buffer(ctypes.c_double(value)).value
    return ctypes.addressof(value) if isinstance(value, ctypes.Structure) else value or 0


def argument_row(argument: Any, shape: Any) -> dict[str, Any]:
    kind = str(argument.real_type)
    optional = kind.startswith("Optional[")
    kind = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
    written = argument.alias_info is not None and argument.alias_info.is_write
    kind = _KINDS.get(kind, kind)
    return {"name": argument.name, "kind": kind, "optional": optional, "written": written, "shape": shape}


class Fake:
    """The fake driver, what it noted, and kernels for it."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.fake_log.restype = ctypes.c_char_p
        self.library.fake_time_calls.restype = ctypes.c_double
        self.library.fake_reset()
        self.driver = _core.Driver(str(path), kind)

    @property
    def log(self) -> list[list[str]]:
        return [line.split("|") for line in self.library.fake_log().decode().splitlines()]

    def noted(self, *what: str) -> list[list[str]]:
        return [row for row in self.log if row[0] in what]

    @property
    def launches(self) -> list[list[str]]:
        """Function, kernel, grid, block, shared, stream, attributes, parameters."""
        return [row for row in self.log if "Launch" in row[0]]

    def fail(self, function: str, error: int) -> None:
        self.library.fake_fail(function.encode(), error)

    def binary(self, name: str, threads: int = 128, shared: int = 0, **options: Any) -> _core.Binary:
        return _core.Binary(self.driver, b"image\0", name, threads=threads, shared=shared, **options)

    def entry(
        self,
        kernel: str,
        params: Sequence[tuple[str, int, int]],
        grid: tuple[int, int, int] = (1, 1, 1),
        **options: Any,
    ) -> _core.Entry:
        """``kernel`` is the name alone; the sizes of its parameters follow from ``params``."""
        given = {name: options.pop(name) for name in ("maps", "zero", "chunk") if name in options}
        sizes = " ".join(
            str(_BYTES.get(kind, int("".join(filter(str.isdigit, kind)) or 8) // 8 or 1)) for kind, *_ in params
        )
        return _core.Entry(self.binary(f"{kernel} {sizes}", **options), grid, params, **given)

    def operator(self, schema: str, rows: Sequence[tuple[Any, ...]], miss: Miss, **facts: Any) -> Launched:
        return Launched(schema, rows, miss, **facts).register()

    def unregistered(self, schema: str, rows: Sequence[tuple[Any, ...]], miss: Miss, **facts: Any) -> Launched:
        return Launched(schema, rows, miss, **facts)

    def add(self, **options: Any) -> Launched:
        """``add(x, y)`` of float32, of which the launcher knows the number of elements."""
        params = [("ptr", 0, 0), ("ptr", 1, 0), ("ptr", 2, 0), ("i32", 3, 0)]
        rows = [("PACKED_TENSOR", name, "tensor") for name in ("x", "y", "out")]

        def miss(call: _core.Call) -> _core.Entry:
            return self.entry("add", params, (-(-call.values[3] // 128), 1, 1), **options)  # type: ignore[operator]

        return self.operator("add(Tensor x, Tensor y) -> Tensor", [*rows, ("NUMEL", "out", "int")], miss)


@pytest.fixture(scope="session")
def fake_libraries() -> dict[str, Path]:
    """The fake driver as CUDA's and as HIP's. The processes of a run of tests build it once, in the folder that they share."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder = Path(os.environ["OPKIT_CACHE_DIR"]) / "fake_driver"
    folder.mkdir(exist_ok=True)
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]
    paths = {kind: folder / f"libfake_{kind}.so" for kind in ("cuda", "hip")}
    with filelock.FileLock(folder / "lock"):
        for kind, path in paths.items():
            if not path.exists():
                made = path.with_suffix(".made")
                subprocess.run(["gcc", *flags, f"-D{kind.upper()}", str(SOURCE), "-o", str(made)], check=True)
                made.rename(path)
    return paths


@pytest.fixture
def fake(fake_libraries) -> Iterator[Fake]:
    made = Fake(fake_libraries["cuda"], "cuda")
    yield made
    made.library.fake_reset()


@pytest.fixture
def fake_hip(fake_libraries) -> Iterator[Fake]:
    made = Fake(fake_libraries["hip"], "hip")
    yield made
    made.library.fake_reset()


@pytest.fixture
def launched() -> Callable[..., Launched]:
    """Makes operators that no fake driver runs: schema, rows of sources, miss, cuda."""
    return lambda *args, **options: Launched(*args, **options).register()


@pytest.fixture
def tensor_at() -> Callable[..., Tensor]:
    """Makes tensors for direct calls: address, sizes, device, dtype."""
    return Tensor.at
