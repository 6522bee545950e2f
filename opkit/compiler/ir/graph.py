"""A captured graph, the compiler's input without torch: torch's operators by name, with the type of each result.

Nodes are in the order in which they run. An argument is a :class:`Ref` to an earlier node's result, a Python constant
(None, bool, int, float, complex, str), an ``Index`` (a size), or a list, tuple or dict of these; a dtype is a
:class:`TypeName`; devices, layouts and memory formats are :class:`OpaqueValue`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from opkit.compiler.ir.index import Index


class Ref(NamedTuple):
    """The result of a node, by the node's name."""

    name: str


class TypeName(NamedTuple):
    """A dtype as an argument: a key of ``DTYPES``."""

    name: str


class OpaqueValue(NamedTuple):
    """A value that only an extern call can use, by a name that the capture maps to it."""

    text: str


@dataclasses.dataclass(frozen=True)
class TensorType:
    """The type of a tensor: its properties that are known before the program runs.

    Attributes:
        dtype: a key of ``DTYPES``.
        shape: the sizes.
        strides: those of eager mode, in elements.
        offset: the place of the first element, in elements; 0 for results of the graph's operators.
        device: "cpu", "cuda" or another; only operators on the device that the graph is compiled for are lowered.
    """

    dtype: str
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    offset: Index
    device: str = "cpu"


@dataclasses.dataclass(frozen=True)
class FloatType:
    """The type of a Python float that may change from call to call."""


@dataclasses.dataclass(frozen=True)
class ObjectCall:
    """An object that an operator returns, such as the process group of a device mesh; the host calls it for each use.

    Attributes:
        target: the operator.
        args: its arguments, none of them a tensor.
    """

    target: str
    args: tuple[Any, ...]


ResultType = TensorType | Index | FloatType | OpaqueValue | None


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation, or an input.

    Attributes:
        name: the name of its result, unique in the graph.
        target: "aten.add.Tensor" and the like; "input"; "constant" (a tensor that the graph holds); "getitem"; "float.add" and
            the like for arithmetic of Python floats.
        args, kwargs: the arguments.
        result: the type of its result; a tuple for several; for a size, its Index; for an object, its OpaqueValue.
        origin: the user's line, or "".
        effect: whether it has a side effect: it draws from torch's generator, checks, or prints.
        writes: the arguments that an operator of another library than torch writes to.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: ResultType | tuple[ResultType, ...]
    origin: str = ""
    effect: bool = False
    writes: tuple[Ref, ...] = ()

    @property
    def is_in_place(self) -> bool:
        """Whether it writes to ``writes`` or, if its operator's name ends in an underscore, to its first argument."""
        if self.writes:
            return True
        operator = self.target.split(".")[1] if "." in self.target else self.target
        return operator.endswith("_") and not operator.endswith("__")


@dataclasses.dataclass(frozen=True)
class Graph:
    """Nodes in order, inputs first.

    Attributes:
        name: for messages: "forward 0", "backward 0".
        nodes: inputs and constants first.
        outputs: what is returned: Refs, constants, or indices.
        sizes: the value of each symbolic size when the graph was captured, by name.
        fixed: the number of outputs, from the first, whose strides must be those of the graph; None: all.
    """

    name: str
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    sizes: dict[str, int]
    fixed: int | None = None

    @functools.cached_property
    def results(self) -> Mapping[str, ResultType | tuple[ResultType, ...]]:
        """The results of nodes, by the nodes' names."""
        return {node.name: node.result for node in self.nodes}

    def __str__(self) -> str:
        return "\n".join(
            [f"graph {self.name}", *(f"  {_line(node)}" for node in self.nodes), f"  return {self.outputs}"]
        )


def refs(argument: Any) -> Iterator[Ref]:
    """Yield the references in an argument, or in several."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, dict):
        yield from refs(list(argument.values()))
    elif isinstance(argument, list | tuple) and not isinstance(argument, TypeName | OpaqueValue):
        for each in argument:
            yield from refs(each)


def _line(node: Node) -> str:
    arguments = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    return f"{node.name}: {_type(node.result)} = {node.target}({', '.join(arguments)})"


def _text(argument: Any) -> str:
    if isinstance(argument, list | tuple) and not hasattr(argument, "_fields"):
        return "[" + ", ".join(map(_text, argument)) + "]"
    return argument[0] if isinstance(argument, Ref | TypeName | OpaqueValue) else str(argument)


def _type(result: Any) -> str:
    if isinstance(result, TensorType):
        return f"{result.dtype}[{', '.join(map(str, result.shape))}]"
    return "(" + ", ".join(map(_type, result)) + ")" if isinstance(result, tuple) else str(result)
