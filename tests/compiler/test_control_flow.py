"""scan, cond, while_loop, map and regions: their bodies are compiled as graphs are, and strict mode says where one is not."""

import logging

import pytest
import torch
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.usefixtures("fresh")
STRICT = {"strict": True}


@torch.compiler.nested_compile_region
def region(x, w):
    return torch.nn.functional.gelu(x * w)


def recurrence(x, w):
    return scan(lambda c, row: ((c + row).tanh(), (c.sin() * row).sum(-1)), w, x, reverse=True)


def recurrence_row_by_row(x, w):
    made = []
    for row in x.flip(0):
        made.append((w.sin() * row).sum(-1))
        w = (w + row).tanh()
    return w, torch.stack(made).flip(0)


def branches(x, w):
    def inner(x):
        return torch.cond(x.sum() > 0, lambda x: x * w + 1, lambda x: x.cos(), (x,))

    return torch.cond(w.sum() > 0, inner, lambda x: x.sin(), (x,)), mapped(lambda row, w: row.exp() * w, x, w)


def loop(x, w):
    return while_loop(lambda n, x: n.sum() < 3, lambda n, x: (n + 1, (x * w).sin()), (w.sum() * 0, x.clone()))


def regions(x, w):
    return region(region(x, w), w)


def results(function, size, trained):
    generator = torch.Generator().manual_seed(size)
    x, w = (torch.rand(shape, generator=generator, requires_grad=trained) for shape in ((3, size), (size,)))
    found = tree_leaves(function(x, w))
    if trained:
        found += torch.autograd.grad(sum((each * each).sum() for each in found), (x, w))
    return found


@pytest.mark.parametrize(
    ("function", "eager", "trained"),
    [
        (recurrence, recurrence_row_by_row, True),
        (loop, loop, False),
        pytest.param(branches, branches, True, marks=pytest.mark.exhaustive),
        pytest.param(regions, regions, True, marks=pytest.mark.exhaustive),
    ],
)
def test_bodies_are_compiled_for_every_size(function, eager, trained, seen):
    compiled = torch.compile(function, backend="opkit", dynamic=True, fullgraph=True, options=STRICT)
    for size in (5, 4):
        torch.testing.assert_close(results(compiled, size, trained), results(eager, size, trained))
    assert sum(graph.name.startswith("body") and bool(graph.texts) for graph in seen) >= 2


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch refuses a scan of no rows")
def test_a_scan_of_no_rows():
    w, x = torch.ones(4), torch.ones(0, 4)
    carried, made = torch.compile(recurrence, backend="opkit", fullgraph=True, options=STRICT)(x, w)
    torch.testing.assert_close(carried, w)
    assert made.shape == (0,)


@pytest.mark.exhaustive
def test_what_is_left_to_torch_is_logged_and_refused_in_strict_mode(caplog):
    def attend(q):
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 0.5)

    q = torch.randn(1, 1, 128, 8)
    with caplog.at_level(logging.WARNING, logger="opkit.compiler"):
        found = torch.compile(attend, backend="opkit")(q)
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=0.5 / 8**0.5))
    assert "flex_attention calls the graph sdpa_score0, and is not compiled. torch runs it." in caplog.text
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"cannot compile inference .*: flex_attention calls the graph sdpa_score0"):
        torch.compile(attend, backend="opkit", options=STRICT)(q)


def test_a_body_that_is_not_compiled_is_named(caplog):
    def step(x):
        return torch.cond(
            x.sum() > 0, lambda x: x.view(torch.float4_e2m1fn_x2).view(torch.float32) + 1, lambda x: x.sin(), (x,)
        )

    x = torch.ones(4)
    with caplog.at_level(logging.WARNING, logger="opkit.compiler"):
        torch.testing.assert_close(torch.compile(step, backend="opkit")(x), step(x))
    assert "runs in eager mode: view (aten.view.dtype) is of torch.float4_e2m1fn_x2." in caplog.text
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"CompileError: torch.*cannot compile body \d+: view"):
        torch.compile(step, backend="opkit", options=STRICT)(x)


def test_sizes_that_are_turned_around_for_an_operator_of_torchs():
    """A flipped tensor is no view of torch's, also where its stride is a symbol."""
    x = torch.rand(6, 8)
    compiled = torch.compile(lambda x: x.flip(0).sort(0)[0], backend="opkit", dynamic=True, options=STRICT)
    torch.testing.assert_close(compiled(x), x.sort(0)[0])
