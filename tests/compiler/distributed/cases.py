"""Compiled models of several processes against those of one, which ``test_processes`` starts."""

import contextlib
import copy
import functools
import time

import processes
import pytest
import torch
import torch.distributed as dist
from processes import case
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import opkit
from opkit.compiler import backend, diagnostics
from opkit.compiler.run import plan_cache

compiled = functools.partial(torch.compile, backend="opkit", options={"strict": True})


@contextlib.contextmanager
def graphs():
    """The graphs that are compiled, none of which may run in eager mode."""
    found = []
    token = backend.observer.set(found.append)
    yield found
    backend.observer.reset(token)
    assert found
    assert not any(graph.reason for graph in found), [graph.reason for graph in found]


# ---- models ----------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width=8, hidden=12):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        batch, length = x.shape[:2]
        heads = [of(x).view(batch, length, -1, 2).transpose(1, 2) for of in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class OwnAttention(Attention):
    """The same by opkit's operator, whose arguments are DTensors where the layers' results are."""

    def forward(self, x):
        batch, length = x.shape[:2]
        heads = [of(x).view(batch, length, 4, 2) for of in (self.query, self.key, self.value)]
        mixed = opkit.attention(*heads, mask=opkit.masks.Causal(), layout="bshd")
        return self.out(mixed.reshape(batch, length, 8))


class Block(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.norm, self.attention, self.norm2, self.mlp = nn.LayerNorm(8), attention(), nn.LayerNorm(8), Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


MLP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
BLOCK_PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "attention.out": RowwiseParallel(),
    **{f"mlp.{name}": style for name, style in MLP_PLAN.items()},
}
SEQUENCE_PLAN = {
    **BLOCK_PLAN,
    "norm": SequenceParallel(),
    "norm2": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "attention.out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def whole_of(tensor):
    """A tensor without a wrapper that waits for it."""
    return tensor.wait() if isinstance(tensor, functional.AsyncCollectiveTensor) else tensor


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(call, model, x, steps=3):
    """The results of several steps of SGD, the gradients of the first, and the parameters after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        y = call(x)
        y.square().mean().backward()
        found += [whole(y.detach())] + ([] if step else [whole(p.grad) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found + [whole(p.detach()) for p in model.parameters()]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def check(model, mesh, plan, x, wrap=lambda call, model: call, to_input=lambda x: x, to_output=lambda y: y):
    """Compare the compiled model with the eager one, and with the model in one process."""
    alone, eager, ours = (copy.deepcopy(model) for _ in range(3))
    parallelize_module(eager, mesh, plan)
    parallelize_module(ours, mesh, plan)
    expected = trained(alone, alone, x)
    close(trained(lambda x: to_output(eager(to_input(x))), eager, x), expected)
    with graphs() as found:
        call = compiled(wrap(ours, ours))
        close(trained(lambda x: to_output(call(to_input(x))), ours, x), expected)
    return found


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


@case
def mlp(mesh):
    found = check(Mlp(), mesh, MLP_PLAN, torch.randn(4, 8))
    assert any("all_reduce" in str(graph.plan) for graph in found)


@case
def block(mesh):
    check(Block(), mesh, BLOCK_PLAN, torch.randn(2, 6, 8))


@case
def attention_of_distributed_tensors(mesh):
    columns = {f"attention.{name}": ColwiseParallel(use_local_output=False) for name in ("query", "key", "value")}
    found = check(Block(OwnAttention), mesh, BLOCK_PLAN | columns, torch.randn(2, 6, 8))
    assert len(found) == 2, "a forward and a backward"
    assert "opkit.attention" in str(found[0].plan)


@case
def attention_in_context_parallel(mesh):
    """Each process has a part of the sequence; gradients of parameters are summed."""
    model = Block(OwnAttention)
    ours, x = copy.deepcopy(model), torch.randn(2, 6 * mesh.size(), 8)
    y = model(x)
    y.sin().sum().backward()
    with graphs() as found, opkit.context_parallel(mesh, method="ring") as parallel:
        part = compiled(ours, fullgraph=True)(parallel.shard(x, 1))
        part.sin().sum().backward()
    assert len(found) == 2
    close(parallel.unshard(part, 1), y.detach())
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        close(mine.grad, theirs.grad)


@case
def sequence_parallel(mesh):
    found = check(
        Block(), mesh, SEQUENCE_PLAN, torch.randn(2, 6, 8),
        to_input=lambda x: distribute_tensor(x, mesh, [Shard(1)]),
        to_output=lambda y: y.redistribute(mesh, [Replicate()]).to_local(),
    )  # fmt: skip
    text = str([graph.plan for graph in found])
    assert "all_gather_into_tensor" in text
    assert "reduce_scatter_tensor" in text


@case
def uneven_shards(mesh):
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    check(Mlp(6, 7), mesh, plan, torch.randn(4, 6))


@case
def embedding(mesh):
    model = nn.Sequential(nn.Embedding(9, 8), Mlp())
    plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    check(model, mesh, plan, torch.arange(9).reshape(3, 3))


@case
def checkpointed(mesh):
    check(
        Block(),
        mesh,
        BLOCK_PLAN,
        torch.randn(2, 6, 8),
        lambda call, _: functools.partial(checkpoint, call, use_reentrant=False),
    )


@case
def sizes_that_change(mesh):
    model = Mlp()
    ours = parallelize_module(copy.deepcopy(model), mesh, MLP_PLAN)
    with graphs():
        call = compiled(ours, dynamic=True)
        for rows in (4, 7, 5):
            x = torch.randn(rows, 8)
            close(call(x), model(x))


@case
def change_of_dimension(mesh):
    def function(x):
        return x.redistribute(mesh, [Shard(1)]) * 2

    for rows in (4, 1):  # of one row, a process has nothing
        torch._dynamo.reset()
        x = torch.rand(rows, 6)
        with graphs():
            y = compiled(function, fullgraph=True)(distribute_tensor(x, mesh, [Shard(0)]))
            close(y.full_tensor(), x * 2)


@case
def compiled_on_one_rank(mesh):
    """Graphs that are the same for all processes: the host gets process groups of the mesh; torch computes with ranks."""
    plan = {"0": RowwiseParallel(input_layouts=Replicate())}
    model, x = nn.Sequential(nn.Embedding(9, 8)), torch.arange(9)
    ours = parallelize_module(copy.deepcopy(model), mesh, plan)
    with torch.compiler.config.patch(compile_on_one_rank=True):
        found = check(Mlp(), mesh, MLP_PLAN, torch.randn(4, 8))
        assert "mesh_get_process_group" in str(found[0].plan)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a size that an operator computes"):
            compiled(ours)(x)
        torch._dynamo.reset()
        close(torch.compile(ours, backend="opkit")(x), model(x))


# ---- collectives -----------------------------------------------------------------------------------------------------


def named(new, old):
    """The function of torch with its name in torch 2.14, or the one before."""
    return getattr(functional, new, None) or getattr(functional, old)


all_gather, reduce_scatter, all_gather_with_gradient, reduce_scatter_with_gradient = (
    named(f"{kind}_single{end}", f"{kind}_tensor{end}")
    for end in ("", "_autograd")
    for kind in ("all_gather", "reduce_scatter")
)
all_gather_coalesced = named("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
reduce_scatter_coalesced = named("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def collectives_of(x, group):
    y = x * 2
    yield functional.all_reduce(y, "sum", group)
    yield functional.all_reduce(y.long(), "max", group)
    yield all_gather(y, 0, group)
    yield all_gather(y, 1, group)
    yield reduce_scatter(y, "sum", 0, group)
    yield reduce_scatter(y + 1, "sum", 1, group)
    yield functional.broadcast(y, 1, group)
    yield functional.all_to_all_single(y, None, None, group)
    yield from functional.all_reduce_coalesced([y, y + 1], "sum", group)
    images = F.conv2d(y.reshape(1, 2, 3, 4), torch.ones(2, 2, 2, 2))  # which the compiler's layout interleaves
    yield all_gather(images, 0, group)
    yield from all_gather_coalesced([images, y.t().contiguous()], group)
    yield from all_gather_coalesced([y, y + 1], group)
    yield from reduce_scatter_coalesced([y, y + 1], "sum", [0, 0], group)


@case
def plain_collectives(mesh):
    group, x = mesh.get_group(), torch.randn(4, 6) + dist.get_rank()

    def function(x):
        return [each + 1 for each in collectives_of(x, group)]

    expected = function(x)
    with graphs():
        close(compiled(function, fullgraph=True)(x), expected)


@case
def collectives_with_gradients(mesh):
    group, rank = mesh.get_group(), dist.get_rank()

    def function(x):
        y = all_gather_with_gradient(x * (1 + rank), 0, group)
        z = reduce_scatter_with_gradient(y.sin(), "sum", 0, group)
        return functional.all_to_all_single_autograd(z, [2, 2], [2, 2], group) * rank

    found = []
    for each in (function, compiled(function, fullgraph=True)):
        x = torch.linspace(0, 1, 12).reshape(4, 3).requires_grad_()
        y = each(x)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
    close(found[1], found[0])


def products(x):
    """A product of matrices that are in memory at the same time."""
    found = [x]
    for _ in range(8):
        found.append((found[-1] @ found[-1]).sin() / 8)
    return functools.reduce(torch.matmul, reversed(found))


@case
def kernels_while_a_collective_runs(mesh):
    """Kernels run between a collective and its wait, and overwrite nothing that it reads: the other process starts it late."""
    group, x = mesh.get_group(), torch.rand(64, 64) / 64

    def function(x):
        sums = [functional.all_reduce(x + n, "sum", group) for n in range(4)]  # gloo's threads wait in them
        gathered = all_gather(x.exp(), 0, group)
        sent = functional.broadcast((x + dist.get_rank()).t(), 1, group)  # its strides are not those of its fake
        return products(x), gathered + 1, sum(sums), sent * 2

    expected = function(x)
    with graphs() as found:
        call = compiled(function, fullgraph=True)
        call(x)
    dist.barrier()
    time.sleep(dist.get_rank())
    close(call(x), expected)
    names = [getattr(step, "target", "kernels") for step in found[0].plan.steps]
    started = names.index("_c10d_functional.all_gather_into_tensor.default")
    between = names[started + 1 : names.index("opkit.wait")]
    assert between.count("kernels") >= 8, names
    assert between.count("aten.mm.default") == 16, names


@case
def results_without_a_wait(mesh):
    """A collective that the caller waits for reads memory that no other graph gets."""
    group, x = mesh.get_group(), torch.rand(64, 64)

    def start(x):
        starts = torch.ops._c10d_functional
        sums = [starts.all_reduce(x + n, "sum", group.group_name) for n in range(4)]
        return sums, starts.all_gather_into_tensor((x * 2).sin(), dist.get_world_size(), group.group_name)

    begin, other = compiled(start, fullgraph=True), compiled(products)
    other(x)  # takes a larger arena, which the other graph then shares
    for _ in range(2):
        dist.barrier()
        time.sleep(dist.get_rank())
        sums, started = begin(x)
        other(x)
        found = [torch.ops._c10d_functional.wait_tensor(each) for each in (*sums, started)]
    close(found[-1], torch.cat([(x * 2).sin()] * dist.get_world_size()))


@case
def results_that_eager_mode_does_not_await(mesh):
    x = torch.arange(6.0)
    pending = functional.all_reduce(x, "sum", mesh.get_group())
    assert isinstance(pending, functional.AsyncCollectiveTensor)
    with graphs():
        close(whole_of(compiled(lambda x: x * 2)(pending)), x * 2 * dist.get_world_size())


@case
def stored_plans(mesh):
    """Processes that share a cache read plans of their own: rank and shard are in the key."""
    rank, group = dist.get_rank(), mesh.get_group()
    find, hits, compile_anew, anew = plan_cache.find, [], backend._compile_with_aot_autograd, []

    def function(x):
        return functional.all_reduce(x[rank : rank + 2].sin() * (rank + 1), "sum", group)

    x = torch.arange(5.0)
    expected = function(x)
    plan_cache.find = lambda key: hits.append(find(key)) or hits[-1]
    backend._compile_with_aot_autograd = lambda *given: anew.append(given) or compile_anew(*given)
    try:
        for _ in range(2):
            torch._dynamo.reset()
            dist.barrier()
            close(compiled(function, fullgraph=True)(x), expected)
    finally:
        plan_cache.find, backend._compile_with_aot_autograd = find, compile_anew
    assert len(hits) == len(anew) == 2, "AOTAutograd's work on collectives is not stored"
    assert hits[1] is not None


@case
def failures(mesh):
    """Every process reports a graph that cannot be compiled."""

    def function(x):
        reduced = functional.wait_tensor(functional.all_reduce(x * 2, "sum", mesh.get_group()))
        return reduced.view(torch.float4_e2m1fn_x2).view(torch.float32) + 1

    x = torch.eye(3)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="float4") as raised:
        compiled(function)(x)
    assert isinstance(raised.value.inner_exception, opkit.errors.CompileError)
    torch._dynamo.reset()
    dist.barrier()
    warnings = []
    diagnostics.log.warning, warning = lambda *of, **_: warnings.append(of[0] % of[1:]), diagnostics.log.warning
    try:
        close(torch.compile(function, backend="opkit")(x), x * 2 * dist.get_world_size() + 1)
    finally:
        diagnostics.log.warning = warning
    (message,) = warnings
    assert "runs in eager mode" in message


# ---- around compiled models ------------------------------------------------------------------------------------------


def sharded(mesh, **policies):
    expected = nn.Sequential(Mlp(), Mlp())
    model, x = copy.deepcopy(expected), torch.randn(4, 8)
    with graphs():
        for child in model:
            child.compile(backend="opkit", options={"strict": True})
            fully_shard(child, mesh=mesh, **policies)
        fully_shard(model, mesh=mesh, **policies)
        return trained(model, model, x), trained(expected, expected, x)


@case
def fsdp(mesh):
    close(*sharded(mesh))


@case
def fsdp_mixed_precision(mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found, expected = sharded(mesh, mp_policy=policy)
    torch.testing.assert_close([each.float() for each in found], expected, atol=0.02, rtol=0.05)


@case
def fsdp_offloaded(mesh):
    close(*sharded(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)))


@case
def compiled_autograd(mesh):
    """The backward of a tensor-parallel model is one graph."""
    model, x = Mlp(), torch.randn(4, 8)
    ours = parallelize_module(copy.deepcopy(model), mesh, MLP_PLAN)
    expected = trained(model, model, x, 1)
    with graphs(), torch._dynamo.compiled_autograd._enable(compiled()):
        close(trained(compiled(ours), ours, x, 1), expected)


@case
def two_dimensions(_):
    """FSDP over pairs of processes, each of which splits the blocks of a model by tensor parallelism."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    expected = nn.Sequential(Block(), Block())
    model, x = copy.deepcopy(expected), torch.randn(2, 6, 8)
    with graphs():
        for child in model:
            parallelize_module(child, mesh["tensor"], BLOCK_PLAN)
            child.compile(backend="opkit", options={"strict": True})
            fully_shard(child, mesh=mesh["data"])
        close(trained(model, model, x), trained(expected, expected, x))


@case
def ddp(mesh):
    model, x = nn.Sequential(Mlp(256, 1100), Mlp(256, 1100)), torch.randn(4, 256)
    alone = copy.deepcopy(model)
    expected = trained(alone, alone, x)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    with graphs():
        inside = DistributedDataParallel(compiled(first))
        close(trained(inside, first, x), expected)
    torch._dynamo.reset()
    with graphs() as found:
        around = compiled(DistributedDataParallel(second, bucket_cap_mb=1))
        close(trained(around, second, x), expected)
    assert len(found) > 2, "the optimizer of DDP splits the graph"


if __name__ == "__main__":
    processes.main()
