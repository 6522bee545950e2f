"""Operators of others that write to their arguments: compiled functions write what eager mode writes, without copies of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opkit


@torch.library.custom_op("opkit_test_in_place::add_to", mutates_args=("x",))
def add_to(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("opkit_test_in_place::scaled", mutates_args=("x", "y"))
def scaled(x: Tensor, y: Tensor, by: Tensor) -> Tensor:
    total = x.sum() + y.sum()
    x.mul_(2)
    y.mul_(3)
    return total + by


@scaled.register_fake
def _scaled_fake(x: Tensor, y: Tensor, by: Tensor) -> Tensor:
    return torch.empty_like(by)


@torch.library.custom_op("opkit_test_in_place::add_to_all", mutates_args=("tensors",))
def add_to_all(tensors: list[Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    for each in tensors:
        each.add_(y)
    return tensors[0] * 2, tensors[1] + 1


@add_to_all.register_fake
def _add_to_all_fake(tensors: list[Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensors[0]), torch.empty_like(tensors[1])


def to_an_input(x: Tensor, y: Tensor) -> Any:
    z = x * 2
    add_to(x, y * 2)
    return z + x


def twice(x: Tensor, y: Tensor) -> Any:
    add_to(x, y)
    add_to(x, x * y)
    return x.sum()


def to_a_slice(x: Tensor, y: Tensor) -> Any:
    add_to(x[1:3], y[:2])
    return x + 1


def to_two_inputs(x: Tensor, y: Tensor) -> Any:
    return scaled(x, y, y[0] * 1.5), x + y


def to_a_list(x: Tensor, y: Tensor) -> Any:
    first, second = add_to_all([x, y], x.sum())
    return first + x, second + y


def to_memory_of_the_graph(x: Tensor, y: Tensor) -> Any:
    c = torch.zeros_like(x)
    add_to(c, y)
    add_to(c, y * 2)
    return c


def to_a_copy(x: Tensor, y: Tensor) -> Any:
    c, d = x.clone(), x.clone()
    add_to(c, y)
    add_to(d, y * 2)
    return c - d, x + 1


def to_a_row(x: Tensor, y: Tensor) -> Any:
    add_to(x[1], y[0])
    return x + 1


def to_a_part(x: Tensor, y: Tensor) -> Any:
    cube = x.view(2, 2, 4) if x.shape[0] == 4 else x[None]
    add_to(cube[0, 1:, 1:3], y[0, :2])
    return x + 1


def to_a_column(x: Tensor, y: Tensor) -> Any:
    add_to(x.t()[1], y[0, 0])
    return x + 1


def with_a_view_before(x: Tensor, y: Tensor) -> Any:
    c = x + y
    turned = c.t()
    add_to(c, y)
    return turned * 2


def with_a_copy_before(x: Tensor, y: Tensor) -> Any:
    joined = torch.cat([x, y])
    add_to(x, y)
    return joined + 1, x.sum()


def returned(x: Tensor, y: Tensor) -> Any:
    add_to(x, y)
    return x


def by_itself(x: Tensor, y: Tensor) -> Any:
    add_to(x, x[:, :4])
    return x + y


def index_put(x: Tensor, y: Tensor) -> Any:
    x[torch.tensor([2, 0])] = y[:2]
    return x * 2


def index_put_twice(x: Tensor, y: Tensor) -> Any:
    z = x.sum()
    x[:, torch.tensor([1, 3])] = y[:, :2]
    x[torch.tensor([1]), torch.tensor([-1])] = z
    return x.sum(0)


def index_copy(x: Tensor, y: Tensor) -> Any:
    x.index_copy_(0, torch.tensor([3, 1]), y[1:3] * 2)
    return x + y


def index_add(x: Tensor, y: Tensor) -> Any:
    x.index_add_(0, torch.tensor([3, 1, 3]), y[:3])
    return x.exp()


def slices(x: Tensor, y: Tensor) -> Any:
    x[1:3, ::2] = y[:2, 1:3]
    x[0] = 5.0
    x[:, -1] += 1
    return x * y


def scatter(x: Tensor, y: Tensor) -> Any:
    x.scatter_(1, torch.tensor([[1, 0], [0, 2], [3, 1]]), y)
    return x.t()


def from_itself(x: Tensor, y: Tensor) -> Any:
    x[torch.tensor([0, 1])] = x[torch.tensor([1, 2])] * 2
    x[1:] = x[:-1] + x[1:]
    return x + y


def shifted(x: Tensor, y: Tensor) -> Any:
    x[:-1] = x[1:] * 2 + 1
    return x.sum(0), x + y


def shifted_back(x: Tensor, y: Tensor) -> Any:
    x[1:] = x[:-1] * 2 + 1
    return x.sum(0), x + y


def reversed_rows(x: Tensor, y: Tensor) -> Any:
    x.index_copy_(0, torch.arange(x.shape[0]).flip(0), (x * 2).sin())
    return x * y


def with_the_old_values_after(x: Tensor, y: Tensor) -> Any:
    old = x * 1
    view = x[0].clone()
    x[torch.tensor([0])] = y[:1]
    return old - x, view


def masked(x: Tensor, y: Tensor) -> Any:
    x[y > 0] = 0.0
    x[x > 0.5] += 1
    return x


def of_bfloat16(x: Tensor, y: Tensor) -> Any:
    z = x.bfloat16()
    z.index_add_(0, torch.tensor([1, 1]), y[:2].bfloat16())
    z[torch.tensor([0])] = y[:1].bfloat16()
    return z.float()


def to_a_result(x: Tensor, y: Tensor) -> Any:
    x[torch.tensor([2])] = y[:1]
    return x, x[0]


SCATTERS = (index_put, index_put_twice, index_copy, index_add, slices, scatter)
OTHER_SCATTERS = (
    from_itself,
    shifted,
    shifted_back,
    reversed_rows,
    with_the_old_values_after,
    masked,
    of_bfloat16,
    to_a_result,
)
IN_PLACE = (to_an_input, twice, to_a_slice, to_a_row, to_a_column, to_two_inputs, to_a_list, to_memory_of_the_graph)
OTHERS = (to_a_copy, to_a_part, with_a_view_before, with_a_copy_before, returned, by_itself)


@pytest.mark.parametrize(
    "function", [*IN_PLACE, *OTHERS, *SCATTERS, *OTHER_SCATTERS], ids=lambda function: function.__name__
)
def test_results_and_arguments_are_those_of_eager_mode(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    compiled = torch.compile(function, backend="opkit", fullgraph=True, options={"strict": True})
    for rows in (4, 70, 65):  # the later ones have dynamic sizes
        given = torch.randn(rows, 4), torch.randn(rows, 4)
        expected = tuple(each.clone() for each in given)
        torch.testing.assert_close(compiled(*given), function(*expected))
        torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("function", IN_PLACE, ids=lambda function: function.__name__)
def test_nothing_is_copied(function: Callable[..., Any]) -> None:
    report = str(opkit.explain(function, torch.randn(4, 4), torch.randn(4, 4)))
    assert "opkit_test_in_place" in report
    assert "copy_" not in report
    assert "clone" not in report


@pytest.mark.parametrize("function", SCATTERS, ids=lambda function: function.__name__)
def test_scatters_copy_nothing(function: Callable[..., Any]) -> None:
    report = str(opkit.explain(function, torch.randn(4, 4), torch.randn(4, 4)))
    assert "aten.copy_" not in report


def test_a_static_cache() -> None:
    def step(cache: Tensor, k: Tensor, position: Tensor) -> Tensor:
        cache.index_copy_(2, position, k)
        shown = torch.arange(cache.shape[2]) <= position
        return torch.nn.functional.scaled_dot_product_attention(k, cache, cache, attn_mask=shown[None])

    torch.manual_seed(0)
    cache = torch.zeros(2, 3, 16, 8)
    expected = cache.clone()
    compiled = torch.compile(step, backend="opkit", fullgraph=True)
    for n in range(5):
        k, position = torch.randn(2, 3, 1, 8), torch.tensor([n])
        torch.testing.assert_close(compiled(cache, k, position), step(expected, k, position))
    assert torch.equal(cache, expected)


def test_what_is_saved_for_the_backward_keeps_its_values() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        add_to(x, torch.ones_like(x))
        return (w * x).sum()

    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    before = x.clone()
    loss = torch.compile(function, backend="opkit", fullgraph=True)(x, w)
    torch.testing.assert_close(x, before + 1)
    x.zero_()  # after the forward, which eager mode would refuse in the backward
    loss.backward()
    torch.testing.assert_close(w.grad, before + 1)


def test_keys_are_appended_to_pages_in_place() -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, values: Tensor, table: Tensor, before: Tensor) -> Tensor:
        opkit.append_kv(k * 2, k, keys, values, table, before)
        return opkit.paged_attention(q, keys, values, table, before + 1)

    def stacked(q: Tensor, k: Tensor, pages: Tensor, table: Tensor, before: Tensor) -> Tensor:
        return step(q, k, pages[0], pages[1], table, before)

    torch.manual_seed(0)
    table, before = torch.tensor([[3, 1], [0, 2]]), torch.tensor([5, 2])
    q, k, pages = torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 4, 4, 2, 8)
    expected = pages.clone()
    result = stacked(q, k, expected, table, before)
    functions: list[Callable[..., Tensor]] = [step, stacked]
    for function in functions:
        given = pages.clone()
        caches = [given] if function is stacked else [*given]
        compiled = torch.compile(function, backend="opkit", fullgraph=True)
        torch.testing.assert_close(compiled(q, k, *caches, table, before), result)
        torch.testing.assert_close(given, expected)
    report = str(opkit.explain(step, q, k, *pages, table, before))
    assert "opkit.append_kv.default" in report
    assert "copy_" not in report
