"""Train a small Llama on several processes with FSDP2, tensor parallelism and context parallelism, by one command.

    torchrun --nproc-per-node 4 examples/train_llama.py --fsdp 2 --cp 2 --checkpoint /tmp/llama
    python examples/train_llama.py --checkpoint /tmp/llama      # goes on with one process

Norms are an operator of opkit's, with a gradient that is derived; attention is ``opkit.attention`` within
``opkit.context_parallel``. Checkpoints are those of torch.distributed, which any number of processes can read: a run goes on
where the last one ended. With ``torchrun --max-restarts 3``, processes start again if one is killed, and go on from the last
checkpoint. Losses are the same for every division, but for rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import opkit
from opkit.masks import Causal


@dataclasses.dataclass(frozen=True)
class Sizes:
    vocabulary: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2
    tokens: int = 64
    batch: int = 4


@opkit.custom_op("example::rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, 1e-6)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.q, self.k, self.v, self.out = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        # with tensor parallelism, the heads of this process; with context parallelism, its positions
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = opkit.attention(rotated(q, angles), rotated(k, angles), v, mask=Causal())
        return self.out(attended.transpose(1, 2).flatten(2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(sizes), Norm(sizes.width)
        self.up, self.gate = (nn.Linear(sizes.width, 4 * sizes.width, bias=False) for _ in range(2))
        self.down, self.norm = nn.Linear(4 * sizes.width, sizes.width, bias=False), Norm(sizes.width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm, self.head = Norm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        half = sizes.width // sizes.heads // 2
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x, angles = self.embedding(tokens), positions[:, None] * self.frequencies
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))


def divide(model: Llama, mesh: DeviceMesh) -> None:
    """Divide each block's products among the processes of "tp", and all parameters among those of "fsdp" and "cp"."""
    columns, rows = ("attention.q", "attention.k", "attention.v", "up", "gate"), ("attention.out", "down")
    plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    shards = mesh["fsdp", "cp"]._flatten("shards")
    for block in model.blocks:
        if mesh["tp"].size() > 1:
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)


def batch(sizes: Sizes, step: int) -> Tensor:
    """Return the sequences of a step, with one token more than the model reads: each counts up by a step of its own."""
    generator = torch.Generator().manual_seed(step)
    first, by = (torch.randint(1, most, (sizes.batch, 1), generator=generator) for most in (sizes.vocabulary, 3))
    return (first + by * torch.arange(sizes.tokens + 1)) % sizes.vocabulary


def train(model: nn.Module, mesh: DeviceMesh, sizes: Sizes, steps: int, folder: Path | None) -> dict[int, float]:
    """Return the loss of each step that was run."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    begin = 0 if folder is None else restore(model, optimizer, folder)
    data = mesh["fsdp"]
    losses: dict[int, float] = {}
    with opkit.context_parallel(mesh["cp"], balanced=True) as parallel:
        positions = parallel.shard(torch.arange(sizes.tokens), 0)
        for step in range(begin, steps):
            whole = batch(sizes, step).chunk(data.size())[data.get_local_rank()]
            tokens, labels = parallel.shard(whole[:, :-1], 1), parallel.shard(whole[:, 1:], 1)
            loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.detach()
            dist.all_reduce(total, dist.ReduceOp.AVG if total.is_cuda else dist.ReduceOp.SUM)
            losses[step] = total.item() / (1 if total.is_cuda else dist.get_world_size())
            if folder is not None and (step + 1) % 5 == 0:
                save(model, optimizer, folder, step + 1)
    return losses


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, step: int) -> None:
    """Write a checkpoint; its name is noted once it is whole, so that a run that ends meanwhile leaves the one before."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoints.save(state, checkpoint_id=folder / f"step{step}")
    if dist.get_rank() == 0:
        new = folder / "latest.new"
        new.write_text(str(step))
        new.replace(folder / "latest")
    dist.barrier()


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Read the last checkpoint, if there is one, and return its step."""
    latest = folder / "latest"
    if not latest.exists():
        return 0
    step = int(latest.read_text())
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoints.load(state, checkpoint_id=folder / f"step{step}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step


def main(arguments: list[str] | None = None) -> dict[int, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (
        ("fsdp", "parts of the batch"),
        ("cp", "parts of each sequence"),
        ("tp", "parts of each product"),
    ):
        parser.add_argument(f"--{name}", type=int, default=1, help=text)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="a folder, which every process reaches")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        store, rank, size = next(dist.rendezvous("env://"))
        # after a restart, the store still has the addresses of the processes that were killed
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        shape = (options.fsdp, options.cp, options.tp)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("fsdp", "cp", "tp"))
        sizes = Sizes()
        torch.manual_seed(0)  # the same parameters on every process, of which each keeps its part
        with torch.device(device):
            model = Llama(sizes)
            divide(model, mesh)
            losses = train(model, mesh, sizes, options.steps, options.checkpoint)
    finally:
        dist.destroy_process_group()
    if int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(f"step {step}: loss {loss:.6f}" for step, loss in losses.items()))
    return losses


if __name__ == "__main__":
    found = main()
    assert not found or max(found) < 15 or found[max(found)] < 2.5, found
