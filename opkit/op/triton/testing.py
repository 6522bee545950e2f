"""Triton kernels without a GPU, compiled for every architecture."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from opkit.errors import ArgumentError, KernelError, OpkitError
from opkit.kernels.triton import binaries, compiling, targets
from opkit.op.core import Operator
from opkit.op.examples import calls as example_calls
from opkit.op.examples.arguments import ExampleCall
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.building import configs_for, request_for, values_of
from opkit.op.triton.launch import recording


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one architecture and one example, or why it was not.

    ``registers`` are those of one thread; ``shared`` and ``spills`` are bytes, of a block and of a thread.
    """

    operator: str
    kernel: str
    target: str
    example: str
    config: str
    registers: int = 0
    shared: int = 0
    spills: int = 0
    threads: int = 0
    error: str = ""
    skipped: str = ""


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What :func:`compile_for` found."""

    rows: tuple[Compiled, ...]

    @property
    def failures(self) -> tuple[Compiled, ...]:
        """What could not be compiled."""
        return tuple(row for row in self.rows if row.error)

    @property
    def ok(self) -> bool:
        """Whether everything was compiled."""
        return not self.failures

    def raise_for_failures(self) -> None:
        """Raise an error if anything was not compiled.

        Raises:
            KernelError: with every failure.
        """
        if self.failures:
            raise KernelError(
                "\n\n".join(f"{row.operator}, {row.kernel}, {row.target}: {row.error}" for row in self.failures)
            )

    def __str__(self) -> str:
        lines = [f"{'kernel':32} {'target':8} {'registers':>9} {'shared':>8} {'spills':>7} {'threads':>7}  example"]
        return "\n".join([*lines, *map(_line, self.rows)])


def _line(row: Compiled) -> str:
    head = f"{f'{row.operator}[{row.kernel}]':32} {row.target:8}"
    if row.error or row.skipped:
        return f"{head} {row.error.splitlines()[0] if row.error else row.skipped}"
    numbers = f"{row.registers:9} {row.shared:8} {row.spills:7} {row.threads:7}"
    return f"{head} {numbers}  {row.example}{' ' if row.config else ''}{row.config}"


def compile_for(
    op: Any, architectures: Sequence[str], *, args: Sequence[Mapping[str, Any]] | None = None
) -> CompileReport:
    """Compile the Triton kernels of an operator for architectures that need not be here.

    Args:
        op: made by ``opkit.custom_op``.
        architectures: such as "sm_80", "sm_90", "sm_100", "gfx942".
        args: example arguments by name, such as ``{"x": "bf16[4096, 1024]", "eps": 1e-6}``; by default the kernel's own
            ``examples=``, and without those, arguments made from the operator's annotations.

    Raises:
        ArgumentError: the operator has no Triton kernel, or there is no such architecture.

    >>> from opkit import testing
    >>> from examples.kernels import softmax                                             # doctest: +SKIP
    >>> print(testing.compile_for(softmax.softmax, ["sm_80", "sm_90", "gfx942"]))         # doctest: +SKIP
    """
    for architecture in architectures:
        targets.parse(architecture)
    operator: Operator = op._operator
    bounds = [bound for kernel in operator.kernels.kernels if (bound := _bound(kernel.function)) is not None]
    if not bounds:
        raise ArgumentError(f"{op.name} has no Triton kernel to compile. It has {_names(operator)}.")
    rows = [
        row
        for bound in bounds
        for call in example_calls.calls_of(operator, bound.kernel.examples if args is None else args)
        for row in _rows(operator, bound, call, architectures)
    ]
    return CompileReport(tuple(rows))


def compile_launches(function: Callable[[], object], architectures: Sequence[str]) -> CompileReport:
    """Compile what ``function`` launches by hand, for architectures that need not be here; nothing is launched.

    Args:
        function: is called without arguments, and gives its kernels tensors on the device "meta".
        architectures: such as "sm_80", "sm_90", "sm_100", "gfx942".

    Raises:
        ArgumentError: it launches nothing, or there is no such architecture.

    >>> # import torch; from my_ops import sums      # a triton_kernel
    >>> # print(compile_launches(lambda: sums(x=torch.empty(4096, device="meta"), out=torch.empty(4, device="meta")), ["sm_90"]))
    """
    for architecture in architectures:
        targets.parse(architecture)
    with recording() as launches:
        function()
    if not launches:
        raise ArgumentError("compile_launches: the function launches no Triton kernel by hand.")
    rows = [
        _filled(
            Compiled("launch", values.bound.kernel.name, target, f"launch {number}", ""),
            values.bound,
            functools.partial(request_for, values, None, target),
        )
        for target in architectures
        for number, values in enumerate(launches)
    ]
    return CompileReport(tuple(rows))


def _names(operator: Operator) -> str:
    return ", ".join(kernel.name for kernel in operator.kernels.kernels) or "no kernels"


def _bound(function: Any) -> BoundKernel | None:
    found = getattr(function, "bound", None)
    return found if isinstance(found, BoundKernel) and not found.kernel.interpreted else None


def _rows(
    operator: Operator, bound: BoundKernel, call: ExampleCall, architectures: Sequence[str]
) -> Iterator[Compiled]:
    values = values_of(operator, bound, call)
    for config in configs_for(values):
        for target in architectures:
            label = "" if config is None else config.label
            row = Compiled(operator.name, bound.name, target, str(call), label)
            yield _filled(row, bound, functools.partial(request_for, values, config, target))


def _filled(row: Compiled, bound: BoundKernel, request: Callable[[], compiling.CompileRequest]) -> Compiled:
    """Return a row with what was found by compiling, where the kernel is for its architecture."""
    only = bound.kernel.targets
    if only and targets.canonical(row.target) not in map(targets.canonical, only):
        return dataclasses.replace(row, skipped=f"the kernel is for {', '.join(only)}")
    try:
        found = binaries.resources_of(compiling.build(request()))
    except OpkitError as error:
        return dataclasses.replace(row, error=str(error))
    return dataclasses.replace(
        row, registers=found.registers, shared=found.shared, spills=found.spills, threads=found.threads
    )
