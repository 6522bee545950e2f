"""The bridge to the running torch, by which an operator's plain calls run in C without Python.

``opkit.kernels.bridge`` compiles and loads the bridge. ``compiled`` installs kernels in it; they are suspended when a kernel or
rule is registered or forced.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import threading
import weakref
from typing import Any

from opkit import config
from opkit.kernels import bridge
from opkit.op.core import Operator
from opkit.op.torch_private import torch_paths

lock = threading.RLock()


class _Bridge:
    """The bridge to the running torch: it is loaded once, and again when a background build has ended."""

    def __init__(self) -> None:
        self.loaded: bridge.Bridge | None = None
        self.tried = False
        self.ended = False
        self.waiting: weakref.WeakSet[Operator] = weakref.WeakSet()

    def get(self) -> bridge.Bridge | None:
        if self.loaded is None and config.get().bridge and (self.ended or not self.tried):
            self._look()
        return self.loaded

    def _look(self) -> None:
        from opkit import _core

        paths = torch_paths()
        first, self.tried, self.ended = not self.tried, True, False
        self.loaded = bridge.load(paths, _core.runtime_address())
        if self.loaded is None and first:
            bridge.ensure_in_background(paths, self.built)

    def built(self, path: object) -> None:
        """Let operators that would use the bridge plan their calls anew, because a build has ended with ``path``."""
        with lock:
            self.ended = path is not None
            waiting = list(self.waiting) if self.ended else []
        for operator in waiting:
            with operator.lock:
                operator.refreshed()


running_bridge = _Bridge()


def build() -> None:
    """Build the bridge to the running torch now, unless it is built, and use it from now on.

    Raises:
        ToolchainError, CompileError, CacheError: as ``opkit.kernels.bridge.build``.
    """
    running_bridge.built(bridge.build(torch_paths()))


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
        with lock:
            self.retired = True
            for _, installed in self.installed.values():
                installed.remove()
            self.installed.clear()
