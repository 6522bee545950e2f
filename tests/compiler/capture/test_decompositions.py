"""Operators that have no rule, and are decomposed before lowering."""

import pytest
import torch
import torch.nn.functional as F

from opkit.bench.compilation import Fallbacks
from tests.compiler.capture.pattern_calls import r

CALLS = {
    "glu": (lambda x: F.glu(x, 1), r(3, 8, 5)),
    "prelu": (F.prelu, r(3, 8, 5), r(8)),
    "weight norm by rows": (lambda v, g: torch._weight_norm(v, g, 0), r(6, 4, 3), r(6, 1, 1)),
    "weight norm by columns": (lambda v, g: torch._weight_norm(v, g, 2), r(6, 4, 3), r(1, 1, 3)),
    "unfold": (lambda x: F.unfold(x, (3, 2), 2, (1, 2), (2, 1)), r(2, 3, 9, 7)),
    "unfold of one image": (lambda x: F.unfold(x.transpose(1, 2), 3), r(3, 5, 6)),
    "unfold of no images": (lambda x: F.unfold(x, 2), r(0, 3, 4, 4)),
    "fold": (lambda x: F.fold(x, (9, 7), (3, 2), 2, (1, 2), (2, 1)), r(2, 18, 36)),
    "fold without steps": (lambda x: F.fold(x, (9, 7), (3, 2), 2, (1, 2)), r(2, 18, 63)),
    "fold of one image": (lambda x: F.fold(x.t(), (4, 5), (2, 1)), r(15, 6)),
    "corners": (lambda x: x[torch.tril_indices(4, 5)[0], torch.triu_indices(4, 4)[1, :1]], r(4, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_left_to_torch(name):
    torch.compiler.reset()
    function, *inputs = CALLS[name]
    inputs = [each.requires_grad_() for each in inputs]
    factor = torch.rand_like(function(*inputs))

    def loss(*leaves):
        return (function(*leaves) * factor).sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    fallbacks = Fallbacks()
    with fallbacks.recorded():
        compiled = torch.compile(loss, backend="opkit", fullgraph=True)(*inputs)
        found = torch.autograd.grad(compiled, inputs)
    torch.testing.assert_close([compiled, *found], [loss(*inputs), *expected])
    assert not fallbacks


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_are_calls_by_design(mode):
    table, indices, offsets = r(9, 5).requires_grad_(), torch.tensor([3, 0, 8, 8, 1]), torch.tensor([0, 2, 2])
    fallbacks = Fallbacks()

    def bags(table):
        return F.embedding_bag(indices, table, offsets, mode=mode, padding_idx=8)

    torch.compiler.reset()
    with fallbacks.recorded():
        found = torch.compile(bags, backend="opkit", fullgraph=True)(table)
        (gradient,) = torch.autograd.grad(found.square().sum(), table)
    assert not fallbacks
    exact = table.detach().double().requires_grad_()
    expected = bags(exact)
    (of_expected,) = torch.autograd.grad(expected.square().sum(), exact)
    torch.testing.assert_close([found, gradient], [expected, of_expected], check_dtype=False)
