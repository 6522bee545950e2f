"""Random operators that a backward computes again, in checkpoints and under a memory budget, or whose numbers nobody uses."""

import functools

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytestmark = pytest.mark.usefixtures("fresh")
ROWS = 16


def noise(x):
    """Operators whose numbers are those of eager mode, some of them written into memory."""
    like = torch.rand_like(x) + torch.randn(ROWS) + torch.bernoulli(torch.full((ROWS,), 0.5)) + torch.randperm(ROWS)
    like = (
        like
        + torch.randint(0, 9, (ROWS,))
        + torch.multinomial(torch.ones(ROWS), ROWS)
        + torch.poisson(torch.ones(ROWS))
    )
    like = (
        like
        + torch.normal(torch.zeros(ROWS), 1.0)
        + torch.empty(ROWS).exponential_()
        + torch._sample_dirichlet(like.detach().abs())
    )
    return (x * x).sin() * like * torch.empty(ROWS).geometric_(0.5)


def step(function):
    """The results, and the gradients of each of them; the backward leaves torch's generator as it was."""
    x = torch.linspace(1, 2, ROWS, requires_grad=True)
    torch.manual_seed(5)
    y, dropped = function(x)
    state = torch.get_rng_state()
    gradients = [torch.autograd.grad(each.sum(), x, retain_graph=True)[0] for each in (y, dropped)]
    assert torch.equal(torch.get_rng_state(), state)
    return y.detach(), gradients[0], dropped.detach(), gradients[1]


def function(x):
    return noise(x), torch.nn.functional.dropout(x.sin(), 0.5) * 2


def selective(ctx, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator == torch.ops.aten.sin.default else CheckpointPolicy.MUST_RECOMPUTE


contexts = functools.partial(create_selective_checkpoint_contexts, selective)
WAYS = {
    "checkpoint": (lambda x: checkpoint(function, x, use_reentrant=False), 1.0),
    "selective": (lambda x: checkpoint(function, x, use_reentrant=False, context_fn=contexts), 1.0),
    "budget": (function, 0.0),
}


@pytest.mark.parametrize("way", ["checkpoint", pytest.param("selective", marks=pytest.mark.exhaustive), "budget"])
def test_one_draw_for_forward_and_backward(way):
    called, budget = WAYS[way]
    compiled = torch.compile(called, backend="opkit", fullgraph=True, options={"strict": True})
    with torch._functorch.config.patch(activation_memory_budget=budget):
        y, gradient, dropped, mask = step(compiled)
    torch.testing.assert_close((y, gradient), step(function)[:2])
    assert 0 < (dropped != 0).sum() < ROWS
    assert torch.equal(dropped != 0, mask != 0)


@torch._inductor.config.patch(fallback_random=True)  # else torch removes them before any backend sees them
def test_draws_that_nobody_uses_are_made():
    def with_unused(x):
        torch.rrelu(x, training=True), torch.binomial(torch.full_like(x, 9.0), x), torch.empty_like(x).cauchy_()
        return torch.empty_like(x).log_normal_()

    x = torch.rand(ROWS)
    torch.manual_seed(5)
    expected = with_unused(x)
    torch.manual_seed(5)
    assert torch.equal(torch.compile(with_unused, backend="opkit", options={"strict": True})(x), expected)
