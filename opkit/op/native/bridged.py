"""The bridge to the running torch, by which an operator's plain calls run in C without Python.

``opkit.kernels.bridge`` compiles and loads the bridge. ``compiled`` installs kernels in it; they are suspended when a kernel or
rule is registered or forced.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

from opkit.kernels import bridge
from opkit.op.torch_private import torch_paths

_log = logging.getLogger("opkit.bridge")
lock = threading.RLock()


@functools.cache
def loaded() -> bridge.Bridge | None:
    """Return the bridge to the running torch; None, with a line in the log, if it is not built."""
    from opkit import _core

    found = bridge.load(torch_paths(), _core.runtime_address())
    if found is None:
        _log.info(
            "calls of compiled kernels go through Python; `opkit bridge` builds what saves 1 to 2 us a call, once"
        )
    return found


def build() -> None:
    """Build the bridge to the running torch now, unless it is built; kernels whose first call comes later use it.

    Raises:
        ToolchainError, CompileError, CacheError: as ``opkit.kernels.bridge.build``.
    """
    bridge.build(torch_paths())
    loaded.cache_clear()


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
