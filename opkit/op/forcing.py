"""``opkit.use_kernel``: force a kernel for the calls in a context."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from opkit.errors import KernelError
from opkit.op.dispatch.selection import REFERENCE, forced_kernels
from opkit.op.operator import CustomOp


@contextlib.contextmanager
def use_kernel(op: CustomOp[Any, Any], name: str) -> Generator[None]:
    """Force the kernel ``name`` of ``op``, or "reference", for calls within the context and thread.

    Raises:
        KernelError: there is no such kernel, or a call's device is not the kernel's.

    >>> import opkit, torch
    >>> with opkit.use_kernel(opkit.nn.swiglu, "reference"):
    ...     opkit.nn.swiglu(torch.zeros(2), torch.ones(2))
    tensor([0., 0.])
    """
    if not isinstance(op, CustomOp):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise KernelError(f"opkit.use_kernel takes an operator made by opkit.custom_op, got {type(op).__name__}")
    operator = op._operator
    if name != REFERENCE:
        operator.kernels.named(name)
    token = forced_kernels.set({**forced_kernels.get(), operator.name: name})
    op._force(+1)
    try:
        yield
    finally:
        forced_kernels.reset(token)
        op._force(-1)
