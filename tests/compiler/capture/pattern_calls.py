"""Graphs in which patterns are replaced, and calls of attention to replace."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from opkit.compiler.capture.patterns.table import replace_patterns

N, D = 256, 16  # enough keys for the CPU's kernel


def notes_and_graph(function, *args, dynamic=False):
    """What the patterns say about the graph of a function, and its nodes afterwards.

    The results, and the gradients of the arguments that need some, are compared with eager's.
    """
    notes, nodes = [], []

    def backend(module, _):
        notes.extend(replace_patterns(module))
        nodes.extend(module.graph.nodes)
        return module.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    expected = function(*args)
    torch.testing.assert_close(result, expected, equal_nan=True)
    if leaves := [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]:
        gradients = [torch.autograd.grad(out.square().sum(), leaves) for out in (result, expected)]
        torch.testing.assert_close(*gradients, equal_nan=True)
    return notes, nodes


def calls(nodes):
    return [node for node in nodes if node.target is F.scaled_dot_product_attention]


def r(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def causal(n=N):
    return torch.ones(n, n, dtype=torch.bool).tril()


def padding(*keys):
    """A mask of the keys that are seen: so many in each sequence."""
    return (torch.arange(N) < torch.tensor(keys)[:, None])[:, None, None]


def qkv(dtype=torch.float64, batch=2):
    return [r(batch, 2, N, D, dtype=dtype) for _ in range(3)]


def plain(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v
