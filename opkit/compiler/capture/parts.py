"""This module cuts Dynamo's graph into parts, each of which is compiled by itself, and runs them one after the other."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from opkit.compiler.capture import torch_private as private


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive nodes of Dynamo's graph as a graph of their own.

    Attributes:
        module: the graph. Its results are a tuple.
        inputs: what it is called with, as tensors and sizes of Dynamo's fake mode, or as the backend got them.
        count: how often it is called.
    """

    module: fx.GraphModule
    inputs: list[Any]
    count: int


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a part: where its arguments and its results are among all values.

    Attributes:
        part: the number of the part.
        arguments: the numbers of the values that it takes.
        results: the numbers of the values that it returns.
        freed: the numbers of the values that nothing uses afterwards.
    """

    part: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    freed: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Cut:
    """A graph as calls of its parts.

    Attributes:
        parts: the parts.
        calls: the calls, in order.
        inputs: the graph's inputs; their numbers come first.
        attributes: the tensors that the graph holds, by their numbers.
        values: how many values there are.
        results: what the graph returns: numbers of values, or constants in a list of one.
    """

    parts: list[Part]
    calls: list[Call]
    inputs: int
    attributes: dict[int, Any]
    values: int
    results: list[int | list[Any]]

    def function(self, compiled: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """Return the function of the whole graph, from those of the parts."""

        def run(*inputs: Any) -> tuple[Any, ...]:
            values: list[Any] = [*inputs, *[None] * (self.values - self.inputs)]
            for number, value in self.attributes.items():
                values[number] = value
            del inputs
            for call in self.calls:
                made = compiled[call.part](*[values[n] for n in call.arguments])
                for number, value in zip(call.results, made, strict=True):
                    values[number] = value
                for number in call.freed:
                    values[number] = None
                del made
            return tuple(n[0] if isinstance(n, list) else values[n] for n in self.results)

        return run


def outside(block: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that a block's nodes read and that are not in it, in the order in which they are first read."""
    own = set(block)
    return list(dict.fromkeys(each for node in block for each in node.all_input_nodes if each not in own))


def used_outside(block: Sequence[fx.Node]) -> list[int]:
    """Return the numbers of a block's nodes that other nodes read."""
    own = set(block)
    return [n for n, node in enumerate(block) if any(user not in own for user in node.users)]


def attribute(node: fx.Node) -> Any:
    """Return what a ``get_attr`` node reads."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def is_graph(node: fx.Node) -> bool:
    """Return whether a node reads a graph that another node calls, such as a checkpointed block."""
    return node.op == "get_attr" and isinstance(attribute(node), fx.GraphModule)


def assembled(
    module: fx.GraphModule, inputs: Sequence[Any], pieces: Sequence[Sequence[fx.Node]], blocks: range, wanted: list[int]
) -> Cut:
    """Return a graph cut into pieces.

    Args:
        module: the graph.
        inputs: what it will be called with, or tensors like that.
        pieces: all nodes that compute, in order.
        blocks: the numbers of the pieces that are equal.
        wanted: the numbers of their nodes that are results.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    held = [node for node in module.graph.nodes if node.op == "get_attr" and not is_graph(node)]
    numbers = {node: n for n, node in enumerate([*placeholders, *held])}
    given = dict(zip(placeholders, inputs, strict=True))
    parts: list[Part] = []
    calls: list[Call] = []
    for k, piece in enumerate(pieces):
        taken = [node for node in outside(piece) if not is_graph(node)]
        made = [piece[n] for n in (wanted if k in blocks else used_outside(piece))]
        if k not in blocks or k == blocks[0]:
            examples = [given[node] if node in given else node.meta["example_value"] for node in taken]
            parts.append(Part(_graph_of(module, piece, taken, made), examples, len(blocks) if k in blocks else 1))
        numbers |= {node: len(numbers) + n for n, node in enumerate(made)}
        calls.append(Call(len(parts) - 1, tuple(numbers[n] for n in taken), tuple(numbers[n] for n in made)))
    output = next(iter(reversed(module.graph.nodes)))
    returned = [numbers[each] if isinstance(each, fx.Node) else [each] for each in output.args[0]]
    attributes = {numbers[node]: attribute(node) for node in held}
    return Cut(parts, _freeing(calls, returned), len(placeholders), attributes, len(numbers), returned)


def _freeing(calls: Sequence[Call], returned: Sequence[Any]) -> list[Call]:
    """Return the calls with the values that nothing uses after each."""
    last = {number: k for k, call in enumerate(calls) for number in (*call.results, *call.arguments)}
    last = {number: k for number, k in last.items() if number not in returned}
    return [
        dataclasses.replace(call, freed=tuple(n for n, at in last.items() if at == k)) for k, call in enumerate(calls)
    ]


def _graph_of(
    module: fx.GraphModule, piece: Sequence[fx.Node], taken: Sequence[fx.Node], made: Sequence[fx.Node]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in taken:
        copies[node] = graph.placeholder(node.name)
        private.copy_placeholder(node, copies[node])
    for node in piece:
        copies |= {held: graph.node_copy(held) for held in node.all_input_nodes if is_graph(held)}
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in made))
    part = fx.GraphModule(module, graph)
    private.copy_sources(module, part)
    return part
