"""Kernels in C, C++ and CUDA: bind them to an operator's arguments, and build them at the first call."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import KernelError, NoCompilerWarning, ToolchainError
from opkit.kernels import aot_loading
from opkit.kernels.binding import ANY_DTYPE, Bound, Slot, bind
from opkit.kernels.cc import compilation, runs
from opkit.kernels.cc.dtypes import DTYPES
from opkit.kernels.cc.native import NativeKernel, build_request
from opkit.kernels.cc.request import Request
from opkit.kernels.facts import Facts
from opkit.op import kernel_kinds
from opkit.op.core import Operator
from opkit.op.dispatch.selection import RegisteredKernel
from opkit.op.layout.outputs import facts_of, operands
from opkit.op.native.compiled import CompiledFunction

if TYPE_CHECKING:
    from opkit import _core

_POINTERS = ("DATA", "TENSOR", "DATA_LIST", "TENSOR_LIST")
_NAMES = {dtype.number: dtype.name for dtype in DTYPES.values()}


class NativeFunction(CompiledFunction):
    """A kernel from source."""

    def __init__(self, operator: Operator, native: NativeKernel, name: str) -> None:
        super().__init__(operator, name)
        self.native = native
        self.bound: Bound = bind(
            native.function, facts_of(operator), tuple(native.variables), native.bind, name, cuda=native.cuda
        )
        self.taken = runs.taken(native, self.bound) if native.elementwise else ()
        self._unbuildable = ""

    @property
    def device(self) -> str:
        """The device type that it runs on."""
        return self.native.device

    @property
    def facts(self) -> Facts:
        """The operator as the kernel sees it."""
        return self.bound.facts

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return what decides what the kernel computes."""
        return self.native.contract_parts()

    # ---- which calls it takes --------------------------------------------------------------------------------------

    def refusal(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Return why the kernel does not take a call; empty if it does."""
        if self._unbuildable:
            return self._unbuildable
        values = operands(self.operator, args, kwargs)
        chosen: dict[str, torch.dtype] = {}
        for slot in self.bound.slots:
            if slot.source not in _POINTERS or slot.argument >= len(values):
                continue
            for tensor in pytree.tree_leaves(values[slot.argument]):
                if isinstance(tensor, torch.Tensor) and (reason := self._mismatch(slot, tensor, chosen)):
                    return reason
        return ""

    def _mismatch(self, slot: Slot, tensor: torch.Tensor, chosen: dict[str, torch.dtype]) -> str:
        if tensor.layout is not torch.strided:
            return f"{slot.name} is {tensor.layout}; it takes dense tensors"
        if slot.dtype == ANY_DTYPE:
            return ""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if slot.dtype > ANY_DTYPE:
            allowed: Sequence[str] = [_NAMES[slot.dtype]]
        else:
            variable = self.bound.variables[-2 - slot.dtype]
            allowed = self.native.variables[variable]
            if chosen.setdefault(variable, tensor.dtype) != tensor.dtype:
                return (
                    f"{slot.name} has {tensor.dtype} and an argument before it {chosen[variable]}; it takes equal ones"
                )
        if dtype in allowed:
            return ""
        return f"{slot.name} has {tensor.dtype}; it takes {', '.join(f'torch.{name}' for name in allowed)}"

    # ---- building --------------------------------------------------------------------------------------------------

    def build(self) -> Path:
        """Compile the kernel, or find it in the cache.

        Raises:
            CompileError: the compiler refused the source.
            ToolchainError: there is no compiler.
        """
        return compilation.build(self.request())

    def request(self) -> Request:
        """Return the request to the compiler."""
        return build_request(self.native, self.bound, self.__name__, flags=_cuda_flags(self.native))

    def ready(self) -> bool:
        """Build and load the kernel; False, with one warning, where this machine has no compiler for it."""
        try:
            _ = self.build() if self.native.debug else self.load()
        except ToolchainError as error:
            self._unbuildable = str(error).splitlines()[0].rstrip(":")
            warnings.warn(
                f"{self.operator.name}: the kernel {self.__name__} is not used, the reference runs in its place. {error}",
                NoCompilerWarning,
                stacklevel=2,
            )
        return not self._unbuildable

    def open(self) -> _core.KernelLibrary:
        """Return the library that was built ahead of time, or build it now."""
        from opkit import _core

        module = getattr(self.operator.function, "__module__", "")
        built = aot_loading.load(module, self.native, self.bound, self.__name__, _capabilities(self.native))
        return built or _core.KernelLibrary(str(self.build()))

    def prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return a function for calls of exactly these shapes; the first call builds the kernel."""
        if self.native.debug:
            from opkit.op.native.sanitized import SanitizedKernel  # only debug builds need it

            return SanitizedKernel(self.operator, self.__name__, self.bound, self.native.variables, self.build)
        return super().prepare(args, kwargs)


def _cuda_flags(native: NativeKernel) -> list[str]:
    """Return the flags to compile for this machine's GPUs, unless the author names others."""
    if any("arch" in flag or "gencode" in flag for flag in native.flags):
        return []
    return [f"-gencode=arch=compute_{each},code=sm_{each}" for each in _capabilities(native)]


def _capabilities(native: NativeKernel) -> list[int]:
    """Return the compute capabilities of this machine's GPUs, 90 for 9.0, for a kernel in CUDA C++."""
    if not native.cuda or not torch.cuda.is_available():
        return []
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return [10 * major + minor for major, minor in sorted(found)]


def build_all(operators: Sequence[Operator], jobs: int | None = None) -> list[Path | Exception]:
    """Build every native kernel of some operators, several at a time."""
    functions = [k.function for op in operators for k in op.kernels.kernels if isinstance(k.function, NativeFunction)]
    return list(compilation.build_all([function.request() for function in functions], jobs))


def _kernel(operator: Operator, native: NativeKernel, device: str | None, name: str) -> RegisteredKernel:
    if device != native.device:
        raise KernelError(
            f"{operator.name}: {native.name} is a {native.language} kernel, which runs on {native.device} tensors; "
            f'register it with register_kernel("{native.device}", ...), not for {device!r}.'
        )
    return RegisteredKernel(name, device, NativeFunction(operator, native, name), native=True)


kernel_kinds.register(NativeKernel, _kernel)
