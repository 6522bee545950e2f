"""Derive a backward: trace the reference's vector-Jacobian product once, and prune it to what it needs.

The reference and its backward are traced together on fake tensors with symbolic sizes, as AOTAutograd traces a joint
graph. Only the part of the graph that leads to the gradients stays. Its leaves are the values saved by the forward: of the
inputs and outputs, whichever choice holds fewer bytes; an input of which only the sizes matter is saved as integers. One
traced graph serves every shape for which its guards hold.

torch has second formulas for some gradients, slower and differentiable again (``silu`` is one). So the backward is traced
twice, and the second graph runs where a graph of the backward is being built (``create_graph=True``).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.op.rules.autograd import Counts, leaves_of

TRACER = threading.Lock()
"""torch's tracer patches ``nn.Module`` while it runs, for every thread: two at once leave it patched."""

_DETACHES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""What the tracer records for detach(): the latter from torch 2.14 on."""

_SIZE_OPS = ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset")


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """A tensor saved for the backward: the i-th tensor input or the i-th tensor output."""

    source: str  # "input" or "output"
    index: int


@dataclasses.dataclass(frozen=True)
class SavedSize:
    """A number saved for the backward: ``op(tensor, *args)`` of an input or output."""

    source: str
    index: int
    op: Any
    args: tuple[Any, ...]


@dataclasses.dataclass
class BackwardGraph:
    """A pruned backward: ``run(*saved tensors, *saved sizes, *output gradients)`` returns the input gradients.

    ``run_again`` does the same with operations that can be differentiated again; ``captured`` are tensors that are not arguments.
    """

    run: Callable[..., Sequence[Any]]
    run_again: Callable[..., Sequence[Any]]
    tensors: tuple[SavedTensor, ...]
    sizes: tuple[SavedSize, ...]
    differentiable: tuple[bool, ...]
    captured: tuple[torch.Tensor, ...]
    holds: Callable[[Sequence[torch.Tensor]], bool]
    code: str


class PreparedBackward:
    """A pruned backward for one kind of call: the position of each saved value and of each gradient."""

    __slots__ = ("at", "count", "graph", "grouped", "silent", "sizes", "tensors")

    def __init__(self, graph: BackwardGraph, counts: Counts | None, args: tuple[Any, ...]) -> None:
        leaves = leaves_of(args, counts)
        self.at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.count = len(leaves)
        self.graph = graph
        self.grouped = counts
        self.tensors = [
            (s.source == "output", s.index if s.source == "output" else self.at[s.index]) for s in graph.tensors
        ]
        self.sizes = [
            (s.source == "output", s.index if s.source == "output" else self.at[s.index], s.op, s.args)
            for s in graph.sizes
        ]
        self.silent = [i for i, differentiable in enumerate(graph.differentiable) if not differentiable]


@dataclasses.dataclass
class _Joint:
    """The traced joint graph and its parts."""

    module: torch.fx.GraphModule
    inputs: list[torch.fx.Node]
    cotangents: list[torch.fx.Node]
    outputs: list[Any]
    gradients: list[Any]
    differentiable: tuple[bool, ...]


class NotPrunableError(Exception):
    """The joint graph writes in place to what it also views, so no part of it can be extracted."""


class RandomReferenceError(Exception):
    """The reference draws random numbers, so running it again would not give the forward that happened."""


def derive(
    reference: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
    outputs: Sequence[torch.Tensor],
) -> BackwardGraph:
    """Trace the backward of ``reference``, a function of tensors only.

    Args:
        reference: takes the tensors in ``inputs``, returns a list of tensors.
        inputs: example inputs; only sizes, strides, dtypes and devices are read.
        needs: which inputs need a gradient.
        outputs: example outputs, one for each tensor that ``reference`` returns.

    Raises:
        RandomReferenceError: the reference draws random numbers.
        NotPrunableError: the reference or its backward writes in place to something that it also views.
    """
    joint, holds = _trace(reference, inputs, needs, outputs, again=False)
    twice, holds_twice = _trace(reference, inputs, needs, outputs, again=True)
    candidates = [_Pair(joint, twice, use_outputs=use) for use in (True, False)]
    pair = min(candidates, key=lambda c: _bytes(c.tensors, inputs, outputs))
    return BackwardGraph(
        run=pair.runner(0),
        run_again=pair.runner(1),
        tensors=pair.tensors,
        sizes=pair.sizes,
        differentiable=joint.differentiable,
        captured=pair.captured,
        holds=lambda tensors: holds(tensors) and holds_twice(tensors),
        code=pair.code,
    )


class _Pair:
    """Both pruned graphs over one set of saved values."""

    def __init__(self, joint: _Joint, twice: _Joint, use_outputs: bool) -> None:
        self.joints = (joint, twice)
        self.parts = [_Pruner(j, use_outputs).run() for j in self.joints]
        self.tensors = tuple(dict.fromkeys(saved for _, tensors, _ in self.parts for saved in tensors))
        self.sizes = tuple(dict.fromkeys(saved for _, _, sizes in self.parts for saved in sizes))

    @property
    def code(self) -> str:
        """The source of the first graph, for people to read."""
        return torch.fx.GraphModule(self.joints[0].module, self.parts[0][0]).code

    @property
    def captured(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the graphs themselves hold."""
        read = [
            (j, n) for j, part in zip(self.joints, self.parts, strict=True) for n in part[0].nodes if n.op == "get_attr"
        ]
        held = [getattr(joint.module, node.target) for joint, node in read]
        return tuple({id(tensor): tensor for tensor in held if isinstance(tensor, torch.Tensor)}.values())

    def runner(self, which: int) -> Callable[..., Sequence[Any]]:
        """Return the graph ``which`` as a function of all saved tensors, all saved sizes and the output gradients."""
        graph, tensors, sizes = self.parts[which]
        forward = torch.fx.GraphModule(self.joints[which].module, graph).forward
        if tensors == self.tensors and sizes == self.sizes:
            return forward
        saved = len(self.tensors) + len(self.sizes)
        chosen = [self.tensors.index(t) for t in tensors]
        chosen += [len(self.tensors) + self.sizes.index(s) for s in sizes]
        return lambda *values: forward(*[values[i] for i in chosen], *values[saved:])


