"""Graphs of tensors that are other tensors inside: nested tensors, and the distributed ones of tensor parallelism."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("fresh")
STRICT = {"strict": True}


def test_nested_tensors(seen):
    """The size of their rows is no number, and is handed on; the backward may run twice."""
    rows = [torch.rand(3, 4), torch.rand(5, 4)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    weight = torch.rand(4, 4, requires_grad=True)

    def function(x, w):
        return torch.nn.functional.linear(x, w).sin() * 2

    found = []
    for each in (torch.compile(function, backend="opkit", fullgraph=True, options=STRICT), function):
        y = each(nested, weight)
        gradients = [torch.autograd.grad(y.values().sum(), (nested, weight), retain_graph=True) for _ in range(2)]
        found.append((y.values(), [(of.values(), w) for of, w in gradients]))
    torch.testing.assert_close(*found)
    assert [graph.reason for graph in seen] == ["", ""]


def test_device_meshes_and_collectives():
    """A tensor-parallel model's graphs are given device meshes, and hand them on."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 4))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = torch.rand(2, 4, requires_grad=True)
        found = [trained(each, model, x) for each in (model, torch.compile(model, backend="opkit", options=STRICT))]
        torch.testing.assert_close(found[1], found[0])
    finally:
        dist.destroy_process_group()


def trained(function, model, x):
    gradients = torch.autograd.grad(function(x).square().sum(), [x, *model.parameters()])
    return [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
