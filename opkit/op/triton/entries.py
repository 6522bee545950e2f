"""Pack the parameters of a compiled Triton kernel for a launch, in the order and forms in which it takes them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opkit.kernels.triton.binaries import Binary, Param
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.machine import Machine

if TYPE_CHECKING:
    from opkit import _core

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
        """Return the sizes and strides that a descriptor describes: the tensor's, or those of a shape that the author gave."""
        shape = named.get(f"{name}.shape", self.bound.descriptors[name].shape)
        memory = values[source_of(self.bound, name)]
        if shape is None:
            return memory.sizes, memory.strides
        sizes = tuple(int(size) for size in shape)
        return sizes, _row_major(sizes)

    def _map(self, tensor_map: Mapping[str, Any], values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return how the launcher encodes a descriptor: of the tensor as it lies, or as a shape that the author gave."""
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
