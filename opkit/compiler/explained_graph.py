"""This module describes one compiled graph as text: its forms, its kernels, why steps were not fused, and its memory plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from opkit.compiler.diagnostics import CompiledGraph, batch_texts
from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.index import Index
from opkit.compiler.ir.kernel import Kernel, KernelLaunch, Schedule, TritonKernel, moments
from opkit.compiler.ir.printer import kernel_text, program_text
from opkit.compiler.ir.program import Buffer, Extern, reads, writes
from opkit.compiler.kernel_figures import KernelFigures, call_figures, figures
from opkit.compiler.lower.scheduling import nbytes
from opkit.kernels.triton.binaries import Binary, Resources, resources_of


@dataclasses.dataclass(frozen=True)
class KernelText:
    """A kernel.

    Attributes:
        name: its name.
        operators: the operators that it computes, in order.
        origins: the same with the user's lines.
        text: its loop nest.
        launches: the number of its launches in a call of the graph.
        source: its function, in C or Triton.
        figures: what its first launch must do at least, for the sizes with which the graph was compiled.
        resources: what the compiled function takes of the hardware; of Triton's.
    """

    name: str
    operators: tuple[str, ...]
    origins: tuple[str, ...]
    text: str
    launches: int
    source: str = ""
    figures: KernelFigures | None = None
    resources: Resources | None = None


@dataclasses.dataclass(frozen=True)
class StepText:
    """A step of a graph: a launch of a kernel, or a call of one of torch's operators.

    Attributes:
        name: the name of the kernel, or of the operator.
        kernel: the number of the kernel in ``GraphExplanation.kernels``; None if it is a call.
        origins: the operators that it computes, with the user's lines.
        reads, writes: the buffers, with dtypes and sizes, by name.
        figures: what it must do at least, for the sizes with which the graph was compiled.
        reason: why the operator is called and not compiled, if there is more to say than that torch computes it best.
        seconds: its measured time; None if it was not measured.
    """

    name: str
    kernel: int | None
    origins: tuple[str, ...]
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    figures: KernelFigures
    reason: str = ""
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class BufferPlace:
    """A buffer in the arena.

    Attributes:
        buffer: its name in the program.
        begin, nbytes: its bytes, for the sizes with which the graph was compiled.
        first, last: the first and the last step that need it.
        reuses: the earlier buffers whose memory it reuses.
    """

    buffer: str
    begin: int
    nbytes: int
    first: int
    last: int
    reuses: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GraphExplanation:
    """A compiled graph.

    Attributes:
        name: "inference 0", "forward 0", "backward 0".
        reason: why it runs in eager mode; "" if it is compiled.
        nodes: the number of captured operators.
        captured: the graph, as text.
        program: the lowered program: a step for each operation, none fused.
        kernels: each kernel once.
        steps: the launches and calls, in order.
        batches: the kernels of each batch, which share a parallel region.
        apart: the kernels that are not in a batch with those before them, and why.
        calls: the operators that torch computes, with the reason if there is one.
        refusals: the steps that were not fused, and why.
        arena: the bytes of memory for buffers between kernels.
        places: the place of each buffer in the arena.
        source: the C, or the module of the Triton kernels.
        device: the device, such as "cpu" or "cuda:0".
        functions: the Triton kernels as they are compiled.
        bandwidth: the bytes a second that the memory of the GPU moves, if it is known.
        count: how often it is called in a step: more than once if it is a block that the model repeats.
    """

    name: str
    reason: str = ""
    nodes: int = 0
    captured: str = ""
    program: str = ""
    kernels: tuple[KernelText, ...] = ()
    steps: tuple[StepText, ...] = ()
    batches: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    arena: int = 0
    places: tuple[BufferPlace, ...] = ()
    source: str = ""
    device: str = "cpu"
    functions: tuple[TritonKernel, ...] = ()
    bandwidth: float | None = None
    count: int = 1

    @property
    def title(self) -> str:
        """The name, and how often the graph is called if that is more than once."""
        return self.name if self.count == 1 else f"{self.name} ({self.count} times)"

    @property
    def launches(self) -> int:
        """The number of kernel launches in a call of the graph."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def seconds(self) -> float | None:
        """The measured time of all steps together; None if they were not measured."""
        found = [step.seconds for step in self.steps if step.seconds is not None]
        return sum(found) if found else None

    @property
    def language(self) -> str:
        """The language of ``source``: "C" or "Triton"."""
        return "C" if self.device == "cpu" else "Triton"


def explain_graph(compiled: CompiledGraph) -> GraphExplanation:
    """Return the forms of a graph as text."""
    captured, program, schedule, plan = compiled.captured, compiled.program, compiled.schedule, compiled.plan
    if captured is None or program is None or schedule is None or plan is None:
        return GraphExplanation(compiled.name, compiled.reason, count=compiled.count)
    nodes = captured.graph.nodes
    return GraphExplanation(
        compiled.name,
        compiled.reason,
        sum(node.target not in ("input", "constant", "getitem") for node in nodes),
        str(captured.graph),
        program_text(program),
        _kernels(schedule, compiled.kernels, compiled.texts),
        _steps(schedule),
        batch_texts(schedule),
        schedule.apart,
        tuple(_call(step) for step in schedule.steps if isinstance(step, Extern)),
        tuple(map(str, schedule.refusals)),
        int(estimate(schedule.arena, program.sizes)),
        _places(schedule),
        "\n".join(compiled.texts),
        plan.device,
        plan.kernels,
        count=compiled.count,
    )


