"""What each kind of kernel that an author may register becomes."""

from __future__ import annotations

from typing import Any

from opkit.errors import KernelError
from opkit.kernels.native import NativeKernel
from opkit.op.core import Operator
from opkit.op.native import NativeFunction, check_device
from opkit.op.prepared import PreparedKernel
from opkit.op.selection import Kernel
from opkit.op.triton.function import TritonFunction
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.machine import machine_of
from opkit.op.triton.python import PythonLaunch


def make(operator: Operator, given: Any, device: str | None, name: str | None) -> Kernel:
    """The kernel of ``operator`` on ``device`` that an author registered as ``given``.

    Raises:
        KernelError: it is none, or cannot run on that device.
    """
    for kind, maker in _MAKERS.items():
        if isinstance(given, kind):
            return maker(operator, given, device, name or given.name)
    if not callable(given):
        raise KernelError(f"{operator.name}: a kernel must be callable, got {given!r}")
    chosen = name or operator.kernels.free_name(getattr(given, "__name__", ""), device)
    prepared = (
        isinstance(given, PreparedKernel) and not operator.signature.flattened
    )  # codecs hide what calls differ in
    return Kernel(chosen, device, operator.flat(given), prepared=prepared)


def _native(operator: Operator, given: NativeKernel, device: str | None, name: str) -> Kernel:
    check_device(operator, given, device)
    return Kernel(name, device, NativeFunction(operator, given, name), native=True)


def _triton(operator: Operator, given: TritonKernel, device: str | None, name: str) -> Kernel:
    if given.interpreted:  # TRITON_INTERPRET=1: what is meant for the GPU runs on the CPU
        return Kernel(name, "cpu", PythonLaunch(operator, given, name))
    machine = machine_of(device)
    if machine is None:
        raise KernelError(
            f"{operator.name}: {name} is a Triton kernel, which runs on cuda tensors (of NVIDIA's and AMD's GPUs); register it "
            f'with register_kernel("cuda", ...), not for {device!r}. On the CPU it runs with opkit.testing.interpret.'
        )
    if given.hooked:
        return Kernel(name, device, PythonLaunch(operator, given, name))
    return Kernel(name, device, TritonFunction(operator, given, name, machine), native=True)


_MAKERS: dict[type, Any] = {NativeKernel: _native, TritonKernel: _triton}
