"""This module defines what a call of a graph needs once its kernels are C: the execution plan and its torch objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from opkit.compiler.ir.expr import Callee
from opkit.compiler.ir.graph import OpaqueValue
from opkit.compiler.ir.index import Index, Symbol, size
from opkit.compiler.ir.kernel import Kernel, KernelLaunch, Schedule, TritonKernel, called_functions
from opkit.compiler.ir.program import Buffer, Extern, ScalarItem, Strided, reads, writes
from opkit.compiler.run import torch_private as private
from opkit.op import registry


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive launches of kernels: one call of the function ``opkit_segment_<number>``.

    Attributes:
        number: the number of the function.
        buffers: the buffers that its kernels take, each once.
        origins: the operators of each launch, for messages.
        first: where the table of pointers that it takes begins in the plan's.
    """

    number: int
    buffers: tuple[str, ...]
    origins: tuple[str, ...] = ()
    first: int = 0


@dataclasses.dataclass(frozen=True)
class GpuLaunch:
    """A launch of a kernel on a GPU.

    Attributes:
        kernel: the number of the kernel in ``ExecutionPlan.kernels``.
        buffers, sizes: the values of its parameters.
        programs: the number of programs.
        origin: the operators that it computes, for messages.
    """

    kernel: int
    buffers: tuple[str, ...]
    sizes: tuple[Index, ...]
    programs: Index
    origin: str = ""


