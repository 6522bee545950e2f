"""What is told of one compiled graph: its forms as text, its kernels, what was refused, and where its buffers lie."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from opkit.compiler.compiled_graph import CompiledGraph
from opkit.compiler.ir.index import Index, Size
from opkit.compiler.ir.kernel import Kernel
from opkit.compiler.ir.printer import kernel_text, program_text
from opkit.compiler.ir.program import Extern, reads, writes
from opkit.compiler.ir.schedule import KernelLaunch, Schedule, batches, moments
from opkit.compiler.lower.memory_planning import nbytes


@dataclasses.dataclass(frozen=True)
class KernelText:
    """A kernel.

    Attributes:
        name: in the C source.
        operators: those that it computes, in order.
        origins: the same with the user's lines.
        text: its loop nest.
        launches: how many times a call of the graph runs it.
    """

    name: str
    operators: tuple[str, ...]
    origins: tuple[str, ...]
    text: str
    launches: int


@dataclasses.dataclass(frozen=True)
class BufferPlace:
    """A buffer in the arena.

    Attributes:
        buffer: its name in the program.
        begin, nbytes: its bytes, for the sizes with which the graph was compiled.
        first, last: the steps from which to which it is needed.
        reuses: the buffers before it whose memory it lies in.
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
        reason: why it runs in eager mode; "" where it is compiled.
        nodes: how many operators were captured.
        captured: the graph, as text.
        program: what it was lowered to: a step for each operation, none fused.
        kernels: each once.
        batches: the kernels of each batch: those that share a parallel region.
        apart: kernels that are in no batch with those before them, and why.
        calls: the operators that torch computes, with the reason where there is one.
        refusals: steps that were not fused, and why.
        arena: the bytes of memory for what lies between kernels.
        places: who lies where in it.
        source: the C.
    """

    name: str
    reason: str = ""
    nodes: int = 0
    captured: str = ""
    program: str = ""
    kernels: tuple[KernelText, ...] = ()
    batches: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    arena: int = 0
    places: tuple[BufferPlace, ...] = ()
    source: str = ""

    @property
    def launches(self) -> int:
        """How many times a call of the graph runs a kernel."""
        return sum(kernel.launches for kernel in self.kernels)


def explained(compiled: CompiledGraph) -> GraphExplanation:
    """The forms of a graph as text."""
    captured, program, schedule = compiled.captured, compiled.program, compiled.schedule
    if captured is None or program is None or schedule is None:
        return GraphExplanation(compiled.name, compiled.reason)
    nodes = captured.graph.nodes
    return GraphExplanation(
        compiled.name,
        compiled.reason,
        sum(node.target not in ("input", "constant", "getitem") for node in nodes),
        str(captured.graph),
        program_text(program),
        _kernels(schedule),
        batch_texts(schedule),
        schedule.apart,
        tuple(_call(step) for step in schedule.steps if isinstance(step, Extern)),
        tuple(map(str, schedule.refusals)),
        _number(schedule.arena, program.sizes),
        _places(schedule),
        "\n".join(compiled.texts),
    )


def _kernels(schedule: Schedule) -> tuple[KernelText, ...]:
    launches = Counter(step.kernel for step in schedule.steps if isinstance(step, KernelLaunch))
    return tuple(_kernel(kernel, count) for kernel, count in launches.items())


def _kernel(kernel: Kernel, launches: int) -> KernelText:
    operators = tuple(origin.split(" ", 1)[0] for origin in kernel.origins)
    return KernelText(kernel.name, operators, kernel.origins, kernel_text(kernel), launches)


def batch_texts(schedule: Schedule) -> tuple[str, ...]:
    """The batches of several launches: their kernels by name, each with how often it runs."""
    names = [Counter(launch.kernel.name for launch in batch) for batch in batches(schedule.steps) if len(batch) > 1]
    return tuple(", ".join(name if n == 1 else f"{name} ({n} times)" for name, n in each.items()) for each in names)


def _call(step: Extern) -> str:
    asked = step.origin or step.target
    name = asked if asked.startswith(step.target) else f"{step.target}, of {asked}"
    return f"{name} ({step.reason})" if step.reason else name


# ---- memory ----------------------------------------------------------------------------------------------------------


def _number(size: Index, sizes: Mapping[str, int]) -> int:
    """A size for the values that symbols had when the graph was captured."""
    known = {leaf: sizes[leaf.name] for leaf in size.leaves() if isinstance(leaf, Size) and leaf.name in sizes}
    return size.substitute(known).constant or 0


def _places(schedule: Schedule) -> tuple[BufferPlace, ...]:
    sizes = schedule.program.sizes
    lives = _lives(schedule)
    found = [
        BufferPlace(name, _number(at, sizes), _number(nbytes(schedule.buffers[name]), sizes), *lives[name])
        for name, at in schedule.places.items()
    ]
    found.sort(key=lambda place: place.first)
    return tuple(dataclasses.replace(place, reuses=_reused(place, found)) for place in found)


def _lives(schedule: Schedule) -> dict[str, tuple[int, int]]:
    lives: dict[str, tuple[int, int]] = {}
    for number, step in moments(schedule.steps):
        names = step.buffers if isinstance(step, KernelLaunch) else (*reads(step), *writes(step))
        lives |= {name: (lives.get(name, (number, 0))[0], number) for name in names}
    return lives


def _reused(place: BufferPlace, others: list[BufferPlace]) -> tuple[str, ...]:
    def shares(other: BufferPlace) -> bool:
        return other.begin < place.begin + place.nbytes and place.begin < other.begin + other.nbytes

    return tuple(other.buffer for other in others if other.last < place.first and shares(other))
