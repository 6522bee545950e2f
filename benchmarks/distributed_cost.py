"""Predict how examples/train_llama.py scales to 1,024 GPUs, from the operations that torch issues on a fake process group.

    python benchmarks/distributed_cost.py [--plan PLAN ...] [--gpus 8,64,512] [--sequences N | --batch N] [--json FILE]

A plan is a list such as ``tp=8``, ``cp=8,method=ring`` or ``pp=8,schedule=1F1B,microbatches=16``; FSDP2 has the other processes.
Nothing is measured: one process records, with fake tensors, the products, calls of attention and collectives of a rank, with
their bytes and what they depend on, and a simulation with one queue of kernels and two kinds of links runs them. ``--sequences``
is the batch of each data-parallel part (weak scaling), ``--batch`` that of all (strong scaling). See docs/distributed_cost.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import runpy
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import pipelining
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import opkit
from opkit.attn.calls import AttentionCall, GradientCall

EXAMPLE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train_llama.py"))
# of each operator that communicates: the kind, and which arguments are its tensors (all_gather: what is received) and the group
COLLECTIVES = {
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::allreduce_": ("all_reduce", 0, 1),
    "c10d::alltoall_base_": ("all_to_all", 1, 2),
    "c10d::send": ("send", 0, 1),
    "c10d::recv_": ("recv", 0, 1),
    "_c10d_functional::all_reduce": ("all_reduce", 0, 2),
}
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How processes are divided; ``chunks`` are stages of a pipeline on each rank, ``microbatches`` those of a step."""

    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    method: str | None = None
    schedule: str = "1F1B"
    microbatches: int = 16
    chunks: int = 1

    @classmethod
    def parsed(cls, text: str, gpus: int) -> Plan:
        fields = dict(part.split("=") for part in text.split(",") if "=" in part)
        plan = cls(**{name: value if name in ("method", "schedule") else int(value) for name, value in fields.items()})
        rest, left = divmod(gpus, plan.cp * plan.tp * plan.pp)
        if left or not rest or (plan.pp > 1 and plan.cp * plan.tp > 1):
            raise ValueError(
                f"--plan {text}: {gpus} GPUs cannot be divided so; stages of a pipeline have neither cp nor tp"
            )
        return dataclasses.replace(plan, fsdp=rest)


@dataclasses.dataclass(frozen=True)
class Op:
    """What a rank runs: products or attention ("compute"), FSDP2's copy out of an all-gather, or communication.

    Attributes:
        after: the numbers of the operations that it needs, through any number of operators that are not recorded.
        size: bytes of the whole tensor: what all gather, reduce, scatter, or send to each other.
        ranks: those of its group; of send and recv the other one.
    """

    kind: str
    after: frozenset[int]
    flops: int = 0
    size: int = 0
    ranks: tuple[int, ...] = ()
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    rank: int
    ops: Sequence[Op]

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.ops)

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return for each kind of communication how many there are, and their bytes."""
        each = {kind: [op.size for op in self.ops if op.kind == kind] for kind in KINDS}
        return {kind: (len(sizes), sum(sizes)) for kind, sizes in each.items() if sizes}


# ---- what torch issues -----------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records what runs and which storages it reads and writes; other operators take no time, but hand dependences on."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self._writers: dict[int, frozenset[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, (DTensor, AsyncCollectiveTensor)) for each in types):
            return NotImplemented  # the tensors that they hold come here
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        reads = [_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        after = frozenset().union(*(self._writers.get(each, ()) for each in reads))
        found = _operations(func, args, kwargs, out, after)
        if found:
            self.ops += found
            after = frozenset(range(len(self.ops) - len(found), len(self.ops)))
        written = [args[n] if n < len(args) else kwargs.get(name) for n, name in _written(func)]
        for x in tree_leaves([out, *written]):
            if isinstance(x, Tensor):
                self._writers[_storage(x)] = after
        return out


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _written(func: Any) -> list[tuple[int, str]]:
    """Return the arguments that an operator writes to; the schemas of c10d's collectives do not say it."""
    first = func.namespace == "c10d" and func._schema.name != "c10d::send"
    return [(n, each.name) for n, each in enumerate(func._schema.arguments) if each.is_write or (first and n == 0)]


