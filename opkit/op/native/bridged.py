"""Operators whose plain calls run in C without Python: which may, and when. See ``opkit.kernels.bridge`` for how.

A kernel takes its operator's calls over once one of them went through Python and was verified, and only calls of kinds
that were (see ``layout``). It gives them back when something is registered or forced.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from opkit import config
from opkit.errors import KernelError
from opkit.kernels import bridge
from opkit.op.core import Operator
from opkit.op.dispatch.selection import forced_kernels
from opkit.op.torch_paths import torch_paths

if TYPE_CHECKING:
    from opkit.op.native.compiled import CompiledFunction

_lock = threading.RLock()
_CHECKED_IN_C = ("name", "number", "any", "many")


@functools.cache
def _loaded() -> bridge.Bridge | None:
    """The bridge to the running torch; None where it is not built."""
    from opkit import _core

    return bridge.load(torch_paths(), _core.runtime_address())


def build() -> None:
    """Build the bridge to the running torch now, unless it is built; kernels whose first call comes later use it.

    Raises:
        ToolchainError, CompileError, CacheError: as ``opkit.kernels.bridge.build``.
    """
    bridge.build(torch_paths())
    _loaded.cache_clear()


class Bridged:
    """One operator's kernels in front of its Python ones, by device."""

    def __init__(self) -> None:
        self.installed: dict[str, tuple[Any, bridge.Installed]] = {}
        self.retired = False  # the operator's name is another's by now, or nobody's

    @property
    def serving(self) -> bool:
        """Whether some calls run in C."""
        return any(installed.enabled for _, installed in self.installed.values())

    def suspend(self) -> None:
        """Send every call to Python, until a kernel is offered again."""
        for _, installed in self.installed.values():
            installed.enabled = False

    def remove(self) -> None:
        """Leave the dispatcher as it was before, for good."""
        with _lock:
            self.retired = True
            for _, installed in self.installed.values():
                installed.remove()
            self.installed.clear()


def offer(function: CompiledFunction) -> None:
    """Let a kernel take its operator's calls over, if it is the one that Python would choose, and there is the bridge."""
    operator = function.operator
    with _lock:
        found = _loaded() if config.get().bridge and _may_take(operator, function) else None
    with operator.lock, _lock:  # under which kernels are forced, in whatever thread: asked again
        if found is not None and _may_take(operator, function) and _put(found, operator, function):
            operator.refreshed()


def _may_take(operator: Operator, function: CompiledFunction) -> bool:
    return not operator.bridged.retired and _first_choice(operator, function) and _checked_in_c(operator)


def _put(found: bridge.Bridge, operator: Operator, function: CompiledFunction) -> bool:
    """Install or enable the kernel; whether that changed anything."""
    device, bridged = function.device, operator.bridged
    holder, installed = bridged.installed.get(device, (None, None))
    if installed is not None and holder is function:
        changed = not installed.enabled
        installed.enabled = True
        return changed
    if installed is not None:
        installed.remove()
    name, _, overload = operator.name.partition(".")
    assert function.library is not None
    try:
        made = found.install(name, overload, device, function.library.address)
    except KernelError:  # another library has a kernel at the operator's autograd key: Python goes on serving the calls
        bridged.installed.pop(device, None)
        return False
    bridged.installed[device] = (function, made)
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
    """Whether C checks of the arguments' shapes what the annotations say."""
    patterns = [p.pattern for p in operator.signature.parameters if p.pattern is not None]
    dims = [dim for pattern in patterns for dim in pattern.dims]
    if not config.get().check:
        return True
    literal = any(p.choices for p in operator.signature.parameters)
    return not literal and all(dim.kind in _CHECKED_IN_C and not dim.broadcast for dim in dims)
