"""``opkit.fit``: policies for the layers of a model by a budget of memory, from measurements of one layer of each kind."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only

from opkit.errors import ArgumentError
from opkit.layers import offloading
from opkit.layers import torch_private as private
from opkit.layers.checkpoints import checkpoint
from opkit.layers.leaves import described
from opkit.layers.modules import checkpoint_layers, repeated, structure
from opkit.layers.names import naming
from opkit.layers.policies import Policy, keep, offload, policy_of
from opkit.layers.recomputation import WithBuffers, new_storages

_ROUNDS = 6  # of which the fastest counts; the first one warms up
_LEAST = 1e-7  # seconds that computing again takes at least, whatever is measured
_PROBE = 1 << 26  # bytes of the copy that measures the link


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """What a policy costs for one layer.

    Attributes:
        policy: the policy.
        kept: the bytes that the layer keeps for its backward on its device.
        moved: the bytes that it keeps in host memory.
        seconds: how much longer a step takes than with "save_all".
    """

    policy: Policy
    kept: int
    moved: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """The policies that :func:`fit` chose; ``print`` shows a table.

    Attributes:
        layers: the names of the layers.
        costs: what each layer's policy costs.
        working: the bytes that the backward of one layer needs for what it computes again or gets back from the host, and those
            that the next one gets meanwhile.
        budget: the bytes that were given.
    """

    layers: tuple[str, ...]
    costs: tuple[LayerCost, ...]
    working: int
    budget: int

    @property
    def policies(self) -> list[Policy]:
        """The policy of each layer."""
        return [cost.policy for cost in self.costs]

    @property
    def nbytes(self) -> int:
        """The bytes of activations that are alive at once."""
        return sum(cost.kept for cost in self.costs) + self.working

    def __str__(self) -> str:
        """Return the table: consecutive layers with one policy are a row, with the sums of their costs."""
        rows = [("layers", "policy", "kept", "moved", "computed again")]
        for names, costs in _runs(self.layers, self.costs):
            first = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            rows.append((first, str(costs[0].policy), *_sums(costs)))
        rows.append((f"{len(self.layers)} layers", "", *_sums(self.costs)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"with one layer's backward {_size(self.nbytes)} of {_size(self.budget)}"])


def fit(
    model: nn.Module, budget: int, *args: Any, policies: Sequence[str | Policy] | None = None, **options: Any
) -> Fit:
    """Choose a policy for each layer that a model repeats, so that activations fit into a number of bytes, and apply them.

    One layer of each kind runs forward and backward with each policy, which measures what it keeps and how long it takes. Then
    the policies that cost the least time for the bytes that they save are chosen, from the first layer on, until the budget
    holds what the layers keep, and what the backward of one of them needs besides. They are applied as by
    :func:`checkpoint_layers`; compile the model afterwards.

    Args:
        model: the model, in training mode, on its device. Its parameters, gradients and buffers do not change.
        budget: bytes for the activations of layers. Parameters, gradients, the optimizer's state and what the rest of the model
            keeps come on top.
        args: the model's arguments, of the sizes of a training step.
        policies: the policies to choose from; None: all that keep something else, with the names that the layers give to
            values (:func:`checkpoint_name`).
        options: keyword arguments of the model.

    Returns:
        The policies and their costs; ``print`` shows them as a table.

    Raises:
        ArgumentError: the model repeats no layer, does not call some of them, or no policies fit.

    Times are measured, so that another call may choose other policies. A copy to host memory is assumed to cost what it takes
    longer than the layer's forward, by the bandwidth that is measured. PyTorch's ``activation_memory_budget`` chooses by
    estimates, and within one compiled graph.

    >>> import opkit
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)])
    >>> found = opkit.fit(model, 200_000, torch.ones(32, 64), policies=["save_all", "recompute_all"])
    >>> len(found.policies), found.nbytes <= 200_000
    (6, True)
    """
    layers = repeated(model, "fit", "Choose policies for parts of other models with opkit.checkpoint.")
    fork = torch.random.fork_rng(devices=_devices(model))
    with _without_policies(model, layers), WithBuffers(model, contextlib.nullcontext()), fork:
        calls, kinds, names = _calls(model, layers, args, options)
        chosen = [policy_of(each) for each in policies] if policies is not None else _candidates(names, model)
        if not chosen:
            raise ArgumentError("opkit.fit: there are no policies to choose from. Leave the argument out to try all.")
        costs = {kind: _costs(*call, chosen) for kind, call in kinds.items()}
        working = max(cost.kept + cost.moved for each in costs.values() for cost in each)
        found = _choose({name: _added([costs[kind] for kind in calls[name]]) for name in layers}, working, budget)
    checkpoint_layers(model, found.policies)
    return found


@contextlib.contextmanager
def _without_policies(model: nn.Module, layers: dict[str, nn.Module]) -> Generator[None]:
    """Remove the policies of layers, which get them back if there is an error."""
    before = [(layer, vars(layer).get("forward")) for layer in layers.values()]
    checkpoint_layers(model, "save_all")
    try:
        yield
    except BaseException:
        for layer, forward in before:
            if forward is not None:
                layer.forward = forward
        raise


# ---- measurements ----------------------------------------------------------------------------------------------------

_LayerCall = tuple[nn.Module, Any, Any]  # the layer, its arguments and its keyword arguments


def _calls(
    model: nn.Module, layers: dict[str, nn.Module], args: Any, options: Any
) -> tuple[dict[str, list[str]], dict[str, _LayerCall], list[str]]:
    """Run the model; return the kinds of the calls of each layer, a call of each kind, and the names of values."""
    first: dict[str, _LayerCall] = {}
    kinds: dict[str, list[str]] = {name: [] for name in layers}
    names: dict[str, None] = {}

    def seen(name: str, layer: nn.Module, given: Any, keywords: Any) -> None:
        leaves = [
            described(each) if isinstance(each, torch.Tensor) else repr(each) for each in tree_iter((given, keywords))
        ]
        trained = [parameter.requires_grad for parameter in layer.parameters()]
        kind = repr((structure(layer), str(layer), trained, leaves))
        kinds[name].append(kind)
        first.setdefault(kind, (layer, given, keywords))

    class Names:
        def name(self, _: torch.Tensor, name: str) -> None:
            names[name] = None

    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, given, keywords, name=name: seen(name, layer, given, keywords), with_kwargs=True
        )
        for name, layer in layers.items()
    ]
    recorder = Names()
    naming.modes.append(recorder)
    try:
        with torch.no_grad():
            model(*args, **options)
    finally:
        naming.modes.remove(recorder)
        for hook in hooks:
            hook.remove()
    for name, called in kinds.items():
        if not called:
            raise ArgumentError(f"opkit.fit: the model does not call its layer {name} with these arguments.")
    return kinds, first, list(names)


def _candidates(names: Sequence[str], model: nn.Module) -> list[Policy]:
    kept = [keep(name) for name in names] + ([keep(*names)] if len(names) > 1 else [])
    found = [policy_of("save_all"), policy_of("recompute_cheap"), *kept, policy_of("recompute_all")]
    on_gpu = bool(_devices(model))
    return found + ([offload(each) for each in found] if on_gpu else [])


def _devices(model: nn.Module) -> list[torch.device]:
    """Return the GPUs that hold a model."""
    return list({p.device for p in model.parameters() if p.is_cuda})


class _Allocations(private.TorchDispatchMode):
    """Knows the storages that operators made, and which are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for address, tensor in new_storages(results, args, kwargs).items():
            self.made[address] = private.storage_weakref(tensor), tensor.untyped_storage().nbytes()
        return results

    def alive(self) -> int:
        """Return the bytes of storages that are alive."""
        return sum(nbytes for storage, nbytes in self.made.values() if not storage.expired())


