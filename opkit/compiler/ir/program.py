"""A program of the IR: a lowered graph, with buffers and the steps that fill them in order, before loops and fusion.

``Compute`` fills a buffer (or a part of it) element by element, one for each operation; ``Extern`` calls an operator of torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.graph import OpaqueValue
from opkit.compiler.ir.index import ZERO, Axis, Index, Value, flat


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory for a tensor.

    Attributes:
        name: unique in the program.
        dtype: a key of ``DTYPES``.
        shape: its logical sizes.
        strides: in elements.
        role: "input" (the caller's), "number" (the caller's single float64 in the CPU's memory, which nothing writes to and
            kernels on a GPU take by value), "constant" (the program's), "made" (allocated while it runs).
        whole: the buffer whose memory it is a part of, None for one with memory of its own. Computes read and write a buffer
            of complex numbers as two such parts, calls as the whole.
        offset: the place of its first element in that memory, in elements of its own.
    """

    name: str
    dtype: str
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    role: str = "made"
    whole: Buffer | None = None
    offset: Index = ZERO

    @property
    def memory(self) -> str:
        """The buffer that the memory belongs to."""
        return self.name if self.whole is None else self.whole.name

    def place(self, coordinates: Iterable[Index]) -> Index:
        """Return the place of an element in memory, in elements."""
        return flat(coordinates, self.strides) + self.offset


@dataclasses.dataclass(frozen=True)
class Compute:
    """For every value of ``axes``: buffer[target] = body, or, over the axes in ``reduced``, its reduction.

    The axes are in the order in which the elements of what is read lie in memory, outermost first; axis ``k`` has
    number k (``Axis(k, extent)``; an axis of extent 1 may be absent from indices). A reduction keeps that order too: the
    sum over rows of a matrix has axes (rows, columns), reduced {0}, target (a1,). Loads are at logical coordinates.

    Attributes:
        buffer: the buffer that is written.
        axes: the extent of each axis.
        target: the coordinates in the buffer, over the axes that are not reduced.
        body: the element; its type is the buffer's, but of a reduction the type in which it accumulates, and of an
            argmax or argmin the type that is compared.
        reduction: a key of ``REDUCTIONS``, "scan:sum" and the like (along the one axis in ``reduced``, which then stays in
            ``target``), or None.
        reduced: the numbers of the axes that are reduced.
        update: None to overwrite; "add" and the like (keys of ``OPS``) to combine with what is there: a scatter,
            whose target holds Values; several values of the axes may give the same target.
        origin: the operator and the user's line, for messages.
    """

    buffer: str
    axes: tuple[Index, ...]
    target: tuple[Index, ...]
    body: Expr
    reduction: str | None = None
    reduced: frozenset[int] = frozenset()
    update: str | None = None
    origin: str = ""

    def axis(self, number: int) -> Axis:
        return Axis(number, self.axes[number])


@dataclasses.dataclass(frozen=True)
class Strided:
    """A tensor over the elements of a buffer's storage, as torch describes one: for extern calls and results."""

    buffer: str
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    offset: Index


@dataclasses.dataclass(frozen=True)
class Extern:
    """A call of an operator of torch.

    Attributes:
        target: its name, as in the captured graph.
        args, kwargs: as there, with a :class:`Strided` for each tensor, and for each scalar that is computed a buffer of no
            dimensions in a :class:`ScalarItem`, or a :class:`Formula`.
        outputs: the buffers that hold its results, None for a result that nobody uses; a result that is a size is
            the name of a symbolic size, in an Index.
        mutated: the buffers that it writes to, apart from its results.
        aliases: whether its results may lie in the memory of its arguments.
        out: whether its one result is written to a tensor that it takes (``aten.mm.out``), rather than allocated by it.
        origin: the operator and the user's line, for messages.
        reason: why the operator is called and not lowered, or not merged with what follows it; "" where calling it is the
            lowering (a matmul).
        effect: whether it does something apart from its results and writes, as the graph's nodes say.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[str | Index | None, ...]
    mutated: frozenset[str] = frozenset()
    aliases: bool = False
    out: bool = False
    origin: str = ""
    reason: str = ""
    effect: bool = False

    @property
    def uses_storage(self) -> bool:
        """Whether it reads other elements of its arguments' memory, or its results may lie there."""
        return self.aliases or self.target in FROM_STORAGE


WITH_GAPS = frozenset(
    f"aten.{name}.default" for name in ("copy", "slice_scatter", "select_scatter", "diagonal_scatter")
)
"""Operators that copy a tensor together with what lies between its elements."""

FROM_STORAGE = WITH_GAPS | {f"aten.as_strided{suffix}.default" for suffix in ("", "_copy", "_scatter")}
"""Operators that read other elements of the storage than their argument's."""


@dataclasses.dataclass(frozen=True)
class ScalarItem:
    """The number in a buffer of one element, as a Python number."""

    buffer: str


