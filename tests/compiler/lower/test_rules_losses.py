"""Losses and their derivatives against eager."""

from __future__ import annotations

import pytest
import torch

from tests.compiler import interpreter
from tests.compiler.graphs import check, externs, program_of, to_numpy

aten = torch.ops.aten
FLOATS = [torch.float32, torch.bfloat16]
REDUCTIONS = [0, 1, 2]
NARROW = {"rtol": 3e-2, "atol": 3e-2}


def numbers(*shape, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.randn(shape).to(dtype)


def tolerances(dtype):
    return NARROW if dtype in (torch.bfloat16, torch.float16) else {}


# ---- of classes ------------------------------------------------------------------------------------------------------


def classes(shape, dtype, ignored=2):
    """Scores, targets of which some are ignored, and weights."""
    torch.manual_seed(1)
    target = torch.randint(0, shape[1] if len(shape) > 1 else shape[0], (*shape[:1], *shape[2:])[: len(shape) - 1 or 0])
    if target.ndim:
        target[..., 0] = ignored
    return numbers(*shape, dtype=dtype), target, torch.rand(shape[1] if len(shape) > 1 else shape[0]).to(dtype)


def slope_of(loss):
    return aten.nll_loss2d_backward if loss is aten.nll_loss2d_forward else aten.nll_loss_backward


@pytest.mark.sweep
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3, 5), (4,)])
def test_nll_loss(shape, dtype, reduction, ignored):
    x, target, weight = classes(shape, dtype, ignored)
    loss = aten.nll_loss2d_forward if len(shape) == 4 else aten.nll_loss_forward
    limits = tolerances(dtype)
    check(lambda x, t: loss(x, t, None, reduction, ignored), x, target, **limits)
    check(lambda x, t, w: loss(x, t, w, reduction, ignored), x, target, weight, **limits)
    value, weights = loss(x, target, weight, reduction, ignored)
    grad = torch.rand(value.shape).to(dtype)
    slope = slope_of(loss)
    check(
        lambda g, x, t, w, total: slope(g, x, t, w, reduction, ignored, total),
        grad,
        x,
        target,
        weight,
        weights,
        **limits,
    )
    check(lambda g, x, t, total: slope(g, x, t, None, reduction, ignored, total), grad, x, target, weights, **limits)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss_of_nothing(reduction):
    none = torch.zeros(0, dtype=torch.int64)
    check(lambda x, t: aten.nll_loss_forward(x, t, None, reduction, -100), numbers(0, 3), none)
    all_ignored = torch.tensor([-100, -100])
    check(lambda x, t: aten.nll_loss_forward(x, t, None, reduction, -100), numbers(2, 3), all_ignored)


def test_nll_loss_does_not_read_what_is_ignored():
    x = torch.tensor([[float("nan"), 1.0], [0.5, 2.0]])
    check(lambda x, t: aten.nll_loss_forward(x, t, None, 1, -100), x, torch.tensor([-100, 0]))


@pytest.mark.parametrize("target", [[0, 3], [-1, 0]])
def test_nll_loss_of_no_class(target):
    def loss(x, t):
        return aten.nll_loss_forward(x, t, None, 1, -100)

    given = [numbers(2, 3), torch.tensor(target)]
    with pytest.raises(IndexError, match="out of bounds"):
        loss(*given)
    program = program_of(loss, given[0], torch.tensor([0, 0]))
    with pytest.raises(IndexError, match="outside a dimension"):
        interpreter.run(program, [to_numpy(a) for a in given])


def test_cross_entropy_needs_no_call_for_its_loss():
    target = torch.tensor([1, -100, 0])
    called = externs(program_of(lambda x, t: torch.nn.functional.cross_entropy(x, t), numbers(3, 4), target))
    assert not any("nll_loss" in call for call in called)


# ---- of an element and its target ------------------------------------------------------------------------------------

LOSSES = {
    "mse_loss": (aten.mse_loss, aten.mse_loss_backward, [()]),
    "smooth_l1_loss": (aten.smooth_l1_loss, aten.smooth_l1_loss_backward, [(1.0,), (0.5,)]),
    "huber_loss": (aten.huber_loss, aten.huber_loss_backward, [(1.0,), (0.3,)]),
    "soft_margin_loss": (aten.soft_margin_loss, aten.soft_margin_loss_backward, [()]),
}


def of_two(loss, *rest):
    return lambda x, y: loss(x, y, *rest)


def of_three(slope, *rest):
    return lambda g, x, y: slope(g, x, y, *rest)


CASES = [(torch.float32, (3, 5)), (torch.float64, ()), (torch.float32, (0, 4)), (torch.bfloat16, (3, 5))]


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "shape"), CASES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, reduction, dtype, shape):
    loss, slope, more = LOSSES[name]
    x, y = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
    for rest in more:
        check(of_two(loss, reduction, *rest), x, y, **tolerances(dtype))
        grad = torch.rand(loss(x, y, reduction, *rest).shape).to(dtype)
        check(of_three(slope, reduction, *rest), grad, x, y, **tolerances(dtype))


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss"])
def test_defaults_and_special_values(name):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    other = torch.tensor([1.0, 2.0, -float("inf"), 1.0, -0.0])
    check(of_two(LOSSES[name][0], 0), special, other)
    check(of_two(LOSSES[name][0]), numbers(4), numbers(4, seed=1))


@pytest.mark.sweep
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_binary_cross_entropy(dtype, reduction):
    x, y, weight = (torch.rand(3, 4).to(dtype) for _ in range(3))
    x[0, 0], x[0, 1], y[0, 0] = 0.0, 1.0, 1.0
    limits = tolerances(dtype)
    check(lambda x, y: aten.binary_cross_entropy(x, y, None, reduction), x, y, **limits)
    check(lambda x, y, w: aten.binary_cross_entropy(x, y, w, reduction), x, y, weight, **limits)
    grad = torch.ones(3, 4).to(dtype) if reduction == 0 else torch.ones(()).to(dtype)
    inside = x.clamp(0.1, 0.9)
    backward = aten.binary_cross_entropy_backward
    check(lambda g, x, y, w: backward(g, x, y, w, reduction), grad, inside, y, weight, **limits)
    check(lambda g, x, y: backward(g, x, y, None, reduction), grad, inside, y, **limits)


@pytest.mark.sweep
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_binary_cross_entropy_with_logits(dtype, reduction):
    x, y, weight = numbers(3, 4, dtype=dtype) * 20, torch.rand(3, 4).to(dtype), torch.rand(4).to(dtype)
    limits = {"rtol": 6e-2, "atol": 0.3} if dtype in (torch.bfloat16, torch.float16) else {}
    loss = aten.binary_cross_entropy_with_logits
    check(lambda x, y: loss(x, y, None, None, reduction), x, y, **limits)
    check(lambda x, y, w: loss(x, y, w, None, reduction), x, y, weight, **limits)
    check(lambda x, y, w: loss(x, y, w, w, reduction), x, y, weight, **limits)
