"""Compiled models of several processes: ``cases.py`` holds the checks, which one start of the processes runs."""

import types
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist

from opkit.compiler.run import cuda_graphs
from opkit.compiler.run.plan import GraphConstants

processes.need_gloo()

FILE = Path(__file__).with_name("cases.py")
CASES = (
    "mlp", "sequence_parallel", "uneven_shards", "change_of_dimension", "plain_collectives",
    "collectives_with_gradients", "kernels_while_a_collective_runs", "results_without_a_wait",
    "results_that_eager_mode_does_not_await", "stored_plans", "fsdp", "fsdp_mixed_precision", "failures",
)  # fmt: skip
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
FAILS = pytest.mark.skip(reason="torch before 2.14 saves device meshes among tensors, with any backend")
ON_ONE_RANK = pytest.param(
    "compiled_on_one_rank",
    marks=[pytest.mark.exhaustive, *([pytest.mark.skip(reason="new in torch 2.14")] if OLD else [])],
)
CHECKPOINTED = pytest.param("checkpointed", marks=[FAILS] if OLD else [])
MORE = ("block", "embedding", "sizes_that_change", "fsdp_offloaded", "ddp", "compiled_autograd")


results = processes.fixture(FILE, "test_case")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [*CASES, CHECKPOINTED, ON_ONE_RANK, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)]
)
def test_case(name, results):
    assert results[name] == ["", ""], "\n".join(results[name])


@pytest.mark.distributed
@pytest.mark.exhaustive
@pytest.mark.skipif(OLD, reason="before torch 2.14 attention of several processes is a graph break")
@pytest.mark.parametrize("name", ["attention_of_distributed_tensors", "attention_in_context_parallel"])
def test_attention(name, tmp_path):
    (found,) = processes.results_of(FILE, 2, [name], tmp_path).values()
    assert found == ["", ""], "\n".join(found)


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_two_dimensions(tmp_path):
    (found,) = processes.results_of(FILE, 4, ["two_dimensions"], tmp_path).values()
    assert found == [""] * 4, "\n".join(found)


@pytest.mark.usefixtures("fresh")
def test_a_mesh_of_512_processes(seen):
    """A fake process group compiles the graphs of one of them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=9, world_size=512)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (64, 8), mesh_dim_names=("data", "tensor"))
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch.compile(model, backend="opkit", options={"strict": True})(torch.rand(4, 16)).sum().backward()
        assert all(parameter.grad.to_local().shape == parameter.to_local().shape for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
    forward, backward = seen
    assert "_c10d_functional.all_reduce.default" in [getattr(step, "target", "") for step in forward.plan.steps]
    reason = cuda_graphs._refusal(types.SimpleNamespace(plan=forward.plan, constants=GraphConstants()), False, 0)
    assert reason.startswith("_c10d_functional.all_reduce.default communicates with other processes")
    assert backward.reason == ""