def _bytes(tensors: Sequence[SavedTensor], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    pools = {"input": inputs, "output": outputs}
    return sum(pools[s.source][s.index].numel() * pools[s.source][s.index].element_size() for s in tensors)


def _trace(
    reference: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
    outputs: Sequence[torch.Tensor],
    again: bool,
) -> tuple[_Joint, Callable[[Sequence[torch.Tensor]], bool]]:
    from torch.fx.experimental.proxy_tensor import make_fx

    facts: dict[str, tuple[bool, ...]] = {}

    def joint(*tensors: torch.Tensor) -> list[Any]:
        primals, cotangents = tensors[: len(inputs)], tensors[len(inputs) :]
        with torch.enable_grad():
            results = reference(*primals)
        facts["differentiable"] = tuple(bool(r.requires_grad) for r in results)
        gradients = _gradients(results, primals, needs, cotangents, again)
        return [[r.detach() for r in results], [None if g is None else g.detach() for g in gradients]]

    examples = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
    examples += [t.detach() for t in outputs]
    with TRACER, torch.enable_grad():
        module = make_fx(joint, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    _refuse_writes(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    (node,) = [node for node in module.graph.nodes if node.op == "output"]
    results, gradients = ([_undetached(each) for each in part] for part in node.args[0])
    parts = _Joint(
        module, placeholders[: len(inputs)], placeholders[len(inputs) :], results, gradients,
        facts["differentiable"],
    )  # fmt: skip
    for node in module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise RandomReferenceError(str(node.target))
    return parts, _guard(placeholders)


def _gradients(
    results: Sequence[torch.Tensor],
    primals: Sequence[torch.Tensor],
    needs: Sequence[bool],
    cotangents: Sequence[Any],
    again: bool,
) -> list[torch.Tensor | None]:
    used = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    wanted = [p for p, need in zip(primals, needs, strict=True) if need]
    if not used:
        return [None] * len(wanted)
    pairs = [(r, c.to(r.dtype) if c.dtype != r.dtype else c) for r, c in used]
    gradients = torch.autograd.grad(
        [r for r, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True, create_graph=again
    )
    return list(gradients)


def _undetached(node: Any) -> Any:
    # the trace ends each result in the detach() of ``joint``; the value itself is one step before it
    return node.args[0] if isinstance(node, torch.fx.Node) and node.target in _DETACHES else node


def _refuse_writes(module: torch.fx.GraphModule) -> None:
    """Refuse writes whose effect a later node could read other than through the node of the write itself.

    In the trace, later readers of a tensor that was written to refer to the node that wrote. The tracer cannot follow
    views, so a write is allowed only to a tensor that the graph created and takes no view of.
    """
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            base = node.args[0]
            own = isinstance(base, torch.fx.Node) and base.op == "call_function" and not _view(base)
            elsewhere = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments[1:])
            if not own or elsewhere or any(_view(user) for user in base.users):
                raise NotPrunableError(f"{node.target} writes in place")


def _view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _guard(placeholders: Sequence[torch.fx.Node]) -> Callable[[Sequence[torch.Tensor]], bool]:
    fakes = [node.meta["val"] for node in placeholders]
    shape_env = next((f.fake_mode.shape_env for f in fakes if hasattr(f, "fake_mode")), None)
    if shape_env is None:
        return lambda _: True
    code = shape_env.produce_guards_expression(fakes, ignore_static=False)
    return lambda tensors: code is None or bool(shape_env.evaluate_guards_expression(code, list(tensors)))


class _Pruner:
    """Copies the needed part of a joint graph, leaves first."""

    def __init__(self, joint: _Joint, use_outputs: bool) -> None:
        self.joint = joint
        self.leaves: dict[torch.fx.Node, tuple[str, int]] = {n: ("input", i) for i, n in enumerate(joint.inputs)}
        if use_outputs:
            for i, node in enumerate(joint.outputs):
                if isinstance(node, torch.fx.Node) and node.op != "placeholder":
                    self.leaves.setdefault(node, ("output", i))

    def run(self) -> tuple[torch.fx.Graph, tuple[SavedTensor, ...], tuple[SavedSize, ...]]:
        needed = self._needed()
        tensors = [node for node in self.joint.module.graph.nodes if node in needed and self._is_saved(node, needed)]
        sizes = [node for node in self.joint.module.graph.nodes if node in needed and self._size_leaf(node)]
        graph, copies = torch.fx.Graph(), {}
        for node in [*tensors, *sizes, *self.joint.cotangents]:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in self.joint.module.graph.nodes:
            if node in needed and node not in copies:
                copies[node] = self._copy(graph, node, copies)
        graph.output([copies.get(g) if isinstance(g, torch.fx.Node) else g for g in self.joint.gradients])
        saved = tuple(SavedTensor(*self.leaves[node]) for node in tensors)
        saved_sizes = tuple(SavedSize(*self.leaves[n.args[0]], n.target, tuple(n.args[1:])) for n in sizes)
        return graph, saved, saved_sizes

    def _needed(self) -> set[torch.fx.Node]:
        needed: set[torch.fx.Node] = set()
        work = [g for g in self.joint.gradients if isinstance(g, torch.fx.Node)]
        while work:
            node = work.pop()
            if node in needed:
                continue
            needed.add(node)
            if node not in self.leaves and not self._size_leaf(node):
                work.extend(node.all_input_nodes)
        return needed

    def _size_leaf(self, node: torch.fx.Node) -> bool:
        packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        return packet in _SIZE_OPS and node.args[0] in self.leaves and all(isinstance(a, int) for a in node.args[1:])

    def _is_saved(self, node: torch.fx.Node, needed: set[torch.fx.Node]) -> bool:
        if node not in self.leaves:
            return False
        users = [user for user in node.users if user in needed and not self._size_leaf(user)]
        return bool(users) or node in self.joint.gradients

    def _copy(self, graph: torch.fx.Graph, node: torch.fx.Node, copies: dict[Any, Any]) -> Any:
        if node.target in _DETACHES:
            return copies[node.args[0]]
        return graph.node_copy(node, lambda n: copies[n])


def flat_reference(
    reference: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], Callable[..., list[torch.Tensor]]]:
    """Return the tensors among the arguments, and the reference as a function from just these to a list of tensors."""
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            values[i] = tensor
        positional, named = pytree.tree_unflatten(values, spec)
        return [leaf for leaf in pytree.tree_leaves(reference(*positional, **named)) if isinstance(leaf, torch.Tensor)]

    return [leaves[i] for i in at], call
