"""Find or compile the variants of one Triton kernel for the GPUs of this machine.

There is a variant for each way in which values of a call are compiled in. It is found by the classes of the values (element
types, alignment, which integers are 1 or divisible by 16, which need 64 bits), the constexprs and options, and the architecture.
Tensors that 32 bits cannot index get a variant of 64-bit program ids, grids beyond the hardware's limits one that is launched in
pieces. What the operator's package has is loaded; anything else is compiled.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opkit.errors import KernelError, ResourceError
from opkit.kernels import aot_loading
from opkit.kernels.aot_loading import WantedBinary
from opkit.kernels.triton import compiling, specialisation, targets
from opkit.kernels.triton.binaries import Binary, Param
from opkit.kernels.triton.named import Layout, Named, written_out
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.evaluation import as_grid, exact

if TYPE_CHECKING:
    from opkit import _core


_ALIGNMENT = 16


class Variants:
    """The variants of a bound kernel that this process has used. ``module`` is that of the operator."""

    def __init__(self, bound: BoundKernel, machine: Machine, module: str = "") -> None:
        self.bound = bound
        self.machine = machine
        self.module = module
        self._signature = specialisation.parameters(bound.kernel.function)
        self._tensors = [i for i, source in enumerate(bound.sources) if source.kind == "tensor"]
        self._runtime = [bound.runtime[p.name] for p in self._signature if p.name in bound.runtime]
        settled = [p for p in self._signature if p.name not in bound.runtime and p.name not in bound.descriptors]
        self._constexprs = [*(p.name for p in settled if p.constexpr), *bound.options]
        self._computed = [p.name for p in settled if not p.constexpr]
        self._built: dict[Any, CompiledVariant] = {}
        self._from_package: dict[tuple[int, bool], CompiledVariant] = {}
        self._lock = threading.Lock()

    def entry(self, values: Sequence[Any], named: Mapping[str, Any], device: int) -> _core.Entry:
        """Return what the launcher is to do for values like these. ``named`` are the evaluated constexprs, options and grid."""
        grid = as_grid(self.bound.where, named["grid"])
        x = MAX_PROGRAMS[0]
        if grid[0] > x:
            raise KernelError(
                f"{self.bound.where}: grid gave {grid}. Along x there can be {x} programs; use y and z too."
            )
        chunked = in_pieces(grid)
        key = self._key(values, named, device, chunked)
        found = self._built.get(key)
        if found is None:
            with self._lock:
                found = self._built.get(key) or self._variant(values, named, device, chunked)
                self._built[key] = found
        return found.entry(values, named, grid)

    def _key(self, values: Sequence[Any], named: Mapping[str, Any], device: int, chunked: bool) -> tuple[Any, ...]:
        """Return what in the values decides which variant it is."""
        classes: list[Any] = [device, chunked, self._wide(values)]
        for i in self._runtime:
            value = values[i]
            if type(value) is Memory:
                classes += [value.dtype, value.address % _ALIGNMENT == 0]
            else:
                classes.append(_class(value))
        classes += exact(named.get(name) for name in self._constexprs)
        classes += [_class(named[name]) for name in self._computed]
        for name in self.bound.descriptors:  # their tensors' sizes are in the launcher's guard
            classes += [values[source_of(self.bound, name)].dtype, tuple(named.get(f"{name}.block", ()))]
        return tuple(classes)

    def _wide(self, values: Sequence[Any]) -> bool:
        """Return whether 32 bits are too few for the offsets within some tensor."""
        return any(values[i] is not None and values[i].large for i in self._tensors)

    # ---- compiling -------------------------------------------------------------------------------------------------

    def request(
        self, values: Sequence[Any], named: Mapping[str, Any], target: str, chunked: bool = False
    ) -> compiling.CompileRequest:
        """Return the compile request of a call with these values."""
        kinds = {parameter.name: self._kind(parameter.name, values, named) for parameter in self._signature}
        classes = specialisation.specialise(self._signature, kinds)
        wide = self._wide(values)
        signature = {name: "i64" if wide and kind == "i32" else kind for name, kind in classes.signature.items()}
        options = {name: named[name] for name in self.bound.options if name in named}
        return compiling.CompileRequest(
            self.bound.kernel.function, signature, classes.constexprs, classes.divisible, options, target, wide, chunked
        )

    def _kind(self, name: str, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what a parameter is to the compiler: a pointer, a descriptor's type, or the value."""
        number = self.bound.runtime.get(name)
        if number is None:
            return self._descriptor(name, values, named) if name in self.bound.descriptors else named[name]
        value = values[number]
        return specialisation.Pointer(value.dtype, value.address % _ALIGNMENT == 0) if type(value) is Memory else value

    def _descriptor(self, name: str, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
        declared = self.bound.descriptors[name]
        element = specialisation.element_type(values[source_of(self.bound, name)].dtype)
        block = [int(size) for size in named.get(f"{name}.block", declared.block)]
        layout = "" if declared.layout is None else f",{declared.layout!r}"
        written = f"tensordesc<{element}{block}{layout}>"
        settled = not isinstance(declared.layout, Layout) or isinstance(self.bound.kernel.function, Named)
        return specialisation.Typed(written if settled else written_out(written))

    def _variant(self, values: Sequence[Any], named: Mapping[str, Any], device: int, chunked: bool) -> CompiledVariant:
        request = self.request(values, named, self.machine.target(device), chunked)
        only = self.bound.kernel.targets
        if only and targets.canonical(request.target) not in map(targets.canonical, only):
            raise KernelError(f"{self.bound.where}: it is for {', '.join(only)}, and this GPU is {request.target}.")
        max_shared = self.machine.shared(device)
        found = aot_loading.find_binary(
            WantedBinary(self.module, self.bound.facts.operator, self.bound.name, max_shared), request
        )
        return self._compiled(request, device, max_shared) if found is None else self._loaded(found, chunked)

    def _loaded(self, found: compiling.Binary, chunked: bool) -> CompiledVariant:
        """Return the variant of a binary of the operator's package, which may serve several classes of values."""
        key = id(found), chunked  # find_binary caches what it found
        if key not in self._from_package:
            self._from_package[key] = CompiledVariant(self.bound, self.machine, found, chunked)
        return self._from_package[key]

    def _compiled(self, request: compiling.CompileRequest, device: int, max_shared: int) -> CompiledVariant:
        built = compiling.build(request)
        if built.shared > max_shared:
            raise ResourceError(
                f"{self.bound.where}: a block needs {built.shared} bytes of shared memory, and {self.machine.model(device)} "
                f"has {max_shared}. Use smaller blocks or fewer stages."
            )
        return CompiledVariant(self.bound, self.machine, built, request.offsets)


def in_pieces(grid: tuple[int, int, int]) -> bool:
    """Return whether a grid is beyond the hardware's limits, so that it is launched in pieces."""
    x, y, z = MAX_PROGRAMS
    return grid[0] > x or grid[1] > y or grid[2] > z


def _class(value: Any) -> Any:
    """Return what in a number matters to the compiler, at the most."""
    if type(value) is int:
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value >= 2**63
    return type(value) if type(value) in (bool, float) else value


# ---- packing parameters for a launch ---------------------------------------------------------------------------------


MAX_PROGRAMS = (2**31 - 1, 65535, 65535)
"""The largest grid that the hardware takes."""


class Memory(NamedTuple):
    """A tensor as the launcher shows it."""

    address: int
    dtype: int
    device: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    large: bool = False  # an int32 cannot count the offsets in it


class CompiledVariant:
    """One compiled form of a kernel on one kind of device."""

    def __init__(self, bound: BoundKernel, machine: Machine, built: Binary, chunked: bool) -> None:
        from opkit import _core

        self.bound = bound
        self.built = built
        self._chunk = MAX_PROGRAMS if chunked else None
        self._zero = [source_of(bound, name) for name in bound.zeroed if name in bound.runtime]
        self._computed = [
            (i, p.kind, p.name) for i, p in enumerate(built.params) if p.name and p.name not in bound.runtime
        ]
        self._described = bool(bound.descriptors)
        self._entry: _core.Entry | None = None
        self._binary = _core.Binary(
            machine.driver(), built.image, built.name, threads=built.threads, shared=built.shared, cluster=built.cluster,
            cooperative=built.cooperative, pdl=built.pdl, scratch=built.scratch, scratch_align=built.scratch_align,
            profile_scratch=built.profile_scratch, profile_scratch_align=built.profile_scratch_align,
        )  # fmt: skip

    def entry(self, values: Sequence[Any], named: Mapping[str, Any], grid: tuple[int, int, int]) -> _core.Entry:
        """Return what the launcher is to do for these values."""
        from opkit import _core

        if self._entry is not None:
            return self._entry.again(grid, [(i, bits(kind, named[name])) for i, kind, name in self._computed])
        params = [self._parameter(param, values, named) for param in self.built.params]
        maps = [self._map(tensor_map, values, named) for tensor_map in self.built.maps]
        entry = _core.Entry(self._binary, grid, params, maps=maps, zero=self._zero, chunk=self._chunk)
        self._entry = None if self._described or self._chunk is not None else entry
        return entry

    def _parameter(self, param: Param, values: Sequence[Any], named: Mapping[str, Any]) -> tuple[str, int, int]:
        """Return a parameter as the launcher packs it: from a source of the call, or the same at each launch."""
        kind, name, detail = param.kind, param.name, param.detail
        if not name or kind == "map":
            return kind, detail if kind == "map" else 0, detail
        if name in self.bound.runtime or (name in self.bound.descriptors and kind == "ptr"):
            return kind, source_of(self.bound, name), detail
        if name in self.bound.descriptors:
            return "const", 0, self._of_descriptor(param, values, named)
        return "const", 0, bits(kind, named[name])

    def _of_descriptor(self, param: Param, values: Sequence[Any], named: Mapping[str, Any]) -> int:
        sizes, strides = self._view(param.name, values, named)
        padding = self.bound.descriptors[param.name].padding == "nan"
        table = {
            "size32": sizes, "size64": sizes, "stride64": strides, "padding_nan": (padding,), "round_tf32": (False,),
        }  # fmt: skip
        return int(table[param.kind][param.detail])

    def _view(
        self, name: str, values: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes and strides that a descriptor describes: the tensor's, or those of the author's ``shape``."""
        shape = named.get(f"{name}.shape", self.bound.descriptors[name].shape)
        memory = values[source_of(self.bound, name)]
        if shape is None:
            return memory.sizes, memory.strides
        sizes = tuple(int(size) for size in shape)
        return sizes, _row_major(sizes)

    def _map(self, tensor_map: Mapping[str, Any], values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return how the launcher encodes a descriptor: of the tensor as it is, or with the author's ``shape``."""
        name = tensor_map["name"]
        sizes, strides = self._view(name, values, named)
        rest = {key: value for key, value in tensor_map.items() if key != "name"}
        padding = self.bound.descriptors[name].padding == "nan"
        source = source_of(self.bound, name)
        return {**rest, "source": source, "sizes": sizes, "strides": strides, "padding_nan": padding, "tf32": False}


def source_of(bound: BoundKernel, name: str) -> int:
    """Return the source of a parameter's tensor."""
    if name in bound.runtime:
        return bound.runtime[name]
    tensor = bound.descriptors[name].tensor
    return next(i for i, s in enumerate(bound.sources) if s.name == tensor and s.kind == "tensor")


def bits(kind: str, value: Any) -> int:
    """Return a number as the 64 bits that a launch copies its parameter from.

    >>> bits("fp32", 1.0) == 0x3F800000, bits("bf16", 1.0) == 0x3F80, bits("i32", -1)
    (True, True, -1)
    """
    if kind in _REALS:
        real = float(value)
        return int.from_bytes(_REALS[kind](real), "little", signed=True)
    whole = int(value)
    return whole if whole < 2**63 else whole - 2**64


def _bytes_of(real: float, dtype: torch.dtype) -> bytes:
    return bytes(torch.tensor([real], dtype=dtype).view(torch.uint8).tolist()) + bytes(6)


_REALS: Mapping[str, Callable[[float], bytes]] = {
    "fp16": lambda real: _bytes_of(real, torch.float16),
    "bf16": lambda real: _bytes_of(real, torch.bfloat16),
    "fp32": lambda real: bytes(ctypes.c_float(real)) + bytes(4),  # what is too large becomes infinite
    "fp64": lambda real: struct.pack("<d", real),
}


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


# ---- GPUs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where kernels run.

    Attributes:
        device: the device type that torch has for it.
        driver: opens the driver's library, once.
        target: the architecture of the device of a number, such as "sm_90".
        model: its name, such as "NVIDIA H200".
        shared: the most shared memory that a block may have there, in bytes.
    """

    device: str
    driver: Callable[[], _core.Driver]
    target: Callable[[int], str]
    model: Callable[[int], str]
    shared: Callable[[int], int]


_HIP_LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")


@functools.cache
def driver_library() -> str:
    """Return the name of the library of the GPU's driver: of HIP's, which has several, the one that torch has loaded."""
    if torch.version.hip is None:
        return "libcuda.so.1"
    return next(filter(_is_loaded, _HIP_LIBRARIES), _HIP_LIBRARIES[-1])


def _is_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


@functools.cache
def _driver() -> _core.Driver:
    from opkit import _core

    return _core.Driver(driver_library(), "cuda" if torch.version.hip is None else "hip")


@functools.cache
def _target(device: int) -> str:
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def _model(device: int) -> str:
    return torch.cuda.get_device_name(device)


@functools.cache
def _shared(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


MACHINES = {"cuda": Machine("cuda", _driver, _target, _model, _shared)}


def machine_of(device: str | None) -> Machine | None:
    """Return what runs Triton kernels on a device type; None where nothing does."""
    return None if device is None else MACHINES.get(device)
