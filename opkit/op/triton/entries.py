"""How a compiled Triton kernel is launched: its parameters, in the order and the forms in which it takes them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from opkit.kernels.triton.binaries import Binary, Param
from opkit.op.triton.binding import Bound
from opkit.op.triton.machine import Machine

if TYPE_CHECKING:
    from opkit import _core

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
"""The largest grid that the hardware takes."""


class Memory(NamedTuple):
    """A tensor as the launcher shows it."""

    address: int
    dtype: int
    device: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """One more than the largest offset in elements."""
        last = 0
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if size == 0:
                return 0
            last += (size - 1) * abs(stride)
        return last + 1


class Variant:
    """One compiled form of a kernel on one kind of device."""

    def __init__(self, bound: Bound, machine: Machine, built: Binary, chunked: bool) -> None:
        from opkit import _core

        self.bound = bound
        self.built = built
        self._chunk = MOST_PROGRAMS if chunked else None
        self._zero = [source_of(bound, name) for name in bound.kernel.reset_to_zero]
        self._fixed = all(not param.name or param.name in bound.given for param in built.params)
        self._params: list[tuple[str, int, int]] = []
        self._binary = _core.Binary(
            machine.driver(), built.image, built.name, threads=built.threads, shared=built.shared, cluster=built.cluster,
            cooperative=built.cooperative, pdl=built.pdl, scratch=built.scratch, scratch_align=built.scratch_align,
            profile_scratch=built.profile_scratch, profile_scratch_align=built.profile_scratch_align,
        )  # fmt: skip

    def entry(self, values: Sequence[Any], named: Mapping[str, Any], grid: tuple[int, int, int]) -> _core.Entry:
        """What the launcher is to do for these values."""
        from opkit import _core

        if not (self._fixed and self._params):
            self._params = [self._parameter(param, values, named) for param in self.built.params]
        maps = [self._map(made, values, named) for made in self.built.maps]
        return _core.Entry(self._binary, grid, self._params, maps=maps, zero=self._zero, chunk=self._chunk)

    def _parameter(self, param: Param, values: Sequence[Any], named: Mapping[str, Any]) -> tuple[str, int, int]:
        """A parameter as the launcher packs it: from a source of the call, or the same at each launch."""
        kind, name, detail = param.kind, param.name, param.detail
        if not name or kind == "map":
            return kind, detail if kind == "map" else 0, detail
        if name in self.bound.given or (name in self.bound.descriptors and kind == "ptr"):
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
        """The sizes and strides that a descriptor describes: the tensor's, or those of a shape that the author gave."""
        shape = named.get(f"{name}.shape", self.bound.descriptors[name].shape)
        memory = values[source_of(self.bound, name)]
        if shape is None:
            return memory.sizes, memory.strides
        sizes = tuple(int(size) for size in shape)
        return sizes, _row_major(sizes)

    def _map(self, made: Mapping[str, Any], values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """How the launcher encodes a descriptor: of the tensor as it lies, or as a shape that the author gave."""
        name = made["name"]
        sizes, strides = self._view(name, values, named)
        rest = {key: value for key, value in made.items() if key != "name"}
        padding = self.bound.descriptors[name].padding == "nan"
        source = source_of(self.bound, name)
        return {**rest, "source": source, "sizes": sizes, "strides": strides, "padding_nan": padding, "tf32": False}


def source_of(bound: Bound, name: str) -> int:
    """The source of a parameter's tensor."""
    if name in bound.given:
        return bound.given[name]
    tensor = bound.descriptors[name].tensor
    return next(i for i, s in enumerate(bound.sources) if s.name == tensor and s.kind == "tensor")


def bits(kind: str, value: Any) -> int:
    """A number as the 64 bits that a launch copies its parameter from.

    >>> bits("fp32", 1.0) == 0x3F800000, bits("i32", -1)
    (True, -1)
    """
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    if kind == "fp64":
        return struct.unpack("<q", struct.pack("<d", value))[0]
    return int(value)


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    return tuple(strides)
