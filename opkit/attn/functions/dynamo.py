"""Calls with users' functions under ``torch.compile``.

Dynamo traces the functions itself, as it does for torch's flex_attention: what they capture becomes inputs of its graph. The
graph has one node for the call, a higher-order operator, whose subgraph holds the operator's call, with placeholders for the
functions, and the functions' results for one element. When the graph runs, which under AOTAutograd is once, the node makes the
expressions of these results and calls the operator with them. So compilers see the operator, and no other.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from opkit.attn.functions.captures import Captures
from opkit.attn.functions.pending import SUBSTITUTES, Functions
from opkit.attn.functions.torch_private import BaseHOP, allow_aliases
from opkit.attn.functions.trace import VARIABLES, Traced, score_dtype, trace_captures

_Results = tuple[Tensor, Tensor]


def call(run: Callable[[], _Results], functions: Functions, dtype: torch.dtype, device: Any) -> _Results:
    """Return the results of a call of an operator, whose programs name functions by number, in code that Dynamo traces.

    Args:
        run: calls the operator, once; it is one of ``SUBSTITUTES``, and its first argument the queries.
        functions: the functions by number.
        dtype: of the queries.
        device: of the call.
    """

    def body() -> tuple[Tensor, ...]:
        score = torch.empty(1, dtype=score_dtype(dtype), device=device)
        index = [torch.empty(1, dtype=torch.int32, device=device) for _ in range(4)]
        results = [torch.as_tensor(fn(*([score] if kind == "score" else []), *index)) for kind, fn in functions]
        return (*run(), score, *index, *results)

    found = _NODE(body)
    return found[0], found[1]


class _Node(BaseHOP):
    """The higher-order operator, to which Dynamo passes what ``body`` in :func:`call` does as a graph, and what that captures.

    Nothing sees it but Dynamo's graph: where that runs, the operators of the body are called.
    """

    def __call__(self, subgraph: Any, *operands: Any) -> tuple[Any, ...]:
        nodes = list(subgraph.graph.nodes)
        (outputs,) = nodes[-1].args
        variables, results = outputs[2 : 2 + len(VARIABLES)], outputs[2 + len(VARIABLES) :]
        values = dict(zip((node for node in nodes if node.op == "placeholder"), operands, strict=True))
        graph, inputs = _part(subgraph.graph, outputs[:2], ())
        with_functions = _WithFunctions(
            fx.GraphModule(subgraph, graph),
            lambda q: [_traced(subgraph, each, variables, values, q) for each in results],
        )
        found = with_functions.run(*(values[node] for node in inputs))
        return (*found, *(found[1].new_empty(1) for _ in outputs[2:]))


_NODE = _Node("opkit_attention_with_functions")
allow_aliases(_NODE)


class _WithFunctions(fx.Interpreter):
    """Runs a graph with functions in place of their numbers in the operator's programs."""

    def __init__(self, module: fx.GraphModule, functions: Callable[[Tensor], list[Traced]]) -> None:
        super().__init__(module)
        self.functions = functions

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        substitute = SUBSTITUTES.get(str(target))
        if substitute is not None:
            args = tuple(substitute(*args, functions=self.functions(args[0])))
        return super().call_function(target, args, kwargs)


def _traced(
    subgraph: fx.GraphModule,
    result: fx.Node,
    variables: Sequence[fx.Node],
    values: Mapping[fx.Node, Any],
    q: Tensor,
) -> Traced:
    """Return the expression of a node of a subgraph, over the nodes of the variables, and the values that it captures."""
    graph, inputs = _part(subgraph.graph, result, variables)
    captures = _GraphCaptures(fx.GraphModule(subgraph, graph), [_captured(node, values, q) for node in inputs])
    kind = "mask" if result.meta["example_value"].dtype == torch.bool else "score"
    return trace_captures(captures, captures.function, kind, score_dtype(q.dtype), q.device)


def _captured(node: fx.Node, values: Mapping[fx.Node, Any], q: Tensor) -> Any:
    """Return what a function captures; a float that Dynamo does not know, which programs do not hold, as a tensor."""
    value = values[node.args[0] if _is_read(node) else node]  # type: ignore[index]
    if _is_read(node):
        return value.to(q.device, score_dtype(q.dtype) if value.is_floating_point() else None)
    if isinstance(value, torch.SymFloat):
        return torch.zeros((), dtype=score_dtype(q.dtype), device=q.device) + value
    return value


def _is_read(node: fx.Node) -> bool:
    """Return whether a node reads the number in a captured tensor: Dynamo's graphs get floats as tensors."""
    return node.op == "call_method" and node.target == "item" and node.all_input_nodes[0].op == "placeholder"


class _GraphCaptures(Captures):
    """The captures of a graph of the variables and captured values."""

    def __init__(self, graph: fx.GraphModule, values: Sequence[Any]) -> None:
        super().__init__(graph)
        self.order: list[tuple[bool, int]] = []
        for each in values:
            cell = types.CellType(each)
            self.order.append(
                (isinstance(each, Tensor), len(self.tensors if isinstance(each, Tensor) else self.numbers))
            )
            if isinstance(each, Tensor):
                self.tensor_cells.append((cell, len(self.tensors)))
                self.tensors.append(each)
            else:
                self.numbers.append(cell)

    def substituted(self, numbers: Sequence[Tensor], tensors: Sequence[Tensor]) -> Callable[..., Any]:
        given = numbers if len(numbers) == len(self.numbers) else [cell.cell_contents for cell in self.numbers]
        captured = [tensors[place] if is_tensor else given[place] for is_tensor, place in self.order]

        def run(*variables: Tensor) -> Tensor:
            missing = [None] * (len(VARIABLES) - len(variables))
            return self.function(*missing, *variables, *captured)

        return run


def _part(graph: fx.Graph, outputs: Any, variables: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """Return the graph that computes some nodes from ``variables`` and from other inputs, and these.

    They are the placeholders; and of a function, which has variables, the numbers that are read of them.
    """

    def is_input(node: fx.Node) -> bool:
        return node.op == "placeholder" or (bool(variables) and _is_read(node))

    part = fx.Graph()
    copies = {node: part.placeholder(f"variable_{number}") for number, node in enumerate(variables)}
    needed, waiting = set[fx.Node](), list(pytree.tree_leaves(outputs))
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in copies:
            needed.add(node)
            waiting += [] if is_input(node) else node.all_input_nodes
    inputs = [node for node in graph.nodes if node in needed and is_input(node)]
    for number, node in enumerate(inputs):
        copies[node] = part.placeholder(f"input_{number}")
    for node in graph.nodes:
        if node in needed and node not in copies:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(pytree.tree_map(copies.__getitem__, outputs))
    return part, inputs
