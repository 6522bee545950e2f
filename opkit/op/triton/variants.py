"""The compiled forms of one Triton kernel: one for each way in which values of a call are compiled in.

A variant is found by the classes of the call's values (element types, alignment, which integers are 1 or divisible by 16,
which need 64 bits), the constexprs and options, and the architecture. Tensors that 32 bits cannot index get a variant of
64-bit program ids, grids beyond the hardware's limits one that is launched in pieces.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from opkit.errors import KernelError
from opkit.kernels.triton import compiling, signatures
from opkit.op.triton.binding import Bound
from opkit.op.triton.evaluation import as_grid
from opkit.op.triton.machine import Machine

if TYPE_CHECKING:
    from opkit import _core

_MOST_INDEXED = 2**31 - 1
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
_ALIGNMENT = 16


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
        if 0 in self.sizes:
            return 0
        return 1 + sum((size - 1) * abs(stride) for size, stride in zip(self.sizes, self.strides, strict=True))


class Variants:
    """The variants of a bound kernel that this process has used."""

    def __init__(self, bound: Bound, machine: Machine) -> None:
        self.bound = bound
        self.machine = machine
        self._names = tuple(parameter.name for parameter in bound.kernel.parameters)
        self._signature = signatures.parameters(bound.kernel.function)
        self._built: dict[Any, tuple[_core.Binary, compiling.Binary]] = {}
        self._lock = threading.Lock()

    def entry(self, values: Sequence[Any], named: Mapping[str, Any], device: int) -> _core.Entry:
        """What the launcher is to do for values like these. ``named`` are the evaluated constexprs, options and grid."""
        from opkit import _core

        grid = as_grid(self.bound.where, named["grid"])
        chunked = any(size > most for size, most in zip(grid, _MOST_PROGRAMS, strict=True))
        binary, built = self._variant(values, named, self.machine.target(device), chunked)
        params = [self._parameter(param, values, named) for param in built.params]
        zero = [self._source(name) for name in self.bound.kernel.reset_to_zero]
        maps = [self._map(m, values, named) for m in built.maps]
        return _core.Entry(binary, grid, params, maps=maps, zero=zero, chunk=_MOST_PROGRAMS if chunked else None)

    # ---- compiling -------------------------------------------------------------------------------------------------

    def request(
        self, values: Sequence[Any], named: Mapping[str, Any], target: str, chunked: bool = False
    ) -> compiling.Request:
        """What the compiler is asked for when a call has these values."""
        classes = signatures.specialise(self._signature, self._kinds(values, named))
        wide = _wide(values)
        signature = {name: "i64" if wide and kind == "i32" else kind for name, kind in classes.signature.items()}
        options = {name: named[name] for name in self.bound.options}
        return compiling.Request(
            self.bound.kernel.function, signature, classes.constexprs, classes.divisible, options, target, wide, chunked
        )

    def _kinds(self, values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """What each parameter is to the compiler: a pointer, a descriptor's type, or the value."""
        return {name: self._kind(name, values, named) for name in self._names}

    def _kind(self, name: str, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
        number = self.bound.given.get(name)
        if number is None:
            return self._described(name, values, named) if name in self.bound.descriptors else named[name]
        value = values[number]
        return signatures.Pointer(value.dtype, value.address % _ALIGNMENT == 0) if type(value) is Memory else value

    def _variant(
        self, values: Sequence[Any], named: Mapping[str, Any], target: str, chunked: bool
    ) -> tuple[_core.Binary, compiling.Binary]:
        classes = tuple([_class(kind) for kind in self._kinds(values, named).values()])
        key = (target, chunked, _wide(values), classes, tuple([named[name] for name in self.bound.options]))
        found = self._built.get(key)
        if found is None:
            with self._lock:
                found = self._built.get(key)
                if found is None:
                    found = self._built[key] = self._load(self.request(values, named, target, chunked))
        return found

    def _load(self, request: compiling.Request) -> tuple[_core.Binary, compiling.Binary]:
        from opkit import _core

        targets = self.bound.kernel.targets
        if targets and request.target not in targets:
            raise KernelError(f"{self.bound.where}: it is for {', '.join(targets)}, and this GPU is {request.target}.")
        built = compiling.build(request)
        binary = _core.Binary(
            self.machine.driver(), built.image, built.name, threads=built.threads, shared=built.shared,
            cluster=built.cluster, cooperative=built.cooperative, pdl=built.pdl, scratch=built.scratch,
            scratch_align=built.scratch_align, profile_scratch=built.profile_scratch,
            profile_scratch_align=built.profile_scratch_align,
        )  # fmt: skip
        return binary, built

    # ---- what a launch passes --------------------------------------------------------------------------------------

    def _source(self, name: str) -> int:
        if name in self.bound.given:
            return self.bound.given[name]
        tensor = self.bound.descriptors[name].tensor
        return next(i for i, s in enumerate(self.bound.sources) if s.name == tensor and s.kind == "tensor")

    def _parameter(
        self, param: compiling.Param, values: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[str, int, int]:
        """A parameter as the launcher packs it: from a source of the call, or the same at each launch."""
        kind, name, detail = param.kind, param.name, param.detail
        if not name or kind == "map":
            return kind, detail if kind == "map" else 0, detail
        if name in self.bound.given or (name in self.bound.descriptors and kind == "ptr"):
            return kind, self._source(name), detail
        if name in self.bound.descriptors:
            return self._of_descriptor(param, values, named)
        return f"const_{kind}", 0, bits(kind, named[name])

    def _of_descriptor(
        self, param: compiling.Param, values: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[str, int, int]:
        sizes, strides = self._view(param.name, values, named)
        padding = self.bound.descriptors[param.name].padding == "nan"
        table = {
            "size32": ("const_i32", sizes), "size64": ("const_i64", sizes), "stride64": ("const_i64", strides),
            "padding_nan": ("const_i1", (padding,)), "round_tf32": ("const_i1", (False,)),
        }  # fmt: skip
        kind, listed = table[param.kind]
        return kind, 0, int(listed[param.detail])

    def _view(
        self, name: str, values: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes and strides that a descriptor describes: the tensor's, or those of a shape that the author gave."""
        shape = named.get(f"{name}.shape", self.bound.descriptors[name].shape)
        memory = values[self._source(name)]
        if shape is None:
            return memory.sizes, memory.strides
        sizes = tuple(int(size) for size in shape)
        return sizes, _row_major(sizes)

    def _described(self, name: str, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
        given = self.bound.descriptors[name]
        element = signatures.element_type(values[self._source(name)].dtype)
        block = [int(size) for size in named.get(f"{name}.block", given.block)]
        layout = "" if given.layout is None else f",{given.layout!r}"
        return signatures.Typed(f"tensordesc<{element}{block}{layout}>")

    def _map(self, made: Mapping[str, Any], values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """How the launcher encodes a descriptor: of the tensor as it lies, or as a shape that the author gave."""
        name = made["name"]
        sizes, strides = self._view(name, values, named)
        rest = {key: value for key, value in made.items() if key != "name"}
        padding = self.bound.descriptors[name].padding == "nan"
        source = self._source(name)
        return {**rest, "source": source, "sizes": sizes, "strides": strides, "padding_nan": padding, "tf32": False}


def _wide(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Memory) and value.extent > _MOST_INDEXED for value in values)


def _class(kind: Any) -> Any:
    """What of a parameter's kind matters to the compiler, at the least."""
    if type(kind) is int:
        return "int", kind == 1, kind % 16 == 0, -(2**31) <= kind < 2**31, kind >= 2**63
    return type(kind) if isinstance(kind, (bool, float)) else kind


def bits(kind: str, value: Any) -> int:
    """A number as the 64 bits that a launch copies its parameter from."""
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    if kind == "fp64":
        return int.from_bytes(struct.pack("<d", value), "little")
    return int(value)


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    return tuple(strides)
