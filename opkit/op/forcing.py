"""``opkit.use_kernel``: force a kernel for the calls in a context; or for one call, also in graphs, which hold no contexts."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch

from opkit.errors import KernelError
from opkit.op.definition import custom_op
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


def with_kernel_argument(op: CustomOp[Any, Any]) -> CustomOp[Any, Any]:
    """Define the operator ``<name>_with_kernel``: ``op`` with a last argument ``kernel``, the name of the kernel that runs.

    It is for :func:`call_kernel`. Compilers do not look into it; its rules for vmap and gradients are registered by the caller.
    """

    def run(*arguments: Any) -> Any:
        with use_kernel(op, arguments[-1]):
            return op(*arguments[:-1])

    def fake(*arguments: Any) -> Any:
        if arguments[-1] != REFERENCE:
            op._operator.kernels.named(arguments[-1])
        return op(*arguments[:-1])

    operator = op._operator
    schema = operator.schema_text.replace(") -> ", ", str kernel) -> ")
    found = custom_op(f"{operator.name}_with_kernel", run, mutates_args=(), schema=schema, opaque=True)
    found.register_fake(fake)
    return found


def call_kernel(op: CustomOp[Any, Any], forced: CustomOp[Any, Any], kernel: str, call: Sequence[Any]) -> Any:
    """Call ``op`` with a kernel; while a compiler traces, ``forced``, which :func:`with_kernel_argument` made of it."""
    if torch.compiler.is_compiling():
        return forced(*call, kernel)
    with use_kernel(op, kernel):
        return op(*call)
