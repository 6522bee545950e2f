"""Sharding: an operator on DTensors, by a rule that is derived from its reference.

It runs in one process: the mesh has one device, where nothing is communicated. A mesh of many devices is used in the same way::

    python examples/sharding.py
"""

import tempfile

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import opkit
from opkit.sharding.describe import sharding_of


@opkit.custom_op("example::sharded_norm")
def norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
    """Root-mean-square layer normalisation (Zhang and Sennrich, 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def main() -> None:
    """The batch stays sharded, and the gradient of the weight is a sum over the devices."""
    rules = {line.rule: line.detail for line in sharding_of(norm)}
    assert rules["batch"] == "Shard(0), Replicate -> Shard(0)"
    print("\n".join(f"{size}: {rule}" for size, rule in rules.items()))

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", store=dist.FileStore(file.name, 1), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            x = distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)]).requires_grad_()
            weight = distribute_tensor(torch.randn(8), mesh, [Replicate()]).requires_grad_()
            y = norm(x, weight)
            y.sum().backward()
            assert y.placements == (Shard(0),)
            assert x.grad.placements == (Shard(0),)
            assert weight.grad.placements == (Partial(),)
            torch.testing.assert_close(y.full_tensor(), norm.reference(x.full_tensor(), weight.full_tensor()))
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
