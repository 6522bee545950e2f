"""Saved models have the graphs that control flow operators call; both readers run them."""

import json
import zipfile

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import opkit
import opkit.runtime

LOADERS = [opkit.load, opkit.runtime.load]


def check(path, model, *calls):
    """Compare the results of a saved model with the module's, in both readers."""
    for load in LOADERS:
        loaded = load(path)
        for args in calls:
            found, expected = loaded(*args), model(*args)
            many = isinstance(expected, tuple)
            assert isinstance(found, tuple) == many
            for one, right in zip(found if many else [found], expected if many else [expected], strict=True):
                torch.testing.assert_close(torch.from_dlpack(one), right.detach(), atol=1e-5, rtol=1e-5)


class Branches(nn.Module):
    """Branches with several results, weights, batch norm, and a branch of their own, of twice as many rows as the input has."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.norm.running_mean.uniform_()

    def forward(self, x):
        def large(x):
            return torch.cond(x.mean() > 2, lambda x: (self.norm(self.up(x)), x + 1), small, (x,))

        def small(x):
            return self.down(x).relu() * x.shape[0], x.cos()

        both, other = torch.cond(x.sum() > 0, large, small, (torch.cat([x, x]),))
        return both.exp(), other


def graphs_of(path):
    """The graphs of a file, by folder: how each is described."""
    with zipfile.ZipFile(path) as opened:
        variant = json.loads(opened.read("manifest.json"))["entries"][""]["variants"][0]
    found = {}
    waiting = list(variant["graphs"].values())
    for graph in waiting:
        found[graph["variants"][0]["folder"]] = graph
        waiting += graph["variants"][0]["graphs"].values()
    return found


@pytest.mark.parametrize("freeze", [True, False])
def test_branches(tmp_path, freeze):
    model, x = Branches().eval(), torch.rand(3, 8)
    rows = ({0: torch.export.Dim("rows", max=64)},)
    path = opkit.export(model, (x,), path=tmp_path / "model.opk", dynamic_shapes=rows, freeze=freeze)
    check(path, model, (x,), (x[:2] + 3,), (-x,))
    taken = [len(graph["arguments"]) for graph in graphs_of(path).values()]
    assert (
        taken == [2, 2, 2, 2] if freeze else min(taken) > 2
    )  # the tensor and its rows: weights are constants of the graphs


def test_weights_of_branches_that_are_replaced(tmp_path):
    model, x = Branches().eval(), torch.rand(3, 8)
    loaded = opkit.load(opkit.export(model, (-x,), path=tmp_path / "model.opk", freeze=False))
    with torch.no_grad():
        model.down.bias.fill_(2)
    loaded.load_state_dict({"down.bias": model.down.bias})
    torch.testing.assert_close(loaded(-x), model(-x))


class Images(nn.Module):
    """A convolution before, in, and after branches: frozen, their channels are next to each other."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3)

    def forward(self, x):
        return self.last(torch.cond(x.sum() > 0, self.inner, lambda x: x[..., 1:-1, 1:-1] * 2, (self.first(x),)))


def test_layouts_that_freezing_changes(tmp_path):
    model, x = Images().eval(), torch.rand(2, 3, 9, 9)
    check(opkit.export(model, (x,), path=tmp_path / "model.opk"), model, (x,), (-x,))


class Loops(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x, n):
        _, scaled = while_loop(lambda n, x: (n < 3).all(), lambda n, x: (n + 1, (x * self.weight).sin()), (n, x))
        total, sums = scan(lambda total, row: (total + row, (total * self.weight).cos()), x[0] * 0, x)
        return scaled, total, sums, mapped(lambda row, other: row * self.weight - other, x, x[0] * 2)


def test_loops(tmp_path):
    model, x = Loops(), torch.rand(3, 4)
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)}, None)
    path = opkit.export(model, (x, torch.tensor([0])), path=tmp_path / "model.opk", dynamic_shapes=shapes)
    check(path, model, (x, torch.tensor([0])), (torch.rand(7, 4), torch.tensor([5])))


def test_operators_and_state_in_branches(tmp_path):
    @opkit.custom_op(f"{__name__}::triple".replace(".", "_"))
    def triple(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return x * 3

    triple.register_kernel("cpu")(
        opkit.c_kernel(
            "void triple(const float *x, float *out, long n) { for (long i = 0; i < n; ++i) out[i] = 3 * x[i]; }"
        )
    )

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x):
            self.total.add_(x)
            return torch.cond(self.total.sum() > 0, lambda x, t: triple(x) + t, lambda x, t: x - t, (x, self.total))

    path = opkit.export(Model(), (torch.ones(4),), path=tmp_path / "model.opk")
    for load in LOADERS:
        loaded, model = load(path), Model()
        for x in (torch.ones(4), torch.full((4,), -3.0), torch.full((4,), 5.0)):
            torch.testing.assert_close(torch.from_dlpack(loaded(x)), model(x))
