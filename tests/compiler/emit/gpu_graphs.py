"""Graphs traced on the CPU, as graphs of a GPU."""

import dataclasses

from opkit.compiler.ir.graph import TensorType


def on_gpu(graph):
    """The graph with every tensor on a GPU: lowering for GPUs leaves out what is on another device."""

    def moved(kind):
        if isinstance(kind, tuple):
            return tuple(map(moved, kind))
        return dataclasses.replace(kind, device="cuda") if isinstance(kind, TensorType) else kind

    return dataclasses.replace(graph, nodes=tuple(dataclasses.replace(n, result=moved(n.result)) for n in graph.nodes))
