"""Stores whose place is read from memory, as the planner and C have them."""

import torch

from tests.compiler.lower.test_scheduling import check

INDEX = torch.tensor([[0, 3, 3], [3, 1, 0]])


def test_a_place_that_an_input_holds():
    check(lambda x, i, s: x.scatter_add(0, i, s), torch.randn(4, 3), INDEX, torch.randn(2, 3))
    check(lambda x, i, s: x.index_copy(0, i, s), torch.randn(5, 3), INDEX[1], torch.randn(3, 3))


def test_a_place_that_a_step_before_it_computes():
    check(lambda x, i, s: x.index_put((i * 2 - 3,), s, True), torch.randn(4, 5), INDEX, torch.randn(2, 3, 5))


def test_a_derivative_of_maxima():
    x, grad = torch.randn(2, 3, 6, 6), torch.randn(2, 3, 3, 3)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    check(lambda g, x, i: backward(g, x, [3, 3], [2, 2], [1, 1], [1, 1], False, i), grad, x, indices)
