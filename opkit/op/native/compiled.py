"""Compiled kernels, in C, C++, CUDA and Triton: they run through torch's dispatcher without Python.

Such a kernel is the boxed kernel of a hidden operator, ``opkit_native::...``, which has the schema of the operator that it
computes and one more argument, the layout of the outputs. Plans call the hidden operator. Once a call was verified, a layout
program computes the outputs' sizes (see ``layout``), and with the bridge to the running torch (``opkit.kernels.bridge`` compiles
and loads it) the operator itself runs without Python, until a kernel or rule is registered or forced.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import abc
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from opkit import config
from opkit.errors import KernelError
from opkit.kernels import bridge
from opkit.kernels.facts import Facts
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch.selection import forced_kernels
from opkit.op.layout import program as layout_program
from opkit.op.layout.derivation import derive
from opkit.op.layout.outputs import check_passable, kind_of, layout_of, operands
from opkit.op.torch_private import torch_paths
from opkit.op.trace.reads import ReferenceState

if TYPE_CHECKING:
    from pathlib import Path

    from opkit import _core


_NAMESPACE = "opkit_native"
_MAX_PROGRAMS = 64
_CHECKED_IN_C = ("name", "number", "any", "many")
_count = itertools.count()
_log = logging.getLogger("opkit.bridge")
bridge_lock = threading.RLock()


class CompiledFunction(abc.ABC):
    """A compiled kernel as the function of a :class:`opkit.op.dispatch.selection.RegisteredKernel`."""

    def __init__(self, operator: Operator, name: str) -> None:
        check_passable(operator)
        self.operator = operator
        self.__name__ = name
        self.library: _core.KernelLibrary | None = None
        self._overload: Any = None
        self._programs: list[tuple[int, ...]] = []
        self._read: tuple[Any, ...] = ()  # values that may decide sizes: each call looks them up again
        # the fake implementation that computes sizes, and what it reads; the same two as the programs were derived with
        self._sizes: tuple[Any, ReferenceState] | None = None
        self._derived_from: Any = None
        self._lock = threading.RLock()
        self._registrations: list[Any] = []  # they must live as long as the kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.prepare(args, kwargs)
        if self._read and function is not self._overload:  # the values have changed since it was settled
            self.settle(args, kwargs, function)
        return function(*args, **kwargs)

    # ---- what each kind of kernel implements ----------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def device(self) -> str:
        """The device type that it runs on."""

    @property
    @abc.abstractmethod
    def facts(self) -> Facts:
        """The operator as the kernel sees it."""

    @abc.abstractmethod
    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return what decides what the kernel computes."""

    @abc.abstractmethod
    def refusal(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Return why the kernel does not take a call; empty if it does."""

    @abc.abstractmethod
    def ready(self) -> bool:
        """Make the kernel ready to run; return False, with one warning, if this machine has no compiler for it."""

    @abc.abstractmethod
    def open(self) -> _core.KernelLibrary:
        """Open the kernel as the runtime's library."""

    # ---- calls -----------------------------------------------------------------------------------------------------

    def load(self) -> _core.KernelLibrary:
        """Register the kernel with the dispatcher, once."""
        with self._lock:
            if self.library is None:
                library = self.open()
                library.forget_programs()  # they were derived from the reference that it was built with
                self._overload = self._registered(library)
                self.library = library
            return self.library

    def _registered(self, library: _core.KernelLibrary) -> Any:
        operator = self.operator
        name = f"{operator.namespace}__{operator.opname.replace('.', '__')}__{next(_count)}"
        fragment = torch.library.Library(_NAMESPACE, "FRAGMENT")
        fragment.define(name + schema_with_layout(operator))
        fragment.impl(name, torch.library.fallthrough_kernel, "Autograd")
        key = private.dispatch_key_of(self.device)
        tensors = [a for a in operator.schema.arguments if kind_of(a) == "tensor"]
        always = any(not str(a.real_type).startswith("Optional") for a in tensors)
        keys = [key] if always else [key, "BackendSelect"]  # which serves calls without tensors
        self._registrations = [fragment, *[library.register(f"{_NAMESPACE}::{name}", key, True) for key in keys]]
        return private.hidden_operator(f"{_NAMESPACE}::{name}")

    def prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return a function for calls of exactly these shapes; the first call builds the kernel."""
        self.load()
        with self._lock:
            self._forget_outdated()
            if self._fitting(args, kwargs):
                return self._overload
        return functools.partial(self._overload, opk_layout=layout_of(self.operator, args, kwargs))

    def settle(self, args: Sequence[Any], kwargs: dict[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
        """Derive the layout program after a call was verified; return a function that needs no layout from Python."""
        if self.library is None:
            return function
        with self._lock:
            self._forget_outdated()
            if not self._fitting(args, kwargs):
                program = derive(self.operator, args, kwargs) if len(self._programs) < _MAX_PROGRAMS else None
                if not isinstance(program, layout_program.LayoutProgram):
                    return self if self._takes_floats() else function
                self.library.add_program(list(program.words))
                self._programs.append(program.words)
            function = functools.partial(self._unless_changed, self._read) if self._read else self._overload
        if function is self._overload:
            offer(self)
        return self if self._sized_by_floats(args, kwargs) else function

    def _unless_changed(self, read: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """Run a call that has a program, unless the values that the fake implementation reads have changed."""
        assert self._sizes is not None
        unchanged = self._read is read and self._sizes[1].of_sizes() == read
        return (self._overload if unchanged else self)(*args, **kwargs)

    def _takes_floats(self) -> bool:
        return any(argument.kind == "float" for argument in self.facts.arguments)

    def _sized_by_floats(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether the sizes depend on the values of floats, which are not in a plan's key."""
        values = [v + 1.25 if isinstance(v, float) else v for v in operands(self.operator, args, kwargs)]
        return self._takes_floats() and not self._fits(values)

    def _forget_outdated(self) -> None:
        """Forget programs that were derived with another fake implementation, or while it read other values."""
        operator, fake = self.operator, self.operator.registered.fake
        if self._sizes is None or self._sizes[0] is not fake:
            self._sizes = fake, operator.state if fake is None else ReferenceState(operator.name, fake)
        read = self._sizes[1].of_sizes()
        if self._derived_from != (fake, read):
            assert self.library is not None
            self.library.forget_programs()
            self._programs.clear()
            self._derived_from, self._read = (fake, read), read

    def _fitting(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        return self._fits(operands(self.operator, args, kwargs))

    def _fits(self, values: Sequence[Any]) -> bool:
        kinds = [argument.kind for argument in self.facts.arguments]
        return any(layout_program.run(words, kinds, values) is not None for words in self._programs)


def schema_with_layout(operator: Operator) -> str:
    """Return the operator's schema with the argument ``opk_layout`` after the others."""
    head, arrow, returns = operator.schema_text.rpartition(" -> ")
    arguments = operator.schema.arguments
    separator = "" if not arguments else ", "
    star = "" if any(a.kwarg_only for a in arguments) else "*, "
    return f"{head.rstrip()[:-1]}{separator}{star}int[]? opk_layout=None){arrow}{returns}"


# ---- calls without Python --------------------------------------------------------------------------------------------


class Bridged:
    """One operator's kernels that run without Python, by device."""

    def __init__(self) -> None:
        self.installed: dict[str, tuple[Any, bridge.Installed]] = {}
        self.retired = False  # the operator was removed or redefined: its name is no longer its own

    @property
    def serving(self) -> bool:
        """Whether some calls run in C."""
        return any(installed.enabled for _, installed in self.installed.values())

    def suspend(self) -> None:
        """Send every call to Python, until a kernel is offered again."""
        for _, installed in self.installed.values():
            installed.enabled = False

    def remove(self) -> None:
        """Remove the kernels from the dispatcher for good."""
        with bridge_lock:
            self.retired = True
            for _, installed in self.installed.values():
                installed.remove()
            self.installed.clear()


def offer(function: CompiledFunction) -> None:
    """Let a kernel run its operator's calls without Python, if Python would choose it and the bridge is loaded."""
    operator = function.operator
    with bridge_lock:
        loaded = load_bridge() if config.get().bridge and _may_take(operator, function) else None
    with operator.lock, bridge_lock:  # another thread may have forced a kernel before these were held: check again
        if loaded is not None and _may_take(operator, function) and _install(loaded, operator, function):
            operator.refreshed()


def _may_take(operator: Operator, function: CompiledFunction) -> bool:
    return not operator.bridged.retired and _first_choice(operator, function) and _checked_in_c(operator)


def _install(loaded: bridge.Bridge, operator: Operator, function: CompiledFunction) -> bool:
    """Install or enable the kernel; return whether that changed anything."""
    device, kernels = function.device, operator.bridged.installed
    holder, installed = kernels.get(device, (None, None))
    if installed is not None and holder is function:
        changed = not installed.enabled
        installed.enabled = True
        return changed
    if installed is not None:
        installed.remove()
    name, _, overload = operator.name.partition(".")
    assert function.library is not None
    try:
        new = loaded.install(name, overload, device, function.library.address)
    except KernelError:  # another library has a kernel at the operator's autograd key: calls stay in Python
        kernels.pop(device, None)
        return False
    kernels[device] = (function, new)
    return True


def _first_choice(operator: Operator, function: CompiledFunction) -> bool:
    device, kernels = function.device, operator.kernels
    if forced_kernels.get().get(operator.name) is not None or kernels.disabled or operator.forced:
        return False
    first = next((kernel for kernel in kernels.kernels if kernel.device in (None, device)), None)
    return (
        first is not None
        and first.function is function
        and first.when is None
        and first.dtypes is None
        and not first.autotune
    )


def _checked_in_c(operator: Operator) -> bool:
    """Return whether C checks everything that the annotations say about the arguments' shapes."""
    patterns = [p.pattern for p in operator.signature.parameters if p.pattern is not None]
    dims = [dim for pattern in patterns for dim in pattern.dims]
    if not config.get().check:
        return True
    literal = any(p.choices for p in operator.signature.parameters)
    return not literal and all(dim.kind in _CHECKED_IN_C and not dim.broadcast for dim in dims)


@functools.cache
def load_bridge() -> bridge.Bridge | None:
    """Return the bridge to the running torch; None, with a line in the log, if it is not built."""
    from opkit import _core

    found = bridge.load(torch_paths(), _core.runtime_address())
    if found is None:
        _log.info(
            "calls of compiled kernels go through Python; `opkit bridge` builds what saves 1 to 2 us a call, once"
        )
    return found


def build_bridge() -> Path:
    """Build the bridge to the running torch now, unless it is built; kernels whose first call comes later use it.

    Returns its file.

    Raises:
        ToolchainError, CompileError, CacheError: as ``opkit.kernels.bridge.build``.
    """
    path = bridge.build(torch_paths())
    load_bridge.cache_clear()
    return path
