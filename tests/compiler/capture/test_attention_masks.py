"""Constant masks of attention in Dynamo's graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from opkit.compiler.capture.attention_masks import remove_constant_masks


def calls(function, *args, dynamic=False):
    """The keyword arguments of the calls of attention in the graph of a function, after constant masks are removed."""
    found = []

    def backend(module, _):
        remove_constant_masks(module)
        found.extend(n.kwargs for n in module.graph.nodes if n.target is F.scaled_dot_product_attention)
        return module.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    torch.testing.assert_close(result, function(*args))
    return found


def positions(n):
    return torch.arange(n)[:, None], torch.arange(n)[None]


MASKS = {
    "all": (lambda n: positions(n)[0] >= 0, None, False),
    "expanded": (lambda n: (positions(n)[0] >= 0)[None, None].expand(2, 1, n, n), None, False),
    "causal": (lambda n: positions(n)[1] <= positions(n)[0], None, True),
    "tril": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(), None, True),
    "additive": (lambda n: torch.zeros(n, n).masked_fill(positions(n)[1] > positions(n)[0], -torch.inf), None, True),
    "methods": (
        lambda n: (positions(n)[1] <= positions(n)[0]).__and__(positions(n)[0].__eq__(positions(n)[0])),
        None,
        True,
    ),
    "window": (lambda n: positions(n)[1] <= positions(n)[0] + 1, "kept", False),
    "bias": (lambda n: (positions(n)[1] - positions(n)[0]).to(torch.float32), "kept", False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_from_positions(name):
    make, kept, causal = MASKS[name]
    q = torch.randn(2, 3, 8, 16)
    (call,) = calls(lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=make(8), scale=0.5), q)
    assert (call["attn_mask"] is not None) == (kept is not None)
    assert bool(call.get("is_causal")) == causal
    assert call["scale"] == 0.5


def test_what_is_not_constant_stays():
    q = torch.randn(2, 3, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool)
    (call,) = calls(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask), q, mask)
    assert call == {}
    (call,) = calls(lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=q[0, 0] @ q[0, 0].T > -100), q)
    assert call["attn_mask"] is not None
    (call,) = calls(lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.rand(8, 8) > -1), q)
    assert call["attn_mask"] is not None


def test_a_mask_that_is_written_to_stays():
    q = torch.randn(2, 3, 8, 16)

    def function(q):
        mask = torch.ones(8, 8, dtype=torch.bool)
        part = mask[:, 4:]
        part &= False
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    def other(q):
        mask = torch.ones(8, 8, dtype=torch.bool)
        mask[:, 0] = q[0, 0, 0, 0] > 1e9
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    for each in (function, other):
        (call,) = calls(each, q)
        assert call["attn_mask"] is not None


def test_sizes_that_change_keep_the_mask():
    q = torch.randn(2, 3, 8, 16)
    (call,) = calls(
        lambda q: F.scaled_dot_product_attention(q, q, q, torch.ones(q.shape[2], q.shape[2]).tril() > 0),
        q,
        dynamic=True,
    )
    assert call == {}


def test_more_keys_than_queries_are_not_causal():
    q, k = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 8, 16)
    (call,) = calls(lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=torch.ones(4, 8).tril(4) > 0), q, k)
    assert call["attn_mask"] is not None
