"""Kernels of the IR, and the schedule that launches them.

A :class:`Kernel` is a loop nest, which emitters turn into a function. Statements run in order. Names of variables are unique in
a kernel. Loads and stores are at one flat index, in elements from the buffer's first.

A :class:`Schedule` is the compiler's last form of a graph before code: kernels and calls in order, and the places of buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

from opkit.compiler.ir.expr import Callee, Expr
from opkit.compiler.ir.index import Axis, Index
from opkit.compiler.ir.program import Buffer, Extern, Program

How = Literal["parallel", "plain", "vector"]


# ---- kernels ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KernelArgument:
    """A buffer that a kernel takes, as a pointer unless it is a number.

    Attributes:
        buffer: its name in the kernel.
        dtype: the type of its elements.
        written: whether the kernel stores to it.
        streamed: whether it is so large that stores should bypass the processor's caches.
        by_value: whether the kernel, on a GPU, takes its one element.
    """

    buffer: str
    dtype: str
    written: bool
    streamed: bool = False
    by_value: bool = False


@dataclasses.dataclass(frozen=True)
class Let:
    """A value with a name, computed once; a ``var`` of that name reads it until the block ends."""

    name: str
    value: Expr


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Memory of the thread, from here to the end of the block: ``length`` elements, uninitialised.

    A load or store whose buffer is ``name`` uses it. It is small (it should stay in the processor's cache).
    """

    name: str
    dtype: str
    length: Index


@dataclasses.dataclass(frozen=True)
class Store:
    """buffer[at] = value; with ``update``, buffer[at] = update(buffer[at], value), atomically where ``atomic``."""

    buffer: str
    at: Index
    value: Expr
    update: str | None = None
    atomic: bool = False


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """A variable that a later loop updates, from the reduction's neutral value.

    For "argmax" and "argmin", ``dtype`` is the compared type, and the variable ``<name>_at`` is the position (i64).
    """

    name: str
    dtype: str
    reduction: str


@dataclasses.dataclass(frozen=True)
class Update:
    """Combines a value with an accumulator; ``at`` is its position, for argmax and argmin."""

    name: str
    reduction: str
    value: Expr
    at: Index | None = None


@dataclasses.dataclass(frozen=True)
class Loop:
    """The statements for each value of an axis, in order.

    Attributes:
        axis: its variable and extent.
        body: the statements.
        how: "parallel": iterations are independent and may run in any thread (outermost loops alone);
            "vector": iterations are independent but for Updates, whose order does not count, and the innermost loop.
        stop: the loop ends early, at the first value of its axis where the first index is not below the second; not of a
            parallel or vector loop.
    """

    axis: Axis
    body: tuple[Statement, ...]
    how: How = "plain"
    stop: tuple[Index, Index] | None = None


Statement = Let | Scratch | Store | Accumulator | Update | Loop


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function.

    Attributes:
        name: an identifier.
        arguments: the buffers that it takes.
        sizes: the names of the symbolic sizes that it takes, after the buffers.
        body: statements; the parallel loops, if any, are outermost, around everything else. Several parallel loops directly
            within one another are one iteration space.
        grain: how many iterations of the parallel space are worth a thread; fewer run in the calling one.
        origins: the operators that it computes, for messages.
    """

    name: str
    arguments: tuple[KernelArgument, ...]
    sizes: tuple[str, ...]
    body: tuple[Statement, ...]
    grain: int = 1
    origins: tuple[str, ...] = ()


def walk(body: Iterable[Statement]) -> Iterator[Statement]:
    """Yield every statement, outer ones first."""
    for s in body:
        yield s
        if isinstance(s, Loop):
            yield from walk(s.body)


def callees(body: Iterable[Statement]) -> Iterator[Callee]:
    """Yield the functions of libraries that statements call, some more than once."""
    for s in walk(body):
        if isinstance(s, Let | Store | Update):
            yield from (node.data for node in s.value.walk() if node.op == "call")


def parallel(kernel: Kernel) -> tuple[list[Loop], tuple[Statement, ...]]:
    """Return the parallel loops around everything, outermost first, and the statements inside."""
    loops: list[Loop] = []
    body = kernel.body
    while len(body) == 1 and isinstance(body[0], Loop) and body[0].how == "parallel":
        loops.append(body[0])
        body = body[0].body
    return loops, body


# ---- schedules -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """A call of a kernel.

    Attributes:
        kernel: the kernel.
        buffers, sizes: the program's buffers and sizes for its arguments and sizes.
        joined: whether it is in a batch with the launch before it. Launches of a batch share one parallel region and run in
            any order, at the same time too: none of them touches what another one writes.
    """

    kernel: Kernel
    buffers: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    joined: bool = False


@dataclasses.dataclass(frozen=True)
class FusionRefusal:
    """Two steps that were not fused, and the reason."""

    first: str
    second: str
    reason: str

    def __str__(self) -> str:
        return f"{self.first} and {self.second}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A program with its kernels.

    Attributes:
        program: the program; its inputs and outputs are the schedule's.
        buffers: the program's buffers that are still needed, and those between kernels of one group, by name.
        steps: launches and calls in order.
        places: the first byte of each buffer in the arena (a multiple of 64). Buffers that are returned, and results that
            extern calls allocate, have none: they are allocated by themselves.
        arena: the bytes of the arena.
        refusals: the steps that were not fused, and the reasons.
        apart: the reasons why launches are in no batch, or not in an earlier one.
    """

    program: Program
    buffers: dict[str, Buffer]
    steps: tuple[KernelLaunch | Extern, ...]
    places: dict[str, Index]
    arena: Index
    refusals: tuple[FusionRefusal, ...] = ()
    apart: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """A kernel as a Triton function, and how to launch it.

    Attributes:
        name: the name of the function.
        text: the function.
        parameters: each parameter's name and type, as Triton writes it: "*bf16", "i64", "constexpr".
        constants: the values of those that are "constexpr".
        programs: the number of programs that it is launched with, over the names of the kernel's sizes.
        warps: the number of warps of a program.
        checks: whether it has device asserts; it is then compiled with ``debug=True`` and ``sanitize_overflow=False``.
        unaligned: the pointers that 16 may not divide.
    """

    name: str
    text: str
    parameters: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    programs: Index
    warps: int
    checks: bool = False
    unaligned: frozenset[str] = frozenset()


def batches(steps: Iterable[KernelLaunch | Extern]) -> list[list[KernelLaunch]]:
    """Return the launches among steps, batch by batch."""
    found: list[list[KernelLaunch]] = []
    for launch in steps:
        if isinstance(launch, KernelLaunch):
            if not launch.joined:
                found.append([])
            found[-1].append(launch)
    return found


def called_functions(launches: Iterable[KernelLaunch]) -> tuple[Callee, ...]:
    """Return the functions of libraries that kernels call, each once, in the order of the table that kernels take."""
    kernels = dict.fromkeys(launch.kernel for launch in launches)
    return tuple(dict.fromkeys(callee for kernel in kernels for callee in callees(kernel.body)))


def moments(steps: Iterable[KernelLaunch | Extern]) -> Iterator[tuple[int, KernelLaunch | Extern]]:
    """Yield each step with the number of its batch: buffers of one batch do not share memory."""
    number = -1
    for step in steps:
        number += not (isinstance(step, KernelLaunch) and step.joined)
        yield number, step
