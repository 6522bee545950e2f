"""Graphs traced on the CPU, as graphs of a GPU; numbers that they read stay on the CPU."""

import dataclasses

from opkit.compiler.ir.graph import TensorType, refs


def on_gpu(graph):
    """The graph with every tensor on a GPU: lowering for GPUs leaves out what is on another device."""

    def moved(kind):
        if isinstance(kind, tuple):
            return tuple(map(moved, kind))
        return dataclasses.replace(kind, device="cuda") if isinstance(kind, TensorType) else kind

    items = [n for n in graph.nodes if n.target == "aten._local_scalar_dense.default"]
    numbers = {ref.name for n in items for ref in refs(n.args)}
    nodes = (n if n.name in numbers else dataclasses.replace(n, result=moved(n.result)) for n in graph.nodes)
    return dataclasses.replace(graph, nodes=tuple(nodes))
