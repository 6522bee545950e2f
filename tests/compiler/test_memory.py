"""Memory between the steps of a graph: what is in the arena, and for how long."""

import pytest
import torch

import opkit

pytestmark = pytest.mark.usefixtures("fresh")
MIB = 1 << 20


def products(x, w):
    return ((x @ w).exp() @ (x @ w).t()) @ x


def saves(x, w):
    kept = []
    for _ in range(4):
        x = x @ w
        kept.append(x.view(8, 4, 16).transpose(0, 1).reshape(32, 16))
        x = x.relu()
    return x, *kept


def overwrites(x, w):
    y = x @ w
    copy = y.view(8, 4, 16).transpose(0, 1).reshape(32, 16)
    y.mul_(2)
    return copy, y @ w, y.t().clone()


def scales(xs, y):
    for x in xs:
        x.mul_(y)


def test_what_is_overwritten_is_so_in_the_kernel_that_computes_it():
    """Forty complex tensors are several kernels, of which one may finish what another has begun."""
    xs, y = [torch.randn(50, dtype=torch.complex64) for _ in range(40)], torch.randn(50, dtype=torch.complex64)
    expected = [x * y for x in xs]
    (graph,) = opkit.explain(scales, xs, y).graphs
    assert graph.arena < 4 * 50 * 8
    assert len(graph.kernels) < 6
    torch.testing.assert_close(xs, expected)


def swaps(x, y):
    a, b = x + 0, y * 1
    x.copy_(b)
    y.copy_(a)
    return x.sin() + y, a


def shifts(x, y):
    x[1:].copy_(x[:-1].clone())
    y.copy_(x.flip(0))
    x.add_(y)
    return y.t().clone()


@pytest.mark.parametrize("function", [swaps, shifts])
def test_inputs_that_are_overwritten_with_each_other(function):
    first = [torch.randn(6, 6), torch.randn(6, 6)]
    second = [x.clone() for x in first]
    found, expected = torch.compile(function, backend="opkit")(*first), function(*second)
    torch.testing.assert_close((found, first), (expected, second))


@pytest.mark.parametrize(
    ("function", "rows"),
    [(products, 1500), (products, 5), (saves, 32), (overwrites, 32)],
    ids=lambda each: str(each)[:14],
)
def test_the_same_numbers_as_eager(function, rows):
    x, w = torch.randn(rows, 16) / 8, torch.randn(16, rows if function is products else 16) / 8
    expected, compiled = function(x, w), torch.compile(function, backend="opkit")
    for _ in range(2):  # what a call leaves in the arena is not the next one's
        torch.testing.assert_close(compiled(x, w), expected, rtol=1e-5, atol=1e-4)


def test_large_buffers_of_training_have_memory_of_their_own_while_they_are_needed():
    """Of the four, no more than two are needed at a time; an arena for them would stay until the backward's peak."""
    x, w = torch.randn(1500, 16), torch.randn(16, 1500, requires_grad=True)
    for graph in opkit.explain(products, x, w).graphs:
        assert graph.arena < MIB
        assert all(place.nbytes < MIB for place in graph.places)
    few = torch.randn(16, 64, requires_grad=True)
    _, backward = opkit.explain(products, x[:64], few).graphs
    assert 64 * 64 * 4 in {place.nbytes for place in backward.places}


def test_large_buffers_of_inference_share_an_arena():
    """Memory that stays is not zeroed again by the system in each call."""
    (graph,) = opkit.explain(products, torch.randn(1500, 16), torch.randn(16, 1500)).graphs
    assert {place.nbytes for place in graph.places} == {1500 * 1500 * 4}
    assert graph.arena == 3 * 1500 * 1500 * 4  # x @ w, its exp, their product


def test_a_copy_that_is_returned_is_made_where_what_it_copies_is():
    """So the arena needs place for one step of the four."""
    (graph,) = opkit.explain(saves, torch.randn(32, 16), torch.randn(16, 16)).graphs
    assert graph.arena <= 2 * 32 * 16 * 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_operator_that_caches_what_it_computed_for_a_tensor_sees_a_version_of_each_call(mode):
    """Parts of an arena are the same tensors in each call, with other elements."""
    cached = {}

    @torch.library.custom_op("test_memory::largest", mutates_args=())
    def largest(x: torch.Tensor) -> torch.Tensor:
        key = id(x), x._version
        if key not in cached:
            cached[key] = x.max()
        return cached[key].clone()

    largest.register_fake(lambda x: x.new_empty(()))

    def twice(x):
        y = x.sin() + 1
        return largest(y), largest(y)

    compiled = torch.compile(twice, backend="opkit", options={"strict": True})
    with mode():
        for n in range(4):
            x = torch.full((1000,), n / 4)
            for found, expected in zip(compiled(x), (x.sin() + 1).max().expand(2), strict=True):
                assert found == expected
    assert len(cached) == 4  # the second call of each finds what the first one stored
