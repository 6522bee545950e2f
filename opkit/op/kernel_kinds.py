"""The kinds of kernels that ``register_kernel`` takes: one table, in which the module of each kind registers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opkit.errors import KernelError
from opkit.op.core import Operator
from opkit.op.dispatch.prepared import PreparedKernel
from opkit.op.dispatch.selection import RegisteredKernel

Maker = Callable[[Operator, Any, str | None, str], RegisteredKernel]
_makers: dict[type, Maker] = {}


def register(kind: type, maker: Maker) -> None:
    """Take objects of class ``kind`` as kernels: ``maker(operator, object, device, name)`` returns the kernel."""
    _makers[kind] = maker


def make(operator: Operator, kernel: Any, device: str | None, name: str | None) -> RegisteredKernel:
    """Return the kernel of ``operator`` on ``device`` for an object that was passed to ``register_kernel``.

    Raises:
        KernelError: the object is not a kernel, or cannot run on that device.
    """
    for kind, maker in _makers.items():
        if isinstance(kernel, kind):
            return maker(operator, kernel, device, name or kernel.name)
    if not callable(kernel):
        raise KernelError(f"{operator.name}: a kernel must be callable, got {kernel!r}")
    chosen = name or operator.kernels.free_name(getattr(kernel, "__name__", ""), device)
    # with flattened arguments, calls of equal shapes can still differ in what the codecs hold
    prepared = isinstance(kernel, PreparedKernel) and not operator.signature.flattened
    return RegisteredKernel(chosen, device, operator.flat(kernel), prepared=prepared)