PlanStep = Segment | GpuLaunch | Extern


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """How a graph runs.

    Attributes:
        name: the graph's name.
        inputs, outputs: as in a Program.
        buffers: the buffers, by name.
        steps: the steps, in order.
        places, arena: as in a Schedule.
        table: the buffers in the order of the table of pointers that segments take; in a plan of several, a buffer may be in the
            tables of more than one.
        sizes: the names of the sizes in the order of the table of sizes.
        functions: the library functions that kernels call, in the order of their table.
        device: the device that it runs on, such as "cuda:0".
        kernels: the kernels that ``GpuLaunch`` steps launch, without their text.
        written: on a GPU, the inputs that it writes to.
    """

    name: str
    inputs: tuple[str | Index | OpaqueValue, ...]
    buffers: dict[str, Buffer]
    steps: tuple[PlanStep, ...]
    outputs: tuple[Any, ...]
    places: dict[str, Index]
    arena: Index
    table: tuple[str, ...]
    sizes: tuple[str, ...]
    functions: tuple[Callee, ...] = ()
    device: str = "cpu"
    kernels: tuple[TritonKernel, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def segments(self) -> int:
        """The number of functions in the C of its kernels."""
        return sum(isinstance(step, Segment) for step in self.steps)


def plan(schedule: Schedule) -> tuple[ExecutionPlan, list[list[KernelLaunch]]]:
    """Return the plan of a schedule for the CPU, and the launches of each of its segments."""
    steps, launches = _steps(schedule)
    functions = called_functions(launch for segment in launches for launch in segment)
    names = [name for segment in launches for launch in segment for name in launch.sizes]
    return _plan(schedule, steps, names, functions=functions), launches


def gpu_plan(schedule: Schedule, kernels: Mapping[Kernel, TritonKernel], device: str) -> ExecutionPlan:
    """Return the plan of a schedule for a GPU; ``kernels`` are those of its launches."""
    numbers = {kernel: number for number, kernel in enumerate(kernels)}
    not_copied, unaligned = _used_in_place(schedule), {kernel: set[str]() for kernel in kernels}
    steps: list[PlanStep] = []
    for step in schedule.steps:
        if isinstance(step, KernelLaunch):
            sizes = {name: size(of) for name, of in zip(step.kernel.sizes, step.sizes, strict=True)}
            programs = _with_sizes(kernels[step.kernel].programs, sizes)
            origin = "; ".join(step.kernel.origins)
            parameters = zip(step.kernel.arguments, step.buffers, strict=True)
            unaligned[step.kernel] |= {argument.buffer for argument, buffer in parameters if buffer in not_copied}
            steps.append(GpuLaunch(numbers[step.kernel], step.buffers, tuple(sizes.values()), programs, origin))
        else:
            steps.append(step)
    plain = tuple(
        dataclasses.replace(of, text="", unaligned=frozenset(unaligned[kernel])) for kernel, of in kernels.items()
    )
    written = tuple(sorted(_written(schedule).intersection(schedule.program.inputs)))
    return _plan(schedule, steps, (), device=device, kernels=plain, written=written)


def _used_in_place(schedule: Schedule) -> set[str]:
    """Return the inputs and results of calls that are used where they are; others are copied from addresses that are not aligned.

    Operators read other elements of their storage or return views of them, or they are the caller's, or views, and the graph
    writes to them or returns them.
    """
    calls = [step for step in schedule.steps if isinstance(step, Extern)]
    inputs = {name for name in schedule.program.inputs if isinstance(name, str)}
    views = {name for call in calls if call.aliases for name in writes(call)}
    results = {name for call in calls if not call.out for name in writes(call)}
    storages = {name for call in calls if call.uses_storage for name in reads(call)}
    shared = {each.buffer for each in tensors(schedule.program.outputs)} | _written(schedule)
    return (storages & (inputs | results)) | (shared & (inputs | views))


def _written(schedule: Schedule) -> set[str]:
    found: set[str] = set()
    for step in schedule.steps:
        if isinstance(step, KernelLaunch):
            found |= {b for a, b in zip(step.kernel.arguments, step.buffers, strict=True) if a.written}
        else:
            found |= step.mutated
    return found


def _with_sizes(at: Index, sizes: Mapping[str, Index]) -> Index:
    return at.substitute({leaf: sizes[leaf.name] for leaf in at.leaves() if isinstance(leaf, Symbol)})


def _plan(schedule: Schedule, steps: Sequence[PlanStep], names: Iterable[str], **rest: Any) -> ExecutionPlan:
    used = dict.fromkeys(name for step in steps if not isinstance(step, Extern) for name in step.buffers)
    program = schedule.program
    buffers = {name: each for name, each in (program.buffers | schedule.buffers).items() if each.whole is None}
    made = ExecutionPlan(
        program.name, program.inputs, buffers, tuple(steps), program.outputs, schedule.places, schedule.arena,
        tuple(used), (), **rest,
    )  # fmt: skip
    names = dict.fromkeys(names)
    names |= dict.fromkeys(leaf.name for at in indices(made) for leaf in at.leaves() if isinstance(leaf, Symbol))
    return dataclasses.replace(made, sizes=tuple(sorted(names)))


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


def one_launch_each(
    plan: ExecutionPlan, launches: Sequence[Sequence[KernelLaunch]]
) -> tuple[ExecutionPlan, list[list[KernelLaunch]]]:
    """Return a plan of :func:`plan` and its launches with a segment for each launch."""
    steps: list[PlanStep] = []
    found: list[list[KernelLaunch]] = []
    for step in plan.steps:
        for launch in launches[step.number] if isinstance(step, Segment) else ():
            found.append([dataclasses.replace(launch, joined=False)])
            steps.append(_segment(len(found) - 1, found[-1]))
        if not isinstance(step, Segment):
            steps.append(step)
    return dataclasses.replace(plan, steps=tuple(steps)), found


def indices(of: Any) -> Iterator[Index]:
    """Yield every index in a plan, or in a part of one."""
    if isinstance(of, Index):
        yield of
    elif isinstance(of, dict):
        yield from (found for each in of.values() for found in indices(each))
    elif isinstance(of, list | tuple):
        yield from (found for each in of for found in indices(each))
    elif isinstance(of, ExecutionPlan | Buffer | Extern | GpuLaunch | Strided):
        yield from indices([getattr(of, field.name) for field in dataclasses.fields(of)])


def tensors(of: Any) -> Iterator[Strided | ScalarItem]:
    """Yield every tensor among arguments, and every tensor whose number is an argument."""
    if isinstance(of, Strided | ScalarItem):
        yield of
    elif isinstance(of, dict):
        yield from (found for each in of.values() for found in tensors(each))
    elif isinstance(of, list | tuple):
        yield from (found for each in of for found in tensors(each))


def mentioned(step: PlanStep) -> list[str]:
    """Return the buffers that a step reads or writes, each once."""
    if not isinstance(step, Extern):
        return list(dict.fromkeys(step.buffers))
    operands = [each.buffer for each in tensors((step.args, step.kwargs))]
    return list(dict.fromkeys([*operands, *(name for name in step.outputs if isinstance(name, str)), *step.mutated]))


# ---- torch objects: operators, constant tensors, and values that arguments name --------------------------------------

_MAX_ELEMENTS = 256  # of a constant tensor


@dataclasses.dataclass(frozen=True)
class GraphConstants:
    """The torch objects that a plan uses, stored as JSON; the fields are those of ``opkit.compiler.capture.conversion.Captured``.

    Attributes:
        tensors: constant tensors, by node.
        targets: the functions that its operators are called by, by target.
        opaques: the values of :class:`OpaqueValue` arguments, by text.
        computed: Python expressions of sizes that the runtime computes from others, by name.
        resolved: the numbers of the inputs that may come with other strides, conjugated or negated.
    """

    tensors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    targets: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    opaques: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    computed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    resolved: frozenset[int] = frozenset()


def constants_to_json(constants: GraphConstants) -> dict[str, Any]:
    """Return the constants of a graph as JSON.

    Raises:
        TypeError: they contain something that text cannot name: a function, a module, a large tensor.
    """
    for text, target in constants.targets.items():
        if (
            text != "getitem"
            and not private.is_torchs_own(target)
            and not registry.find(private.qualified_name(target))
        ):
            raise TypeError(f"it calls {text}")
    return {
        "constants": {name: _constant(tensor) for name, tensor in constants.tensors.items()},
        "opaques": opaque_names(constants.opaques),
        "computed": dict(constants.computed),
        "resolved": sorted(constants.resolved),
    }


def opaque_names(opaques: Mapping[str, Any]) -> list[str]:
    """Return the texts that :func:`named` finds the values of OpaqueValue arguments by.

    Raises:
        TypeError: text cannot name one.
    """
    for text, value in opaques.items():
        if named(text) != value:
            raise TypeError(f"an argument is {text}")
    return list(opaques)


def constants_from_json(content: Mapping[str, Any]) -> GraphConstants:
    """Return the constants that :func:`to_json` wrote, without targets: these are looked up by name."""
    return GraphConstants(
        {name: _tensor(*parts) for name, parts in content["constants"].items()},
        {},
        {text: named(text) for text in content["opaques"]},
        content["computed"],
        frozenset(content["resolved"]),
    )


def named(text: str) -> Any:
    """Return the dtype, device, layout or memory format of this name, or None if none has it."""
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."), None)
    try:
        return torch.device(text)
    except RuntimeError:
        return None


def _constant(tensor: torch.Tensor) -> list[Any]:
    if tensor.numel() > _MAX_ELEMENTS or not tensor.is_contiguous() or tensor.is_complex():
        raise TypeError(f"it holds a tensor of {tuple(tensor.shape)}")
    with private.without_modes():  # graphs are traced with fake tensors, and this one is real
        numbers = tensor.flatten().tolist()
    return [str(tensor.dtype), list(tensor.shape), str(tensor.device), numbers]


def _tensor(dtype: str, shape: list[int], device: str, numbers: list[Any]) -> torch.Tensor:
    with torch.inference_mode(False):  # kernels read the address: on a GPU, that of memory of the CPU is illegal
        return torch.tensor(numbers, dtype=named(dtype), device=device).reshape(shape)
