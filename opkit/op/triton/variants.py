"""Find or compile the variants of one Triton kernel: one for each way in which values of a call are compiled in.

A variant is found by the classes of the call's values (element types, alignment, which integers are 1 or divisible by 16,
which need 64 bits), the constexprs and options, and the architecture. Tensors that 32 bits cannot index get a variant of
64-bit program ids, grids beyond the hardware's limits one that is launched in pieces. What the operator's package has is
loaded; anything else is compiled.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opkit.errors import KernelError, ResourceError
from opkit.kernels import aot_loading
from opkit.kernels.aot_loading import WantedBinary
from opkit.kernels.triton import compiling, specialisation, targets
from opkit.kernels.triton.named import Layout, Named, written_out
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.entries import MAX_PROGRAMS, CompiledVariant, Memory, source_of
from opkit.op.triton.evaluation import as_grid, exact
from opkit.op.triton.machine import Machine

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