def _costs(layer: nn.Module, args: Any, kwargs: Any, policies: Sequence[Policy]) -> list[LayerCost]:
    """Return what policies cost for a call of a layer."""
    args, kwargs = tree_map_only(torch.Tensor, _with_gradient, (args, kwargs))
    leaves = [
        t for t in (*tree_iter((args, kwargs)), *layer.parameters()) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not leaves:
        return [LayerCost(each, 0, 0, 0.0) for each in policies]
    device = next(t.device for t in leaves)
    plain = {each: dataclasses.replace(each, moved=False) for each in [policy_of("save_all"), *policies]}
    seconds = _seconds({each: checkpoint(layer, each) for each in plain.values()}, args, kwargs, leaves)
    forward, step = seconds[policy_of("save_all")]
    bandwidth = _bandwidth(device) if any(each.moved for each in policies) else 1.0
    found: list[LayerCost] = []
    for policy in policies:
        kept, moved = _kept(layer, policy, args, kwargs)
        again = 0.0 if policy.recomputed == "nothing" else max(_LEAST, seconds[plain[policy]][1] - step)
        found.append(LayerCost(policy, kept, moved, again + 2 * max(0.0, moved / bandwidth - forward)))
    return found


def _added(calls: Sequence[Sequence[LayerCost]]) -> list[LayerCost]:
    """Return what policies cost for all calls of a layer."""
    return [
        LayerCost(
            each[0].policy, *(sum(getattr(cost, field) for cost in each) for field in ("kept", "moved", "seconds"))
        )
        for each in zip(*calls, strict=True)
    ]


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as another layer returns it: a leaf would stay on the GPU, and not be written to."""
    with torch.enable_grad():
        return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor


def _kept(layer: nn.Module, policy: Policy, args: Any, kwargs: Any) -> tuple[int, int]:
    """Return the bytes that a call keeps on its device, and in host memory."""
    with _Allocations() as allocations, torch.enable_grad():
        results = checkpoint(layer, policy)(*args, **kwargs)
    region = offloading.last() if policy.moved else None
    moved = 0 if region is None else region.nbytes
    kept = allocations.alive()  # with the results, which the next layer keeps; the arguments are the layer's before
    del results
    return max(0, kept - moved), moved


def _seconds(
    functions: dict[Policy, Callable[..., Any]], args: Any, kwargs: Any, leaves: Any
) -> dict[Policy, tuple[float, float]]:
    """Return the least time of a forward, and of forward and backward, of each function; other processes make some runs slow."""
    device = leaves[0].device
    least = dict.fromkeys(functions, (math.inf, math.inf))
    for _ in range(_ROUNDS):
        for policy, function in functions.items():
            start = _now(device)
            with torch.enable_grad():
                results = [
                    t for t in tree_iter(function(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad
                ]
            forward = _now(device) - start
            torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results], allow_unused=True)
            least[policy] = min(least[policy][0], forward), min(least[policy][1], _now(device) - start)
    return least


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _bandwidth(device: torch.device) -> float:
    """Return the bytes that are copied to pinned host memory in a second."""
    of = torch.empty(_PROBE, dtype=torch.uint8, device=device)
    into = torch.empty(_PROBE, dtype=torch.uint8, pin_memory=True)
    into.copy_(of, non_blocking=True)
    start = _now(device)
    into.copy_(of, non_blocking=True)
    return _PROBE / (_now(device) - start)


# ---- the choice ------------------------------------------------------------------------------------------------------


def _choose(options: dict[str, list[LayerCost]], working: int, budget: int) -> Fit:
    """Return policies within a budget: always the next that costs the least for each byte, then faster ones if bytes are left."""
    hulls = {name: _hull(costs) for name, costs in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}

    def made() -> Fit:
        costs = tuple(chosen.values())
        again = working if any(cost.policy != Policy("nothing") for cost in costs) else 0
        return Fit(tuple(options), costs, again + max(cost.moved for cost in costs), budget)

    while made().nbytes > budget:
        steps = [(_slope(hull, chosen[name]), name) for name, hull in hulls.items() if chosen[name] is not hull[-1]]
        if not steps:
            raise ArgumentError(
                f"opkit.fit: no policies fit into {_size(budget)}; the least is {_size(made().nbytes)}.\n{made()}\n"
                "Give it more bytes, or use smaller batches."
            )
        name = min(steps, key=lambda step: step[0])[1]  # of equal ones the first
        chosen[name] = hulls[name][hulls[name].index(chosen[name]) + 1]
    for name, costs in reversed(options.items()):
        for cost in sorted(costs, key=lambda each: each.seconds):
            now = chosen[name]
            if cost.seconds < now.seconds:
                chosen[name] = cost
                if made().nbytes > budget:
                    chosen[name] = now
    return made()


def _slope(hull: list[LayerCost], now: LayerCost) -> float:
    after = hull[hull.index(now) + 1]
    return (after.seconds - now.seconds) / (now.kept - after.kept)


def _hull(costs: Sequence[LayerCost]) -> list[LayerCost]:
    """Return the policies that cost the least time for the bytes that they keep, from the fastest to the smallest."""
    found: list[LayerCost] = []
    for cost in sorted(costs, key=lambda each: (each.seconds, each.kept)):
        if found and cost.kept >= found[-1].kept:
            continue
        while len(found) > 1 and _slope(found, found[-2]) >= (cost.seconds - found[-1].seconds) / (
            found[-1].kept - cost.kept
        ):
            found.pop()
        found.append(cost)
    return found


# ---- the table -------------------------------------------------------------------------------------------------------


def _runs(names: Sequence[str], costs: Sequence[LayerCost]) -> Iterator[tuple[list[str], list[LayerCost]]]:
    """Yield consecutive layers of one policy."""
    start = 0
    for k in range(1, len(names) + 1):
        if k == len(names) or costs[k].policy != costs[start].policy:
            yield list(names[start:k]), list(costs[start:k])
            start = k


def _sums(costs: Sequence[LayerCost]) -> tuple[str, str, str]:
    kept, moved, seconds = (sum(getattr(cost, field) for cost in costs) for field in ("kept", "moved", "seconds"))
    return _size(kept), _size(moved), f"{seconds * 1e3:.3g} ms"


def _size(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
