"""Native kernels of an operator: bound to its arguments, built at the first call, and run through torch's dispatcher.

A built kernel is registered as the boxed kernel of an operator of its own, ``opkit_native::...``, which has the schema
of the operator it serves and one argument more, the sizes of the outputs. Python's plans call that. Once calls of some
shape were verified, the sizes are left to a program (see ``layout``), and with the bridge the operator itself is served
without Python.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import KernelError, NoCompilerWarning, ToolchainError
from opkit.kernels import compilation, package, units
from opkit.kernels.binding import Bound, bind
from opkit.kernels.commands import Request
from opkit.kernels.dtypes import DTYPES
from opkit.kernels.native import NativeKernel
from opkit.kernels.slots import ANY_DTYPE, Slot
from opkit.op import bridged, layout
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.facts import check_passable, facts_of, kind_of

if TYPE_CHECKING:
    from opkit import _core

_NAMESPACE = "opkit_native"
_MOST_PROGRAMS = 64
_POINTERS = ("DATA", "TENSOR", "DATA_LIST", "TENSOR_LIST")
_NAMES = {dtype.number: dtype.name for dtype in DTYPES.values()}
_count = itertools.count()


class NativeFunction:
    """A native kernel as the function of a :class:`opkit.op.selection.Kernel`."""

    def __init__(self, operator: Operator, native: NativeKernel, name: str) -> None:
        check_passable(operator)
        self.operator = operator
        self.native = native
        self.__name__ = name
        self.bound: Bound = bind(
            native.function, facts_of(operator), tuple(native.variables), native.bind, name, cuda=native.cuda
        )
        self.library: _core.KernelLibrary | None = None
        self._overload: Any = None
        self._programs: list[tuple[int, ...]] = []
        self._derived_from: Any = None  # the fake implementation of which the programs were made
        self._lock = threading.Lock()
        self._kept: list[Any] = []  # what must live as long as the registration
        self._unbuildable = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.prepare(args, kwargs)(*args, **kwargs)

    def contract_parts(self) -> list[tuple[str, Any]]:
        """What decides what the kernel computes."""
        return self.native.contract_parts()

    # ---- which calls it takes --------------------------------------------------------------------------------------

    def refusal(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Why the kernel does not take a call; empty where it does."""
        if self._unbuildable:
            return self._unbuildable
        values = layout.operands(self.operator, args, kwargs)
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
        """What the compiler is asked for."""
        return units.request(self.native, self.bound, self.__name__, flags=_cuda_flags(self.native))

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

    def load(self) -> _core.KernelLibrary:
        """Put the kernel, built ahead of time or now, into the dispatcher, once."""
        from opkit import _core

        with self._lock:
            if self.library is None:
                module = getattr(self.operator.function, "__module__", "")
                built = package.load(module, self.native, self.bound, self.__name__)
                library = built or _core.KernelLibrary(str(self.build()))
                library.forget_programs()  # a package's are of the reference that it was built with
                self._overload = self._registered(library)
                self.library = library
            return self.library

    def _registered(self, library: _core.KernelLibrary) -> Any:
        operator = self.operator
        name = f"{operator.namespace}__{operator.opname.replace('.', '__')}__{next(_count)}"
        fragment = torch.library.Library(_NAMESPACE, "FRAGMENT")
        fragment.define(name + schema_with_layout(operator))
        fragment.impl(name, torch.library.fallthrough_kernel, "Autograd")
        key = private.dispatch_key_of(self.native.device)
        keys = [key] if _always_has_tensors(operator) else [key, "BackendSelect"]  # by which calls without tensors come
        self._kept = [fragment, *[library.register(f"{_NAMESPACE}::{name}", key, True) for key in keys]]
        return private.library_utils.lookup_op(f"{_NAMESPACE}::{name}")

    # ---- calls -----------------------------------------------------------------------------------------------------

    def prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """A function for calls of exactly these shapes; it builds the kernel when first asked."""
        if self.native.debug:
            from opkit.op import sanitized

            return sanitized.runner(self)
        self.load()
        with self._lock:
            self._forget_outdated()
            if self._fitting(args, kwargs):
                return self._overload
        return functools.partial(self._overload, opk_layout=layout.layout_of(self.operator, args, kwargs))

    def settle(self, args: Sequence[Any], kwargs: dict[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
        """After such a call was verified: calls of its kind, at other sizes too, need no layout from Python any more."""
        if self.native.debug or self.library is None:
            return function
        with self._lock:
            self._forget_outdated()
            if not self._fitting(args, kwargs):
                program = layout.derive(self.operator, args, kwargs) if len(self._programs) < _MOST_PROGRAMS else None
                if not isinstance(program, layout.Program):
                    return self if self._takes_floats() else function
                self.library.add_program(list(program.words))
                self._programs.append(program.words)
        bridged.offer(self)
        return self if self._sized_by_floats(args, kwargs) else self._overload

    def _takes_floats(self) -> bool:
        return any(argument.kind == "float" for argument in self.bound.facts.arguments)

    def _sized_by_floats(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the sizes hold for these floats alone, of which a plan says nothing."""
        values = [v + 1.25 if isinstance(v, float) else v for v in layout.operands(self.operator, args, kwargs)]
        return self._takes_floats() and not self._fits(values)

    def _forget_outdated(self) -> None:
        # another fake implementation was registered: sizes that the earlier one gave hold no longer
        if self._derived_from is not self.operator.given.fake:
            assert self.library is not None
            self.library.forget_programs()
            self._programs.clear()
            self._derived_from = self.operator.given.fake

    def _fitting(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        return self._fits(layout.operands(self.operator, args, kwargs))

    def _fits(self, values: Sequence[Any]) -> bool:
        kinds = [argument.kind for argument in self.bound.facts.arguments]
        return any(layout.run(words, kinds, values) is not None for words in self._programs)


def _always_has_tensors(operator: Operator) -> bool:
    return any(
        kind_of(a) == "tensor" and not str(a.real_type).startswith("Optional") for a in operator.schema.arguments
    )


def schema_with_layout(operator: Operator) -> str:
    """The operator's schema with the argument ``opk_layout`` after the others."""
    head, arrow, returns = operator.schema_text.rpartition(" -> ")
    arguments = operator.schema.arguments
    separator = "" if not arguments else ", "
    star = "" if any(a.kwarg_only for a in arguments) else "*, "
    return f"{head.rstrip()[:-1]}{separator}{star}int[]? opk_layout=None){arrow}{returns}"


def _cuda_flags(native: NativeKernel) -> list[str]:
    """Compile for the GPUs that are here, unless the author says for which."""
    if (
        not native.cuda
        or any("arch" in flag or "gencode" in flag for flag in native.flags)
        or not torch.cuda.is_available()
    ):
        return []
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return [f"-gencode=arch=compute_{a}{b},code=sm_{a}{b}" for a, b in sorted(found)]


def build_all(operators: Sequence[Operator], jobs: int | None = None) -> list[Path | Exception]:
    """Build every native kernel of some operators, several at a time."""
    functions = [k.function for op in operators for k in op.kernels.kernels if isinstance(k.function, NativeFunction)]
    return list(compilation.build_all([function.request() for function in functions], jobs))


def check_device(operator: Operator, native: NativeKernel, device: str | None) -> None:
    """Raise a KernelError where a native kernel is registered for a device on which it cannot run."""
    if device != native.device:
        raise KernelError(
            f"{operator.name}: {native.name} is a {native.language} kernel, which runs on {native.device} tensors; "
            f'register it with register_kernel("{native.device}", ...), not for {device!r}.'
        )
