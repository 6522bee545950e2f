"""Lists among the arguments of calls that record a gradient."""

import pytest
import torch
from torch import Tensor

import opkit
from opkit.op.rules import autograd


@pytest.mark.parametrize(
    ("args", "counts", "leaves"),
    [
        ((1, [2, 3], "x"), [None, ~2, None], [1, [2, 3], "x"]),
        (([], ["a", "b"], [0.5]), [~0, 2, ~1], [[], "a", "b", [0.5]]),
        (([None, 1],), [2], [None, 1]),
    ],
)
def test_only_what_may_hold_tensors_is_spread(args, counts, leaves):
    assert autograd.counts_of(args) == counts
    assert autograd.leaves_of(args, counts) == leaves
    assert autograd.grouped([*leaves, "more"], counts) == list(args)


def test_gradients_of_a_list_that_is_taken_whole_are_none():
    assert autograd.flattened(["g", [None, None], ["a", "b"], None], [None, ~2, 2, 2]) == [
        "g",
        None,
        "a",
        "b",
        None,
        None,
    ]
    assert autograd.grouped_needs([True, False, True, False], [None, ~3, 2]) == [True, [False] * 3, [True, False]]


@pytest.mark.parametrize("rule", ["given", "derived"])
def test_numbers_beside_tensors_in_lists(rule, request):
    @opkit.custom_op(f"listed::{request.node.name.replace('[', '_').strip(']')}", mutates_args=())
    def weighted(scales: list[float], xs: list[Tensor], none: list[Tensor]) -> Tensor:
        return torch.stack([s * x.sin() for s, x in zip(scales, xs, strict=True)]).sum(0)

    needed = []

    def setup_context(ctx, inputs, output):
        ctx.scales, xs, _ = inputs
        ctx.save_for_backward(*xs)

    def backward(ctx, gradient):
        needed.append(ctx.needs_input_grad)
        found = [gradient * s * x.cos() for s, x in zip(ctx.scales, ctx.saved_tensors, strict=True)]
        return [None, None], found, []

    if rule == "given":
        weighted.register_autograd(backward, setup_context=setup_context)
    x, y = torch.randn(2, 3).unbind()
    x.requires_grad_()
    for scales in ([2.0, 3.0], [4.0, 5.0]):
        (found,) = torch.autograd.grad(weighted(scales, [x, y], []).sum(), x)
        torch.testing.assert_close(found, scales[0] * x.cos())
    assert needed in ([], [([False, False], [True, False], [])] * 2)