class Formula(NamedTuple):
    """A Python number that the host computes.

    Attributes:
        text: a Python expression, with "{0}" and so on for its operands.
        operands: items, sizes, numbers, and formulas.
    """

    text: str
    operands: tuple[Any, ...]


Step = Compute | Extern


@dataclasses.dataclass(frozen=True)
class Program:
    """Buffers and steps.

    Attributes:
        name: the graph's.
        inputs: the graph's inputs in order: the names of buffers, sizes (an Index), or objects (an OpaqueValue).
        buffers: all of them, by name.
        steps: in an order in which they can run.
        outputs: the graph's results in order: Strided, Index, or a constant (None among them).
        sizes: the value of each symbolic size when the graph was captured, by name.
    """

    name: str
    inputs: tuple[str | Index | OpaqueValue, ...]
    buffers: dict[str, Buffer]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    sizes: dict[str, int]

    @functools.cached_property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """The parts of each buffer that has parts."""
        found: dict[str, tuple[str, ...]] = {}
        for name, buffer in self.buffers.items():
            if buffer.whole is not None:
                found[buffer.memory] = (*found.get(buffer.memory, ()), name)
        return found

    def with_parts(self, names: Iterable[str]) -> list[str]:
        """Return buffers and their parts."""
        return [each for name in names for each in (name, *self.parts.get(name, ()))]

    @functools.cached_property
    def _same(self) -> Mapping[str, str]:
        return same_memory(self.steps)

    def overlapping(self, name: str) -> list[str]:
        """Return the buffers that may share memory with a buffer without being parts of the same one, and their parts."""
        memory = self.buffers[name].memory
        root = self._same.get(memory)
        return self.with_parts(other for other, its in self._same.items() if its == root and other != memory)

    def reads(self, step: Step) -> list[str]:
        """Return the buffers whose elements a step needs, and their parts."""
        return self.with_parts(reads(step))

    def writes(self, step: Step) -> list[str]:
        """Return the buffers that a step changes, and their parts."""
        return self.with_parts(writes(step))


WAIT = "opkit.wait"
"""The target of a call that waits for a result of a collective. It takes the result, and what the collective reads."""


def is_collective(target: str) -> bool:
    """Return whether a target starts a collective of processes, or a message between two, that runs until a ``WAIT``."""
    return target.startswith("_c10d_functional.")


def reads(step: Step) -> list[str]:
    """Return the buffers whose elements a step needs, each once."""
    if isinstance(step, Extern):
        return list(dict.fromkeys(_buffers((step.args, step.kwargs))))
    loaded = [buffer for root in roots(step) for buffer in loads(root)]
    return list(dict.fromkeys(loaded))


def same_memory(steps: Iterable[Any]) -> dict[str, str]:
    """Map the buffers that calls take, and of which they may return views, to one name for each memory."""
    found: dict[str, str] = {}
    for step in steps:
        if isinstance(step, Extern) and step.aliases:
            roots = {_root(found, name) for name in (*reads(step), *writes(step))}
            found |= dict.fromkeys(roots, min(roots))
    return {name: _root(found, name) for name in found}


def _root(found: Mapping[str, str], name: str) -> str:
    while found.get(name, name) != name:
        name = found[name]
    return name


def writes(step: Step) -> list[str]:
    """Return the buffers that a step changes."""
    if isinstance(step, Compute):
        return [step.buffer]
    return [name for name in step.outputs if isinstance(name, str)] + sorted(step.mutated)


def roots(step: Compute) -> list[Expr]:
    """Return the body, and the expressions that the target's coordinates are computed from."""
    return [step.body, *(leaf.expr for at in step.target for leaf in at.leaves() if isinstance(leaf, Value))]


def loads(root: Expr) -> list[str]:
    """Return the buffers that an expression reads, also to compute an index."""
    return [node.data[0] for node in root.walk() if node.op == "load"]


def _buffers(argument: Any) -> list[str]:
    if isinstance(argument, Strided | ScalarItem):
        return [argument.buffer]
    if isinstance(argument, dict):
        argument = list(argument.values())
    return [name for a in argument for name in _buffers(a)] if isinstance(argument, list | tuple) else []


def renamed_argument(argument: Any, names: Mapping[str, str]) -> Any:
    """Return an argument of a call, or several, with the buffers renamed that have a new name."""
    if isinstance(argument, Strided | ScalarItem):
        return dataclasses.replace(argument, buffer=names.get(argument.buffer, argument.buffer))
    if isinstance(argument, dict):
        return {key: renamed_argument(a, names) for key, a in argument.items()}
    if isinstance(argument, Formula):
        return argument._replace(operands=renamed_argument(argument.operands, names))
    if isinstance(argument, list | tuple) and not hasattr(argument, "_fields"):
        return type(argument)(renamed_argument(a, names) for a in argument)
    return argument