def _operations(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, after: frozenset[int]) -> list[Op]:
    name, backward = func._schema.name, torch._C._current_graph_task_id() != -1
    if name == "opkit::exchange_heads":
        return [
            Op("all_to_all", after, 0, _bytes(x), _ranks(args[2]), backward)
            for x in args[0]
            if len(_ranks(args[2])) > 1
        ]
    if name in COLLECTIVES:
        kind, data, at = COLLECTIVES[name]
        ranks = _ranks(args[at])
        own = (ranks[args[2]],) if kind in ("send", "recv") else ranks
        return [Op(kind, after, 0, sum(map(_bytes, tree_leaves(args[data]))), own, backward)] if len(ranks) > 1 else []
    if name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(
        ("wait_tensor", "_wrap_tensor_autograd")
    ):
        raise NotImplementedError(f"distributed_cost: no cost is known for {name}")
    if name == "fsdp::split_with_sizes_copy":
        return [Op("copy_out", after, backward=backward)]
    flops = _flops(func, name, args, kwargs, out)
    return [Op("compute", after, flops, backward=backward)] if flops else []


def _ranks(group: Any) -> tuple[int, ...]:
    """Return the ranks of a process group, or of one with a name."""
    name = group if isinstance(group, str) else dist.ProcessGroup.unbox(group).group_name
    return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name)))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _flops(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Return the floating point operations; a mask hides half of a block, as a causal one does on the diagonal."""
    if name == "opkit::attention":
        call, products = AttentionCall(*args), 2
    elif name == "opkit::attention_backward":
        call, products = GradientCall(*args), 5
    elif func.overloadpacket in flop_registry and func.namespace == "aten":
        return flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
    else:
        return 0
    batch, heads, queries, size = call.q.shape
    return products * 2 * batch * heads * size * queries * call.k.shape[2] // (2 if call.mask else 1)


@contextlib.contextmanager
def fake_group(rank: int, world: int) -> Generator[None]:
    """Make this process one rank of many, which sends nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it names the groups of an equal mesh


@contextlib.contextmanager
def environment(fake: bool, dtype: torch.dtype) -> Generator[None]:
    """Make parameters of a dtype, and, if ``fake``, tensors without memory; what is not the model's work is not recorded."""

    def agree(received: list[Any], sent: Any, group: Any = None) -> None:
        """On GPUs, processes compare their calls of attention at the first step only."""
        received[:] = [sent] * len(received)

    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for owner, name in ((DeviceMesh, "__init__"), (ShardingPropagator, "_propagate_tensor_meta_non_cached")):
            stack.enter_context(mock.patch.object(owner, name, _without_modes(getattr(owner, name))))
        stack.enter_context(mock.patch.object(dist, "all_gather_object", agree))
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(dtype)
        if fake:
            stack.enter_context(FakeTensorMode())
        yield


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return called


def record(step: Callable[[], object]) -> Program:
    """Return what a function runs on this rank."""
    with Recorder() as recorder:
        step()
    return Program(dist.get_rank(), recorder.ops)


def recorded(plan: Plan, sizes: Any, fake: bool = True, dtype: torch.dtype = torch.bfloat16) -> Program:
    """Return the forward and backward of a step of the example, on this rank of the default process group."""
    if plan.pp > 1:
        return _recorded_pipeline(plan, sizes, fake, dtype)
    mesh = init_device_mesh("cpu", (plan.fsdp, plan.cp, plan.tp), mesh_dim_names=("fsdp", "cp", "tp"))
    mesh["fsdp", "cp"]._flatten("shards")
    parallel = opkit.context_parallel(mesh["cp"], method=plan.method, balanced=True)  # pyright: ignore[reportArgumentType]
    with environment(fake, dtype), parallel as shards:
        model = EXAMPLE["Llama"](sizes)
        EXAMPLE["divide"](model, mesh)
        whole = torch.zeros(sizes.batch // plan.fsdp, sizes.tokens + 1, dtype=torch.int64)
        positions = shards.shard(torch.arange(sizes.tokens), 0)
        tokens, labels = shards.shard(whole[:, :-1], 1), shards.shard(whole[:, 1:], 1)
        return record(lambda: _loss(model(tokens, positions), labels).backward())


def _loss(found: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(found.flatten(0, 1), labels.flatten())


def _recorded_pipeline(plan: Plan, sizes: Any, fake: bool, dtype: torch.dtype) -> Program:
    """Return a step of stages made of the example's model; FSDP2 gathers the parameters of a stage once, and scatters once."""
    mesh = init_device_mesh("cpu", (plan.pp, plan.fsdp), mesh_dim_names=("pp", "fsdp"))
    rank, count = mesh.get_local_rank("pp"), plan.pp * plan.chunks
    numbers = [rank + plan.pp * n for n in range(plan.chunks)]
    if plan.schedule == "ZBVZeroBubble":
        numbers = [rank, count - 1 - rank]
    with environment(fake, dtype):
        tokens = torch.zeros(sizes.batch // plan.fsdp, sizes.tokens, dtype=torch.int64)
        part = tokens[: len(tokens) // plan.microbatches]
        hidden, logits = (torch.zeros(*part.shape, n, requires_grad=True) for n in (sizes.width, sizes.vocabulary))
        stages = []
        for number in numbers:
            stage = EXAMPLE["Llama"](dataclasses.replace(sizes, layers=sizes.layers // count))
            stage.forward = functools.partial(stage.forward, positions=torch.arange(sizes.tokens))
            if number > 0:
                stage.embedding = nn.Identity()
            if number < count - 1:
                stage.norm = stage.head = nn.Identity()
            if plan.fsdp > 1:
                fully_shard(stage, mesh=mesh["fsdp"], reshard_after_forward=False)
            inputs, outputs = part if number == 0 else hidden, logits if number == count - 1 else hidden
            group = mesh["pp"].get_group()
            stages.append(
                pipelining.PipelineStage(stage, number, count, torch.device("cpu"), inputs, outputs, group=group)
            )
        single = plan.schedule in ("GPipe", "1F1B")
        schedule = getattr(pipelining, f"Schedule{plan.schedule}")(
            stages[0] if single else stages, n_microbatches=plan.microbatches, loss_fn=_loss
        )
        inputs = [tokens] if 0 in numbers else []
        target = {"target": tokens} if count - 1 in numbers else {}
        return record(lambda: schedule.step(*inputs, **target))


# ---- how long it takes -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Machine:
    """A cluster: operations and bytes (of one direction) a second of a GPU, and seconds that a message takes to a neighbour."""

    flops: float = 790e12
    nvlink: float = 450e9
    infiniband: float = 50e9
    nvlink_latency: float = 3.4e-6
    infiniband_latency: float = 9.6e-6
    node: int = 8
    trees: bool = False

    def sent(self, op: Op, rank: int) -> dict[str, float]:
        """Return the bytes that a rank sends (or receives) over each kind of link, in rings that pass each node once."""
        members, nodes = self._places(op.ranks, rank)
        if op.kind in ("send", "recv"):
            return {"nvlink" if members else "infiniband": op.size}
        ranks = len(op.ranks)
        if op.kind == "all_to_all":
            found = {"nvlink": op.size * (members - 1) / ranks, "infiniband": op.size * (ranks - members) / ranks}
        else:
            inside = op.size * (ranks - 1) / ranks if members > 1 else 0
            found = {"nvlink": inside, "infiniband": op.size * (nodes - 1) / nodes / members}
        rounds = 2 if op.kind == "all_reduce" else 1
        return {link: rounds * size for link, size in found.items() if size}

    def latency(self, op: Op, rank: int) -> float:
        members, nodes = self._places(op.ranks, rank)
        if op.kind in ("send", "recv", "all_to_all"):
            near = members > 0 if op.kind != "all_to_all" else nodes == 1
            return self.nvlink_latency if near else self.infiniband_latency
        near, far = len(op.ranks) - nodes, nodes - 1
        if self.trees:
            near, far = math.ceil(math.log2(members)), math.ceil(math.log2(nodes))
        return (2 if op.kind == "all_reduce" else 1) * (near * self.nvlink_latency + far * self.infiniband_latency)

    def seconds(self, op: Op, rank: int) -> float:
        return self.latency(op, rank) + max(size / getattr(self, link) for link, size in self.sent(op, rank).items())

    @functools.cache  # noqa: B019 - a machine lives as long as the program
    def _places(self, ranks: tuple[int, ...], rank: int) -> tuple[int, int]:
        """Return how many ranks are on the node of ``rank``, and the number of nodes."""
        nodes = [each // self.node for each in ranks]
        return nodes.count(rank // self.node), len({*nodes})


def simulate(programs: Sequence[Program], machine: Machine, overlap: bool = True) -> float:
    """Return the seconds until all programs have ended.

    Messages between two of the programs arrive when they were sent; those from other ranks as if these did the same. Without
    ``overlap``, kernels and communication take turns.
    """
    sent: dict[tuple[int, int], list[float]] = defaultdict(list)
    ranks = {program.rank for program in programs}
    running = [_run(program, machine, overlap, sent, ranks) for program in programs]
    ends: list[float] = []
    while running:
        moved, rest = False, []
        for each in running:
            try:
                moved |= next(each)
                rest.append(each)
            except StopIteration as done:
                ends.append(done.value)
                moved = True
        if not moved:
            raise RuntimeError("distributed_cost: the programs wait for messages of each other that none sends")
        running = rest
    return max(ends)


def _run(
    program: Program, machine: Machine, overlap: bool, sent: dict[tuple[int, int], list[float]], ranks: set[int]
) -> Generator[bool, None, float]:
    """Run a program; yield where a message is missing, whether anything has run since the last time."""
    rank, kernels, moved = program.rank, 0.0, True
    links: dict[tuple[Any, ...], float] = defaultdict(float)  # until when a direction, or a group, is busy
    ends: list[float] = []
    copies = [0.0, 0.0]  # when parameters were copied out of the last all-gathers
    scattered = 0.0
    arrives: dict[int, tuple[list[float], int]] = {}
    received: Counter[int] = Counter()
    for number, op in enumerate(program.ops):
        for each in op.after & arrives.keys():
            messages, at = arrives.pop(each)
            while len(messages) <= at:
                yield moved
                moved = False
            ends[each] = messages[at]
        moved = True
        ready = max((ends[each] for each in op.after), default=0.0)
        if op.kind in ("compute", "copy_out"):
            kernels = max(kernels, ready) + op.flops / machine.flops
            ends.append(kernels)
            if op.kind == "copy_out":
                copies.append(kernels)
            continue
        if op.kind == "recv" and op.ranks[0] in ranks:
            arrives[number] = sent[op.ranks[0], rank], received[op.ranks[0]]
            received[op.ranks[0]] += 1
            ends.append(0.0)
            continue
        if op.kind == "reduce_scatter":  # FSDP2 keeps the memory of one
            kernels = max(kernels, scattered)
        # FSDP2 gathers on a stream of its own, one layer ahead; others start after the kernels that were launched before
        issued = copies[-1 if op.backward else -2] if op.kind == "all_gather" and overlap else kernels
        ways = {"send": ["out"], "recv": ["in"]}.get(op.kind, ["out", "in"])
        used = [(link, way) for link in machine.sent(op, rank) for way in ways]
        group = (*op.ranks, *ways)
        start = max(ready, issued, links[group])
        seconds = machine.seconds(op, rank)
        busy = max([start, *(links[each] for each in used)]) + seconds - machine.latency(op, rank)
        end = max(busy, start + seconds)  # steps of latency pass while a transfer waits, or others use the link
        links.update(dict.fromkeys(used, busy) | {group: end})
        ends.append(end)
        if op.kind == "reduce_scatter":
            scattered = end
        if op.kind == "send" and op.ranks[0] in ranks:
            sent[rank, op.ranks[0]].append(end)
        if not overlap:
            kernels = end
    return max([kernels, *ends])


# ---- the tables ------------------------------------------------------------------------------------------------------


def programs_of(plan: Plan, sizes: Any) -> list[Program]:
    """Return the program of rank 0, or with a pipeline those of the first rank of each of its parts."""
    found = []
    for part in range(plan.pp):
        with fake_group(part * plan.fsdp, plan.fsdp * plan.cp * plan.tp * plan.pp):
            found.append(recorded(plan, sizes))
    return found


def row(plan: Plan, sizes: Any, machine: Machine) -> dict[str, Any]:
    programs = programs_of(plan, sizes)
    gpus = plan.fsdp * plan.cp * plan.tp * plan.pp
    no_latency = dataclasses.replace(machine, nvlink_latency=0.0, infiniband_latency=0.0)
    free = dataclasses.replace(no_latency, nvlink=math.inf, infiniband=math.inf)
    total, without, bare = (simulate(programs, each) for each in (machine, no_latency, free))
    serial = simulate(programs, machine, overlap=False)
    compute = max(program.flops for program in programs) / machine.flops
    peak = sum(program.flops for program in programs) / len(programs) / machine.flops / total
    links: Counter[str] = Counter()
    busiest = max(programs, key=lambda program: sum(op.size for op in program.ops))
    for op in busiest.ops:
        links.update(machine.sent(op, busiest.rank) if op.kind in KINDS and op.kind != "recv" else {})
    mesh = " x ".join(f"{name} {size}" for name in ("pp", "fsdp", "cp", "tp") if (size := getattr(plan, name)) > 1)
    milliseconds = {
        "step": total, "kernels": compute, "bubble": bare - compute, "bandwidth": without - bare, "latency": total - without,
        "without overlap": serial,
    }  # fmt: skip
    return (
        {"GPUs": gpus, "mesh": mesh, "sequences": sizes.batch}
        | {f"{name} (ms)": round(1e3 * seconds, 1) + 0.0 for name, seconds in milliseconds.items()}
        | {"of peak (%)": round(100 * peak, 1), "collectives": sum(count for count, _ in busiest.totals().values())}
        | {f"{link} (GB)": round(links[link] / 1e9, 2) for link in ("nvlink", "infiniband")}
    )


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"| {' | '.join(rows[0])} |"
    yield f"| {' | '.join('---' for _ in rows[0])} |"
    for each in rows:
        yield f"| {' | '.join(map(str, each.values()))} |"


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plan", action="append", help='such as "tp=8"; several make several tables; "fsdp" by default'
    )
    parser.add_argument("--gpus", default="8,64,512,1024")
    parser.add_argument("--sequences", type=int, default=1, help="of each data-parallel part")
    parser.add_argument("--batch", type=int, help="sequences of all, instead")
    parser.add_argument("--json", type=Path)
    for name, value in (("tokens", 8192), ("width", 4096), ("heads", 32), ("layers", 32), ("vocabulary", 32768)):
        parser.add_argument(f"--{name}", type=int, default=value)
    units = {"flops": 1e12, "nvlink": 1e9, "infiniband": 1e9, "nvlink_latency": 1e-6, "infiniband_latency": 1e-6}
    for name, unit in units.items():
        text = f"in units of {unit:g} a second" if unit > 1 else "microseconds"
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Machine, name) / unit, help=text)
    parser.add_argument("--node", type=int, default=Machine.node, help="GPUs of a node")
    parser.add_argument(
        "--trees", action="store_true", help="steps of a collective grow with the logarithm of the ranks"
    )
    options = parser.parse_args(arguments)
    machine = Machine(
        **{name: getattr(options, name) * unit for name, unit in units.items()}, node=options.node, trees=options.trees
    )
    rows = []
    for text in options.plan or ["fsdp"]:
        found = []
        for gpus in map(int, options.gpus.split(",")):
            plan = Plan.parsed(text, gpus)
            batch = options.batch or options.sequences * plan.fsdp
            if batch % plan.fsdp:
                parser.error(f"--batch {batch} cannot be divided among {plan.fsdp} parts of --plan {text}")
            sizes = EXAMPLE["Sizes"](
                options.vocabulary, options.width, options.heads, options.layers, options.tokens, batch
            )
            found.append(row(plan, sizes, machine))
        print(f"\n{text}, {options.tokens} tokens\n\n" + "\n".join(table(found)), flush=True)
        rows += [{"plan": text} | each for each in found]
    if options.json:
        options.json.write_text(json.dumps({"machine": dataclasses.asdict(machine), "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
