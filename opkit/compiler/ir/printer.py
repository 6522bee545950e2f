"""Print the forms of the compiler, for people and for tests.

>>> from opkit.compiler.ir.expr import load, op
>>> from opkit.compiler.ir.index import Axis, axis, index
>>> from opkit.compiler.ir.kernel import KernelArgument, Kernel, Loop, Store
>>> x = load("x", "f32", axis(0, 8))
>>> double = Store("y", axis(0, 8), op("add", x, x))
>>> arguments = (KernelArgument("x", "f32", False), KernelArgument("y", "f32", True))
>>> print(kernel_text(Kernel("double", arguments, (), (Loop(Axis(0, index(8)), (double,), "vector"),))))
kernel double(x: f32, y: f32 written)
  vector a0 < 8:
    y[a0] = add(x[a0], x[a0])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from opkit.compiler.ir.index import Index
from opkit.compiler.ir.kernel import (
    Accumulator,
    Kernel,
    KernelArgument,
    KernelLaunch,
    Let,
    Loop,
    Schedule,
    Scratch,
    Statement,
    Update,
)
from opkit.compiler.ir.program import Buffer, Compute, Extern, Program, ScalarItem, Step, Strided


def program_text(program: Program) -> str:
    """Return a program as text: inputs, buffers, steps, outputs."""
    inputs = ", ".join(map(str, program.inputs))
    lines = [f"program {program.name}({inputs})", *(f"  {_buffer(each)}" for each in program.buffers.values())]
    lines += [f"  {step_text(step)}" for step in program.steps]
    return "\n".join([*lines, f"  return {_arguments(program.outputs)}"])


def step_text(step: Step) -> str:
    """Return a step as one line: the buffer, and the formula of its elements or the call.

    >>> from opkit.compiler.ir.expr import load
    >>> from opkit.compiler.ir.index import axis, index
    >>> body = load("x", "f32", axis(0, 4), axis(1, 8))
    >>> step_text(Compute("y", (index(4), index(8)), (axis(0, 4),), body, "sum", frozenset({1})))
    'y[a0] = sum over a1 of x[a0, a1]  for a0 < 4, a1 < 8'
    """
    origin = f"  # {step.origin}" if step.origin else ""
    return (_compute(step) if isinstance(step, Compute) else _extern(step)) + origin


def schedule_text(schedule: Schedule) -> str:
    """Return a schedule as text: buffers with their places, steps, each kernel once, and the steps that were not fused."""
    lines = [f"schedule {schedule.program.name}: arena of {schedule.arena} bytes"]
    for buffer in schedule.buffers.values():
        place = f" at {schedule.places[buffer.name]}" if buffer.name in schedule.places else ""
        lines.append(f"  {_buffer(buffer)}{place}")
    lines += [f"  {_launch(step) if isinstance(step, KernelLaunch) else step_text(step)}" for step in schedule.steps]
    lines.append(f"  return {_arguments(schedule.program.outputs)}")
    kernels = dict.fromkeys(step.kernel for step in schedule.steps if isinstance(step, KernelLaunch))
    lines += [kernel_text(kernel) for kernel in kernels]
    lines += [f"not fused: {refusal}" for refusal in schedule.refusals]
    return "\n".join([*lines, *(f"apart: {reason}" for reason in schedule.apart)])


def kernel_text(kernel: Kernel) -> str:
    """Return the loop nest, a statement a line."""
    parameters = ", ".join([*map(_argument, kernel.arguments), *kernel.sizes])
    grain = f" grain {kernel.grain}" if kernel.grain != 1 else ""
    origins = [f"  # {origin}" for origin in kernel.origins]
    return "\n".join([f"kernel {kernel.name}({parameters}){grain}", *origins, *statements_text(kernel.body, "  ")])


def statements_text(body: Iterable[Statement], indent: str = "") -> list[str]:
    lines: list[str] = []
    for statement in body:
        lines.append(indent + _head(statement))
        if isinstance(statement, Loop):
            lines += statements_text(statement.body, indent + "  ")
    return lines


def _head(s: Statement) -> str:
    if isinstance(s, Loop):
        stop = f" while {s.stop[0]} < {s.stop[1]}" if s.stop is not None else ""
        return f"{'for' if s.how == 'plain' else s.how} a{s.axis.number} < {s.axis.extent}{stop}:"
    if isinstance(s, Let):
        return f"{s.name} = {s.value}"
    if isinstance(s, Scratch):
        return f"scratch {s.name}: {s.dtype}[{s.length}]"
    if isinstance(s, Accumulator):
        return f"accumulator {s.name}: {s.dtype} {s.reduction}"
    if isinstance(s, Update):
        return f"{s.name} {s.reduction}= {s.value}" + (f" at {s.at}" if s.at is not None else "")
    return f"{s.buffer}[{s.at}] {'atomic ' if s.atomic else ''}{s.update or ''}= {s.value}"


def _argument(argument: KernelArgument) -> str:
    return f"{argument.buffer}: {argument.dtype}{' written' if argument.written else ''}"


def _buffer(buffer: Buffer) -> str:
    place = f" in {buffer.memory} from {buffer.offset}" if buffer.whole else ""
    return (
        f"{buffer.role} {buffer.name}: {buffer.dtype}[{_list(buffer.shape)}] strides ({_list(buffer.strides)}){place}"
    )


def _compute(step: Compute) -> str:
    over = ", ".join(f"a{number}" for number in sorted(step.reduced))
    reduction = f"{step.reduction} over {over} of " if step.reduction else ""
    axes = ", ".join(f"a{number} < {extent}" for number, extent in enumerate(step.axes))
    loops = f"  for {axes}" if axes else ""
    return f"{step.buffer}[{_list(step.target)}] {step.update or ''}= {reduction}{step.body}{loops}"


def _extern(step: Extern) -> str:
    results = ", ".join("_" if name is None else str(name) for name in step.outputs)
    named = [f"{name}={_argument_text(value)}" for name, value in step.kwargs.items()]
    parameters = ", ".join([*map(_argument_text, step.args), *named])
    marks = [f"writes {', '.join(sorted(step.mutated))}"] if step.mutated else []
    marks += (["may alias"] if step.aliases else []) + (["into"] if step.out else [])
    marks += [step.reason] if step.reason else []
    return f"{results or '_'} = call {step.target}({parameters})" + (f"  ({'; '.join(marks)})" if marks else "")


def _launch(launch: KernelLaunch) -> str:
    return f"{'in parallel' if launch.joined else 'launch'} {launch.kernel.name}({', '.join([*launch.buffers, *launch.sizes])})"


def _arguments(values: Sequence[Any]) -> str:
    return ", ".join(map(_argument_text, values))


def _argument_text(value: Any) -> str:
    if isinstance(value, Strided):
        return f"{value.buffer}[{_list(value.shape)}; {_list(value.strides)}; {value.offset}]"
    if isinstance(value, ScalarItem):
        return f"item {value.buffer}"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return f"[{_arguments(value)}]"
    return str(value)


def _list(of: Iterable[Index]) -> str:
    return ", ".join(map(str, of))
