"""This module compiles and loads the Triton kernels of a graph.

Kernels are compiled in threads, for Triton's compiler and ptxas run without Python's lock most of the time. A process that finds
all of them in the cache on the disk does not import Triton.
"""

from __future__ import annotations

import contextvars
import hashlib
import linecache
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from opkit.compiler.ir.kernel import TritonKernel
from opkit.compiler.run import plan_cache
from opkit.compiler.run.library import LoadedKernel, LoadedSegments
from opkit.errors import ToolchainError
from opkit.kernels.triton import compiling, stored
from opkit.kernels.triton.binaries import Binary
from opkit.op.triton.variants import Machine, machine_of

_WORKERS = 16


class GpuKernelsBuild:
    """The kernels of a graph, which are compiled in the background.

    Args:
        kernels: the kernels.
        text: the Python module with their functions.
        device: the device that they run on.
    """

    def __init__(self, kernels: Sequence[TritonKernel], text: str, device: torch.device) -> None:
        machine = _machine(device)
        self._device, self._module = device, _Module(text)
        target = machine.target(device.index or 0)
        self._binaries = [_submit(self._build, kernel, target) for kernel in kernels]

    def _build(self, kernel: TritonKernel, target: str) -> Binary:
        options: dict[str, Any] = {"num_warps": kernel.warps}
        if kernel.checks:
            options |= {"debug": True, "sanitize_overflow": False}
        # the name is a hash of what is computed, and the compiler's own sources decide the text
        parts = (plan_cache.versions(), kernel, sorted(options.items()), target)
        name = stored.named_key(hashlib.sha256(repr(parts).encode()).hexdigest())
        found = None if name is None else stored.find_named(name)
        if found is not None:
            return found
        pointers = frozenset(p for p, kind in kernel.parameters if kind.startswith("*")) - kernel.unaligned
        request = compiling.CompileRequest(
            self._module.function(kernel.name),
            dict(kernel.parameters),
            dict(kernel.constants),
            pointers,
            options,
            target,
        )
        built = compiling.build(request)
        key = stored.key(compiling.identity(request))
        if name is not None and key is not None:
            stored.note(name, key)
        return built

    def binaries(self) -> list[Binary]:
        """Wait for the compiler, and return the compiled kernels.

        Raises:
            CompileError: Triton refused one.
        """
        return [future.result() for future in self._binaries]

    def wait(self) -> LoadedSegments:
        """Wait for the compiler, and return the kernels on the device.

        Raises:
            CompileError: Triton refused one.
            RuntimeError: the driver refused one.
        """
        return LoadedSegments(kernels=[loaded(each, self._device) for each in self.binaries()])


def bandwidth(device: torch.device) -> float | None:
    """Return the bytes a second that a GPU's memory moves; None if torch does not know the memory's clock.

    Memory of AMD's GPUs moves more than two words a cycle, and how many depends on its kind.
    """
    properties = torch.cuda.get_device_properties(device)
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return kilohertz * 1e3 * 2 * bits / 8 or None if torch.version.hip is None else None


def _machine(device: torch.device) -> Machine:
    machine = machine_of(device.type)
    if machine is None:
        raise ToolchainError(f"opkit cannot launch kernels on {device}.")
    return machine


def loaded(binary: Binary, device: torch.device) -> LoadedKernel:
    """Return a kernel on a device.

    Raises:
        RuntimeError: the driver refused it.
    """
    from opkit import _core

    found = _core.Binary(
        _machine(device).driver(), binary.image, binary.name, threads=binary.threads, shared=binary.shared
    )  # its functions stay loaded when it goes
    return LoadedKernel(found.function(device.index or 0), binary.threads, binary.shared)


# ---- Triton's functions ----------------------------------------------------------------------------------------------


class _Module:
    """A generated module; it is executed, and Triton imported, when the first of its functions is compiled."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._names: dict[str, Any] = {}
        self._lock = threading.Lock()

    def function(self, name: str) -> Any:
        with self._lock:
            if not self._names:
                file = f"<opkit kernels {hashlib.sha256(self.text.encode()).hexdigest()[:16]}>"
                linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
                names: dict[str, Any] = {"__name__": "opkit_kernels"}
                exec(compile(self.text, file, "exec"), names)
                self._names = names
            return self._names[name]


# ---- threads ---------------------------------------------------------------------------------------------------------

_pool: ThreadPoolExecutor | None = None
_process = 0
_lock = threading.Lock()


def _submit(function: Any, *arguments: Any) -> Future[Any]:
    """Run a function in a thread, with the settings of this one."""
    global _pool, _process
    with _lock:
        if _pool is None or _process != os.getpid():  # a forked process does not have the threads
            _pool, _process = ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1), "opkit-triton"), os.getpid()
        return _pool.submit(contextvars.copy_context().run, function, *arguments)
