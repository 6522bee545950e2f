"""vmap: one kernel call over ``*batch``, the reference mapped, a loop over an opaque kernel; never a wrong result."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit

calls = {"n": 0}


def counting(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls["n"] += 1
        return op.reference(*args, **kwargs)

    op.register_kernel("cpu", kernel)
    return op


def affine(x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"], w: Float[Tensor, "d"], k: float = 2.0) -> (
    Float[Tensor, "*batch d"]
):  # fmt: skip
    return x * w + y.sin() * k


def split(x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    return x.exp(), x.sum(-1)


def centred(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    return x - x.mean()


def matrix(x: Float[Tensor, "n m"], y: Float[Tensor, "m"]) -> Float[Tensor, "n"]:
    return x @ y


AFFINE = counting(opkit.custom_op("vmaps::affine", affine))
SPLIT = counting(opkit.custom_op("vmaps::split", split))
MATRIX = counting(opkit.custom_op("vmaps::matrix", matrix))


def kernel_calls(function: Any, *args: Any) -> tuple[Any, int]:
    before = calls["n"]
    return function(*args), calls["n"] - before


def test_every_combination_of_mapped_dimensions_is_one_call() -> None:
    for dims in itertools.product((None, 0, 1), (None, 0, -1)):
        if dims == (None, None):
            continue
        x, y = (
            torch.randn(3, 4) if d is None else torch.randn(3, 4).unsqueeze(d).repeat_interleave(5, d) for d in dims
        )
        w = torch.randn(4)
        in_dims = (*dims, None)
        got, count = kernel_calls(torch.vmap(AFFINE, in_dims), x, y, w)
        expected = torch.vmap(affine, in_dims)(x, y, w)
        torch.testing.assert_close(got, expected, msg=lambda text, dims=dims: f"{dims}: {text}")
        assert count == 1, dims


def test_an_argument_without_batch_that_is_mapped_maps_the_reference() -> None:
    x, w = torch.randn(5, 3, 4), torch.randn(5, 4)
    got, count = kernel_calls(torch.vmap(AFFINE), x, x, w)
    torch.testing.assert_close(got, torch.vmap(affine)(x, x, w))
    assert count == 0
    got, count = kernel_calls(torch.vmap(MATRIX), torch.randn(5, 3, 4), torch.randn(5, 4))
    assert (got.shape, count) == ((5, 3), 0)


def test_several_results() -> None:
    (a, b), count = kernel_calls(torch.vmap(SPLIT, in_dims=1), torch.randn(3, 5, 4))
    assert (a.shape, b.shape, count) == ((5, 3, 4), (5, 3), 1)


def test_nested() -> None:
    x, y, w = torch.randn(2, 3, 4), torch.randn(3, 2, 4), torch.randn(4)
    nest = lambda f: torch.vmap(torch.vmap(f, (0, 0, None)), (0, 1, None))  # noqa: E731
    got, count = kernel_calls(nest(AFFINE), x, y, w)
    torch.testing.assert_close(got, nest(affine)(x, y, w))
    assert count == 1


def test_an_operator_that_mixes_its_batch_is_found_out() -> None:
    op = counting(opkit.custom_op("vmaps::centred", centred))
    x = torch.randn(5, 3, 4)
    for _ in range(2):
        torch.testing.assert_close(torch.vmap(op)(x), torch.vmap(centred)(x))
    details = {rule.rule: rule.detail for rule in op.describe().rules}
    assert "does not treat its leading *batch sizes independently" in details["vmap"]


def test_a_loop_over_an_opaque_kernel() -> None:
    def with_numpy(x: Tensor, k: float = 1.0) -> tuple[Tensor, Tensor]:
        a = np.sort(x.numpy()) * k
        return torch.from_numpy(a), torch.tensor(float(a.sum()))

    op = opkit.custom_op("vmaps::with_numpy", with_numpy, mutates_args=())
    x = torch.randn(4, 5)
    got = torch.vmap(op, in_dims=1)(x)
    want = [with_numpy(column) for column in x.T.contiguous()]
    torch.testing.assert_close(got[0], torch.stack([w[0] for w in want]))
    torch.testing.assert_close(got[1], torch.stack([w[1] for w in want]).float())


def test_lists() -> None:
    def total(xs: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
        return sum(xs[1:], xs[0])

    op = counting(opkit.custom_op("vmaps::total", total))
    xs = [torch.randn(3, 4), torch.randn(3, 4)]
    torch.testing.assert_close(torch.vmap(op)(xs), xs[0] + xs[1])


def test_random_references_follow_the_randomness_flag() -> None:
    def noisy(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + torch.rand_like(x)

    op = opkit.custom_op("vmaps::noisy", noisy)
    x = torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(op)(x)
    same = torch.vmap(op, randomness="same")(x)
    assert torch.equal(same[0], same[1])
    different = torch.vmap(op, randomness="different")(x)
    assert not torch.equal(different[0], different[1])


def test_empty_mapped_dimension() -> None:
    assert torch.vmap(AFFINE, (0, 0, None))(torch.randn(0, 3, 4), torch.randn(0, 3, 4), torch.randn(4)).shape == (
        0,
        3,
        4,
    )