def with_resources(graph: GraphExplanation, binaries: Sequence[Binary], bandwidth: float | None) -> GraphExplanation:
    """Return a graph with the resources of its kernels, which are compiled to ``binaries``, and the GPU's bandwidth."""
    pairs = zip(graph.kernels, map(resources_of, binaries), strict=True)
    kernels = tuple(dataclasses.replace(kernel, resources=each) for kernel, each in pairs)
    return dataclasses.replace(graph, kernels=kernels, bandwidth=bandwidth)


def with_seconds(graph: GraphExplanation, seconds: Sequence[float]) -> GraphExplanation:
    """Return a graph with the measured times of its steps."""
    pairs = zip(graph.steps, seconds, strict=True)
    return dataclasses.replace(graph, steps=tuple(dataclasses.replace(step, seconds=each) for step, each in pairs))


def _kernels(schedule: Schedule, triton: Sequence[TritonKernel], texts: Sequence[str]) -> tuple[KernelText, ...]:
    launches: dict[Kernel, list[KernelLaunch]] = {}
    for step in schedule.steps:
        if isinstance(step, KernelLaunch):
            launches.setdefault(step.kernel, []).append(step)
    sources = [each.text for each in triton] or [_c_function(kernel.name, texts) for kernel in launches]
    buffers = {**schedule.program.buffers, **schedule.buffers}
    return tuple(
        dataclasses.replace(
            _kernel(kernel, len(each)), source=text, figures=figures(each[0], buffers, schedule.program.sizes)
        )
        for (kernel, each), text in zip(launches.items(), sources, strict=True)
    )


def _c_function(name: str, texts: Sequence[str]) -> str:
    """Return the function of a kernel in the units of C, where an empty line separates functions."""
    begin = f"void k_{name}_range(const struct opkit_call *call, int64_t begin, int64_t end) {{"
    return next((part for text in texts for part in text.split("\n\n") if begin in part), "").strip()


def _steps(schedule: Schedule) -> tuple[StepText, ...]:
    buffers, sizes = {**schedule.program.buffers, **schedule.buffers}, schedule.program.sizes
    numbers: dict[Kernel, int] = {}
    found: list[StepText] = []
    for step in schedule.steps:
        if isinstance(step, KernelLaunch):
            kernel, pairs = step.kernel, list(zip(step.kernel.arguments, step.buffers, strict=True))
            number, origins = numbers.setdefault(kernel, len(numbers)), kernel.origins
            used, written = ([name for a, name in pairs if a.written is each] for each in (False, True))
            name, counted, reason = kernel.name, figures(step, buffers, sizes), ""
        else:
            number, origins, reason = None, (step.origin,) if step.origin else (), step.reason
            name, used, written, counted = step.target, reads(step), writes(step), call_figures(step, buffers, sizes)
        found.append(StepText(name, number, origins, _types(used, buffers), _types(written, buffers), counted, reason))
    return tuple(found)


def _types(names: Sequence[str], buffers: Mapping[str, Buffer]) -> dict[str, str]:
    return {name: f"{buffers[name].dtype}[{', '.join(map(str, buffers[name].shape))}]" for name in names}


def _kernel(kernel: Kernel, launches: int) -> KernelText:
    operators = tuple(origin.split(" ", 1)[0] for origin in kernel.origins)
    return KernelText(kernel.name, operators, kernel.origins, kernel_text(kernel), launches)


def _call(step: Extern) -> str:
    operator = step.origin or step.target
    name = operator if operator.startswith(step.target) else f"{step.target}, of {operator}"
    return f"{name} ({step.reason})" if step.reason else name


# ---- memory ----------------------------------------------------------------------------------------------------------


def _places(schedule: Schedule) -> tuple[BufferPlace, ...]:
    def number(size: Index) -> int:
        return int(estimate(size, schedule.program.sizes))

    lifetimes = _lifetimes(schedule)
    places = [
        BufferPlace(name, number(at), number(nbytes(schedule.buffers[name])), *lifetimes[name])
        for name, at in schedule.places.items()
    ]
    places.sort(key=lambda place: place.first)
    return tuple(dataclasses.replace(place, reuses=_reused(place, places)) for place in places)


def _lifetimes(schedule: Schedule) -> dict[str, tuple[int, int]]:
    lifetimes: dict[str, tuple[int, int]] = {}
    for number, step in moments(schedule.steps):
        names = step.buffers if isinstance(step, KernelLaunch) else (*reads(step), *writes(step))
        lifetimes |= {name: (lifetimes.get(name, (number, 0))[0], number) for name in names}
    return lifetimes


def _reused(place: BufferPlace, others: list[BufferPlace]) -> tuple[str, ...]:
    def shares(other: BufferPlace) -> bool:
        return other.begin < place.begin + place.nbytes and place.begin < other.begin + other.nbytes

    return tuple(other.buffer for other in others if other.last < place.first and shares(other))
