"""This module describes one compiled graph as text: its forms, its kernels, why steps were not fused, and its memory plan."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from opkit.compiler.diagnostics import CompiledGraph, batch_texts
from opkit.compiler.ir.index import Index, Symbol
from opkit.compiler.ir.kernel import Kernel, KernelLaunch, Schedule, moments
from opkit.compiler.ir.printer import kernel_text, program_text
from opkit.compiler.ir.program import Extern, reads, writes
from opkit.compiler.lower.scheduling import nbytes


@dataclasses.dataclass(frozen=True)
class KernelText:
    """A kernel.

    Attributes:
        name: its name in the C source.
        operators: the operators that it computes, in order.
        origins: the same with the user's lines.
        text: its loop nest.
        launches: the number of its launches in a call of the graph.
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
        batches: the kernels of each batch, which share a parallel region.
        apart: the kernels that are not in a batch with those before them, and why.
        calls: the operators that torch computes, with the reason if there is one.
        refusals: the steps that were not fused, and why.
        arena: the bytes of memory for buffers between kernels.
        places: the place of each buffer in the arena.
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
        """The number of kernel launches in a call of the graph."""
        return sum(kernel.launches for kernel in self.kernels)


def explain_graph(compiled: CompiledGraph) -> GraphExplanation:
    """Return the forms of a graph as text."""
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


def _call(step: Extern) -> str:
    operator = step.origin or step.target
    name = operator if operator.startswith(step.target) else f"{step.target}, of {operator}"
    return f"{name} ({step.reason})" if step.reason else name


# ---- memory ----------------------------------------------------------------------------------------------------------


def _number(size: Index, sizes: Mapping[str, int]) -> int:
    """Return a size for the values that symbols had when the graph was captured."""
    known = {leaf: sizes[leaf.name] for leaf in size.leaves() if isinstance(leaf, Symbol) and leaf.name in sizes}
    return size.substitute(known).constant or 0


def _places(schedule: Schedule) -> tuple[BufferPlace, ...]:
    sizes = schedule.program.sizes
    lifetimes = _lifetimes(schedule)
    places = [
        BufferPlace(name, _number(at, sizes), _number(nbytes(schedule.buffers[name]), sizes), *lifetimes[name])
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
