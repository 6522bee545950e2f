"""``opkit.offload`` on a GPU: the same gradients to the bit, with memory on the host."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opkit

pytestmark = pytest.mark.gpu
WIDTH, ROWS = 512, 256
ROW = WIDTH * ROWS * 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        up = opkit.checkpoint_name(self.up(self.norm(x)), "up")
        first, second = F.gelu(up).chunk(2, -1)  # views of one tensor
        return x + F.dropout(self.down(torch.cat((second, first), -1)) * mask, 0.1)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(6)).cuda()


def gradients(model, policy, x, mask, repeat=1):
    torch.manual_seed(1)
    result = opkit.scan_layers(model, x, mask, policy=policy)
    found = [
        torch.autograd.grad(result.square().sum(), [x, *model.parameters()], retain_graph=k + 1 < repeat)
        for k in range(repeat)
    ]
    return result, found[-1]


POLICIES = [
    opkit.offload(),
    opkit.offload("recompute_all"),
    opkit.offload("recompute_cheap"),
    opkit.offload(opkit.keep("up")),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("repeat", [1, 2])
def test_gradients_are_the_same_to_the_bit(model, policy, repeat):
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    mask = torch.rand(ROWS, WIDTH, device="cuda").round()
    expected = gradients(model, "save_all", x, mask)
    for _ in range(3):
        torch.testing.assert_close(gradients(model, policy, x, mask, repeat), expected, rtol=0, atol=0)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_memory(model, policy):
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    mask = torch.ones(ROWS, WIDTH, device="cuda")
    gradients(model, policy, x, mask)
    gc.collect()
    before = torch.cuda.memory_allocated()
    result = opkit.scan_layers(model, x, mask, policy=policy)
    kept = torch.cuda.memory_allocated() - before
    with_all = opkit.scan_layers(model, x, mask)
    all_kept = torch.cuda.memory_allocated() - before - kept
    assert kept < all_kept / 2  # the last layers' copies are not waited for
    result.sum().backward()
    del result, with_all
    gc.collect()
    model.zero_grad(set_to_none=True)
    x.grad = None
    assert torch.cuda.memory_allocated() <= before


def test_compiled_layers(model):
    torch._dynamo.reset()
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    mask = torch.rand(ROWS, WIDTH, device="cuda").round()
    for layer in model:
        layer.forward = lambda x, mask, layer=layer: (
            x + layer.down(F.gelu(opkit.checkpoint_name(layer.up(layer.norm(x)), "up"))) * mask
        )
    expected = gradients(model, "save_all", x, mask)
    function = torch.compile(opkit.scan_layers, backend="opkit")
    for policy in POLICIES:
        for _ in range(4):  # CUDA graphs are recorded in the third call
            result = function(model, x, mask, policy=policy)
            found = torch.autograd.grad(result.square().sum(), [x, *model.parameters()])
            for one, other in zip((result, *found), (expected[0], *expected[1]), strict=True):
                # Sums in another order: both results are up to 7e-7 of the largest element off those in float64.
                torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * other.abs().max().item())


def test_fit_moves_what_the_budget_does_not_hold(model):
    model = nn.Sequential(*(Plain() for _ in range(6))).cuda()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    found = opkit.fit(model, 1 << 40, x, policies=[opkit.offload()])
    assert all(cost.moved >= 4 * ROW and cost.kept < cost.moved for cost in found.costs)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    opkit.checkpoint_layers(model, "save_all")
    torch.testing.assert_close(torch.autograd.grad(model(x).sum(), list(model.parameters())), expected, rtol=0, atol=0)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).sin())
