"""Graph neural networks of ``torch_geometric``; the batch size is the number of graphs, of a given number of nodes each."""

from __future__ import annotations

import functools

import torch

from opkit.bench.architecture import Architecture, Size, Task, package, without_dropout

_CLASSES = {"gcn": "GCN", "gat": "GAT", "graph_sage": "GraphSAGE", "gin": "GIN"}


def build(name: str, size: Size) -> Task:
    """Return the task of a network: 4 edges a node, between random nodes of all graphs."""
    features, hidden, layers, nodes = (16, 32, 2, 16) if size == "tiny" else (128, 256, 4, 4096)
    module = getattr(package("torch_geometric.nn"), _CLASSES[name])(features, hidden, layers, 8)

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        count = batch * nodes
        return {"x": torch.randn(count, features), "edge_index": torch.randint(0, count, (2, 4 * count))}

    return Task(without_dropout(module), inputs, 2 if size == "tiny" else 8)


ARCHITECTURES = [
    Architecture(name, "graphs", functools.partial(build, name), ("torch_geometric",)) for name in _CLASSES
]
