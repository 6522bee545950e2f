"""This module defines the execution plan of a graph: what a call needs of a Schedule once its kernels are C."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from opkit.compiler.ir.expr import Callee
from opkit.compiler.ir.graph import OpaqueValue
from opkit.compiler.ir.index import Index, Size
from opkit.compiler.ir.kernel import KernelLaunch, Schedule, called_functions
from opkit.compiler.ir.program import Buffer, Extern, ScalarItem, Strided


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive launches of kernels: one call of the function ``opkit_segment_<number>``.

    Attributes:
        number: the number of the function.
        buffers: the buffers that its kernels take, each once.
        origins: the operators of each launch, for messages.
    """

    number: int
    buffers: tuple[str, ...]
    origins: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """How a graph runs.

    Attributes:
        name: the graph's name.
        inputs, outputs: as in a Program.
        buffers: the buffers, by name.
        steps: the steps, in order.
        places, arena: as in a Schedule.
        table: the buffers in the order of the table of pointers that segments take.
        sizes: the names of the sizes in the order of the table of sizes.
        functions: the library functions that kernels call, in the order of their table.
    """

    name: str
    inputs: tuple[str | Index | OpaqueValue, ...]
    buffers: dict[str, Buffer]
    steps: tuple[Segment | Extern, ...]
    outputs: tuple[Any, ...]
    places: dict[str, Index]
    arena: Index
    table: tuple[str, ...]
    sizes: tuple[str, ...]
    functions: tuple[Callee, ...] = ()

    @property
    def segments(self) -> int:
        """The number of functions in the C of its kernels."""
        return sum(isinstance(step, Segment) for step in self.steps)


def plan(schedule: Schedule) -> tuple[ExecutionPlan, list[list[KernelLaunch]]]:
    """Return the plan of a schedule, and the launches of each of its segments."""
    steps, launches = _steps(schedule)
    used = dict.fromkeys(name for step in steps if isinstance(step, Segment) for name in step.buffers)
    program = schedule.program
    buffers = {name: each for name, each in (program.buffers | schedule.buffers).items() if each.whole is None}
    made = ExecutionPlan(
        program.name, program.inputs, buffers, tuple(steps), program.outputs, schedule.places, schedule.arena,
        tuple(used), (), called_functions(launch for segment in launches for launch in segment),
    )  # fmt: skip
    names = dict.fromkeys(n for segment in launches for launch in segment for n in launch.sizes)
    names |= dict.fromkeys(leaf.name for at in indices(made) for leaf in at.leaves() if isinstance(leaf, Size))
    return dataclasses.replace(made, sizes=tuple(sorted(names))), launches


def _steps(schedule: Schedule) -> tuple[list[Segment | Extern], list[list[KernelLaunch]]]:
    steps: list[Segment | Extern] = []
    launches: list[list[KernelLaunch]] = []
    for step in schedule.steps:
        if isinstance(step, Extern):
            steps.append(step)
            continue
        if not steps or isinstance(steps[-1], Extern):
            launches.append([])
            steps.append(Segment(len(launches) - 1, ()))
        launches[-1].append(step)
        steps[-1] = _segment(len(launches) - 1, launches[-1])
    return steps, launches


def _segment(number: int, launches: list[KernelLaunch]) -> Segment:
    names = dict.fromkeys(name for launch in launches for name in launch.buffers)
    return Segment(number, tuple(names), tuple("; ".join(launch.kernel.origins) for launch in launches))


def indices(of: Any) -> Iterator[Index]:
    """Yield every index in a plan, or in a part of one."""
    if isinstance(of, Index):
        yield of
    elif isinstance(of, dict):
        yield from (found for each in of.values() for found in indices(each))
    elif isinstance(of, list | tuple):
        yield from (found for each in of for found in indices(each))
    elif isinstance(of, ExecutionPlan | Buffer | Extern | Strided):
        yield from indices([getattr(of, field.name) for field in dataclasses.fields(of)])


def tensors(of: Any) -> Iterator[Strided | ScalarItem]:
    """Yield every tensor among arguments, and every tensor whose number is an argument."""
    if isinstance(of, Strided | ScalarItem):
        yield of
    elif isinstance(of, dict):
        yield from (found for each in of.values() for found in tensors(each))
    elif isinstance(of, list | tuple):
        yield from (found for each in of for found in tensors(each))


def mentioned(step: Segment | Extern) -> list[str]:
    """Return the buffers that a step reads or writes, each once."""
    if isinstance(step, Segment):
        return list(step.buffers)
    operands = [each.buffer for each in tensors((step.args, step.kwargs))]
    return list(dict.fromkeys([*operands, *(name for name in step.outputs if isinstance(name, str)), *step.mutated]))
