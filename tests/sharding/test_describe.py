"""What ``opkit describe`` says about sharding, and the example."""

import runpy
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import opkit
from opkit.sharding.describe import sharding_of


def described(op):
    return {line.rule: (line.origin, line.detail) for line in sharding_of(op)}


def test_sizes_have_the_names_of_the_annotations(name):
    @opkit.custom_op(name)
    def norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * weight

    assert described(norm) == {
        "batch": ("derived symbolically", "Shard(0), Replicate -> Shard(0)"),
        "none, partial arguments": ("derived symbolically", "Replicate, Partial(sum) -> Partial(sum)"),
        "d": ("not offered", "rsqrt follows its avg, and the two cannot be exchanged"),
    }
    norm.register_sharding(lambda x, weight: [([Shard(0)], [Shard(0), Replicate()])])
    assert described(norm) == {"any": ("given", "Shard(0), Replicate -> Shard(0)")}


def test_operators_without_a_rule_say_why(name):
    @opkit.custom_op(name, mutates_args=())
    def noise(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    assert described(noise) == {
        "every size": ("not offered", "its reference draws random numbers (aten.rand_like.default)")
    }


def test_the_example():
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sharding.py"))["main"]()
