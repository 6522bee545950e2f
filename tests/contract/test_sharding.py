"""The group ``sharding``: right rules pass, derived or registered; wrong ones are found."""

import pytest
import torch
import torch.distributed.tensor as dt
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.contract.properties import sharding
from opkit.testing import tensor

SHARDING = [each.name for each in sharding.PROPERTIES]


def checked(target, **how):
    return opkit.check(target, properties=SHARDING, max_examples=10, **how)


def outcomes(report):
    return {
        **dict.fromkeys([each.property for each in report.passed], "passed"),
        **{each.property: each.message for each in report.failures},
        **{each.property: each.reason for each in report.skipped},
    }


@pytest.fixture
def name():
    yield "sharded::checked"
    opkit.remove("sharded::checked")


def rms_norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * weight


def linear(x: Float[Tensor, "b k"], weight: Float[Tensor, "n k"]) -> Float[Tensor, "b n"]:
    return torch.nn.functional.linear(x, weight)


def extrema(x: Float[Tensor, "b d"]) -> tuple[Float[Tensor, "d"], Float[Tensor, "b"], Float[Tensor, "d"]]:
    return x.amax(0), x.amin(1), x.mean(0)


def running(x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    return x.cumsum(0)


@pytest.mark.parametrize("function", [rms_norm, linear, running])
def test_derived_rules_pass(name, function):
    found = outcomes(checked(opkit.custom_op(name, function, mutates_args=())))
    assert found == dict.fromkeys(SHARDING, "passed")


def test_extrema_have_no_gradients_on_pieces(name):
    found = outcomes(checked(opkit.custom_op(name, extrema, mutates_args=())))
    assert found["sharding.results"] == "passed"
    assert "no strategy has gradients" in found["sharding.gradients"]


def test_arguments_that_are_written_to(name):
    @opkit.custom_op(name, mutates_args=("x",))
    def scale(x: Float[Tensor, "b d"], by: Float[Tensor, "d"]) -> None:
        x.mul_(by)

    found = outcomes(checked(scale))
    assert found == {"sharding.results": "passed", "sharding.gradients": "it writes to its arguments"}
    scale.register_sharding(lambda x, by: [([], [dt.Partial("max"), dt.Replicate()])])
    assert "tensor 0 after the call" in outcomes(checked(scale))["sharding.results"]


def planted():
    s, r = dt.Shard, dt.Replicate()
    return [
        (rms_norm, lambda x, weight: [([s(x.ndim - 1)], [s(x.ndim - 1), s(0)])]),
        (linear, lambda x, weight: [([s(0)], [s(1), s(1)])]),
        (linear, lambda x, weight: [([s(0)], [r, s(0)])]),
        (linear, lambda x, weight: [([r], [s(1), s(1)])]),
        (linear, lambda x, weight: [([dt.Partial("max")], [s(1), s(1)])]),
        (linear, lambda x, weight: [([dt.Partial()], [dt.Partial(), dt.Partial()])]),
        (extrema, lambda x: [([dt.Partial("min"), s(0), dt.Partial("avg")], [s(0)])]),
        (extrema, lambda x: [([dt.Partial("max"), s(0), dt.Partial()], [s(0)])]),
        (running, lambda x: [([s(0)], [s(0)])]),
        (running, lambda x: [([s(1)], [s(1)]), ([dt.Partial("sum")], [s(0)])]),
    ]


@pytest.mark.parametrize("number", range(10))
def test_wrong_rules_are_found(name, number):
    function, rule = planted()[number]
    op = opkit.custom_op(name, function, mutates_args=())
    op.register_sharding(rule)
    found = outcomes(checked(op))
    assert "(registered) is wrong" in found["sharding.results"]


def test_a_kernel_that_does_not_follow_its_reference_on_pieces(name):
    op = opkit.custom_op(name, rms_norm, mutates_args=())
    op.register_kernel("cpu", lambda x, weight: rms_norm(x, weight) * (1 + 0.5 * (x.shape[0] % 2)), trusted=True)
    assert "(derived symbolically) is wrong" in outcomes(checked(op))["sharding.results"]


def test_wrong_gradients_are_found(name):
    op = opkit.custom_op(name, rms_norm, mutates_args=())

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        _, gradients = torch.func.vjp(rms_norm, x, weight)
        own, of_weight = gradients(grad)
        return own * x.shape[0], of_weight

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    found = outcomes(checked(op))
    assert found["sharding.results"] == "passed"
    assert "the gradient of tensor 0" in found["sharding.gradients"]


def test_operators_without_a_rule_are_skipped(name):
    @opkit.custom_op(name, mutates_args=())
    def noise(x: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
        return x + torch.rand_like(x)

    assert "no argument may be sharded" in outcomes(checked(noise))["sharding.results"]
    assert "no strategy" in outcomes(checked(torch.ops.aten.add.Tensor))["sharding.results"]


def test_rules_registered_with_torch():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @torch.library.custom_op("sharded_elsewhere::running", mutates_args=())
    def total(x: Tensor) -> Tensor:
        return x.cumsum(0)

    rows = tensor("b d")
    for dim, wanted in ((1, "passed"), (0, "(registered) is wrong")):
        register_sharding(torch.ops.sharded_elsewhere.running.default)(
            lambda x, dim=dim: [([Replicate()], [Replicate()]), ([Shard(dim)], [Shard(dim)])]
        )
        assert wanted in outcomes(checked(total, args=(rows,)))["sharding.results"]
