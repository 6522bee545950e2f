"""Register Triton kernels with operators: they are launched from C, through a table that Python fills."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from opkit.errors import KernelError
from opkit.kernels.facts import Facts
from opkit.kernels.tuning.record_format import Identity
from opkit.op import kernel_kinds
from opkit.op.core import Operator
from opkit.op.dispatch.selection import RegisteredKernel
from opkit.op.native.compiled import CompiledFunction
from opkit.op.schema_facts import facts_of
from opkit.op.triton import graph
from opkit.op.triton.binding import BoundKernel, bind
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launcher_table import Launching
from opkit.op.triton.machine import Machine, machine_of
from opkit.op.triton.python import PythonLaunch

if TYPE_CHECKING:
    from opkit import _core


class TritonFunction(CompiledFunction):
    """A Triton kernel as the function of a :class:`opkit.op.dispatch.selection.Kernel`."""

    def __init__(self, operator: Operator, kernel: TritonKernel, name: str, machine: Machine) -> None:
        super().__init__(operator, name)
        self.kernel = kernel
        self.machine = machine
        self.bound: BoundKernel = bind(kernel, facts_of(operator), name)
        self.launching = Launching(self.bound, machine, str(getattr(operator.function, "__module__", "")))

    @property
    def device(self) -> str:
        """The device type that it runs on."""
        return self.machine.device

    @property
    def facts(self) -> Facts:
        """The operator as the kernel sees it."""
        return self.bound.facts

    @property
    def visible(self) -> BoundKernel | None:
        """The kernel, if torch.compile can see its launch."""
        return None if graph.refusal(self.bound) else self.bound

    @property
    def examples(self) -> Sequence[Mapping[str, Any]]:
        """Arguments that the author named, to compile and tune for."""
        return self.kernel.examples

    def identities(self) -> Sequence[Identity]:
        """Return the kernel as its tuning results are recorded; nothing where there is nothing to choose."""
        return [self.launching.chooser.identity] if self.kernel.configs else []

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return what decides what the kernel computes."""
        return self.kernel.contract_parts()

    def refusal(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Return why the kernel does not take a call; empty where it does."""
        for name, tensor in self.operator.named_tensors(args, kwargs):
            if tensor.layout is not torch.strided:
                return f"{name} is {tensor.layout}; it takes dense tensors"
            if tensor.is_complex():
                return f"{name} has {tensor.dtype}, which Triton does not have"
        return ""

    def ready(self) -> bool:
        """Put the kernel into the dispatcher."""
        self.load()
        return True

    def open(self) -> _core.KernelLibrary:
        """Return the kernel as the runtime has it: a description, and the launcher."""
        return self.launching.library()


def _kernel(operator: Operator, kernel: TritonKernel, device: str | None, name: str) -> RegisteredKernel:
    if kernel.interpreted:  # with TRITON_INTERPRET=1 a kernel for the GPU runs on the CPU
        return RegisteredKernel(name, "cpu", PythonLaunch(operator, kernel, name))
    machine = machine_of(device)
    if machine is None:
        raise KernelError(
            f"{operator.name}: {name} is a Triton kernel, which runs on cuda tensors (of NVIDIA's and AMD's GPUs); register it "
            f'with register_kernel("cuda", ...), not for {device!r}. On the CPU it runs with opkit.testing.interpret.'
        )
    if kernel.hooked:
        return RegisteredKernel(name, device, PythonLaunch(operator, kernel, name))
    return RegisteredKernel(name, device, TritonFunction(operator, kernel, name, machine), native=True)


kernel_kinds.register(TritonKernel, _kernel)
