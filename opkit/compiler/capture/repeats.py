"""This module finds blocks that Dynamo's graph repeats with other parameters, as deep models do, and cuts the graph there.

The time that AOTAutograd and lowering take grows with the number of nodes. One block is compiled once, and called for each
repetition. Dynamo's ``nested_compile_region`` marks such blocks by hand; these are found in the graph: runs of equal nodes, whose
arguments are connected in the same way. torch's DDPOptimizer cuts graphs for another reason, and compiles the parts as here.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.cache_key import shared
from opkit.compiler.capture.parts import Cut, assembled, attribute, is_graph, outside, used_outside

MIN_BLOCKS = 4
MIN_BLOCKS_ON_GPUS = (
    24  # unless it is requested: steps of twelve layers took 2 % longer, and compiled in 3/4 of the time
)
_MAX_EQUAL = 8  # nodes of a block that do the same
MIN_NODES = 8  # of a block: calls of smaller ones would take longer than their kernels
_PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "bmm", "conv1d", "conv2d", "addmm", "baddbmm", "einsum")
_NEEDS_WHOLE = ("_functorch", "autograd", "_autograd", "distributed", "c10d", "_c10d_functional", "_dtensor")
"""Where the functions are that need the whole graph: transforms and gradients in it, and collectives, which overlap."""


def cut(module: fx.GraphModule, inputs: Sequence[Any], least: int) -> Cut | None:
    """Return the graph cut into what comes before the repeated blocks, the block, and what comes after.

    None if fewer than ``least`` repeat.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    if not _is_plain(module, inputs):
        return None
    found = _repeated(nodes)
    if found is None or found[2] < least:
        return None
    start, length, count = found
    ranges = [(0, start), *((start + k * length, start + (k + 1) * length) for k in range(count))]
    ranges = [each for each in [*ranges, (start + length * count, len(nodes))] if each[0] < each[1]]
    pieces = [nodes[first:last] for first, last in ranges]
    blocks = range(start > 0, (start > 0) + count)
    passed = [n for piece in pieces for n in outside(piece) if n.op != "placeholder" and not is_graph(n)]
    if not all(map(_can_pass, passed)) or not all(map(_keeps_state, pieces)) or _writes_across(pieces):
        return None
    wanted = {n for k in blocks for n in used_outside(pieces[k])}  # the same results of each block
    return assembled(module, inputs, pieces, blocks, sorted(wanted))


# ---- what repeats ----------------------------------------------------------------------------------------------------


def _repeated(nodes: Sequence[fx.Node]) -> tuple[int, int, int] | None:
    """Return the first node, the nodes of a block and the number of blocks of the longest run of equal blocks, or None."""
    numbers: dict[str, int] = {}
    described = [_described(node) for node in nodes]
    own = torch.tensor([numbers.setdefault(text, len(numbers)) for text, _ in described])
    best, found = 0, None
    for length in _distances(own.tolist()):
        first, run = _longest_run(own[:-length] == own[length:])
        count = run // length + 1
        if (
            count >= MIN_BLOCKS
            and length * count > best
            and sum(map(_size, nodes[first : first + length])) >= MIN_NODES
        ):
            best, found = length * count, (first, run, length)
    if found is None:
        return None
    first, run, length = found
    start = _start(nodes, first, run, length)
    return _same(nodes, [used for _, used in described], start, first + run + length, length)


def _distances(numbers: Sequence[int]) -> list[int]:
    """Return how far equal nodes are from each other, in increasing order, if several are as far: the lengths of blocks.

    A node has at most ``_MAX_EQUAL`` equal ones in its block: one of the next is the same node of the next block.
    """
    places: dict[int, list[int]] = {}
    counts = Counter[int]()
    for place, number in enumerate(numbers):
        before = places.setdefault(number, [])
        counts.update(place - each for each in before[-_MAX_EQUAL:])
        before.append(place)
    return sorted(distance for distance, count in counts.items() if count >= MIN_BLOCKS - 1)


def _size(node: fx.Node) -> int:
    """Return how many nodes a node stands for: a checkpointed block is one, which holds a graph."""
    return 1 + sum(len(attribute(each).graph.nodes) for each in node.all_input_nodes if is_graph(each))


def _longest_run(equal: torch.Tensor) -> tuple[int, int]:
    """Return where the longest run of True begins, and its length."""
    ends = torch.cat([torch.tensor([-1]), (~equal).nonzero().flatten(), torch.tensor([len(equal)])])
    gaps = ends.diff() - 1
    at = int(gaps.argmax())
    return int(ends[at]) + 1, int(gaps[at])


def _start(nodes: Sequence[fx.Node], first: int, run: int, length: int) -> int:
    """Return where the first block begins: where few values pass from block to block, best before a product.

    A cut ends fusion, but what a product reads is stored anyway. One that leaves a block less must save a value.
    """
    numbers = {node: n for n, node in enumerate(nodes)}
    choices = range(first, first + length)

    def cost(at: int) -> tuple[float, int]:
        border = at + length  # between two blocks
        crossing = [n for n in nodes[at:border] if any(numbers.get(user, -1) >= border for user in n.users)]
        loses_block = (first + run + length - at) // length < run // length + 1
        others = len(nodes) * sum(not _can_pass(node) for node in crossing)
        return len(crossing) + others - _is_product(nodes[border]) + 0.5 * loses_block, at

    return min(choices, key=cost)


def _can_pass(node: fx.Node) -> bool:
    """Return whether a value can be a result of a part: a tensor or a size, not a tuple of them or a context."""
    return isinstance(node.meta.get("example_value"), torch.Tensor | torch.SymInt)


def _is_product(node: fx.Node) -> bool:
    return _name(node.target) in _PRODUCTS


def _same(
    nodes: Sequence[fx.Node], used: Sequence[Sequence[fx.Node]], start: int, end: int, length: int
) -> tuple[int, int, int] | None:
    """Return the longest run of blocks from ``start`` on that are connected in the same way, if each has parameters."""
    starts = range(start, end - length + 1, length)
    connections = [_connections(nodes[at : at + length], used[at : at + length]) for at in starts]
    runs: list[list[int]] = []
    for at, each in zip(starts, connections, strict=True):
        if runs and each == connections[(runs[-1][0] - start) // length]:
            runs[-1].append(at)
        else:
            runs.append([at])
    longest = max(runs, key=len)
    if len(longest) < MIN_BLOCKS or not _have_parameters(nodes, longest, length):
        return None
    return longest[0], length, len(longest)


def _have_parameters(nodes: Sequence[fx.Node], starts: Sequence[int], length: int) -> bool:
    """Return whether each block reads inputs of the graph that no other reads: a loop over time steps does not."""
    blocks = [{n for n in outside(nodes[at : at + length]) if n.op == "placeholder"} for at in starts[:2]]
    return bool(blocks[0] - blocks[1])


def _connections(block: Sequence[fx.Node], used: Sequence[Sequence[fx.Node]]) -> tuple[Any, ...]:
    """Return what the arguments of a block's nodes are: numbers of values from outside, whose types come first, or of nodes."""
    inputs = outside(block)
    numbers = {node: number for number, node in enumerate([*inputs, *block])}
    return (*map(_type, inputs), *(numbers[each] for nodes in used for each in nodes))


def _described(node: fx.Node) -> tuple[str, list[fx.Node]]:
    """Return what a node does, without where its arguments come from, and the nodes that these are."""
    used: list[fx.Node] = []
    return f"{_call(node, lambda each: used.append(each) or '%')} {_type(node)}", used


def _call(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return _graph(attribute(value)) if is_graph(value) else name(value)
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({', '.join(map(text, value))})"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key}: {text(each)}' for key, each in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
        return repr(value)

    # placeholders and attributes have names of their own in each block
    function = "" if node.op in ("placeholder", "get_attr") else node.target
    identity = id(function) if callable(function) else ""
    return f"{node.op} {_name(function)} {identity} {text(node.args)} {text(node.kwargs)}"


def _graph(module: fx.GraphModule) -> str:
    """Return the text of a graph that a node holds, such as a checkpointed block."""
    nodes = list(module.graph.nodes)
    numbers = {node: f"%{n}" for n, node in enumerate(nodes)}
    meta = {key: _policy(value) for key, value in module.meta.items()}
    return f"{meta} " + "; ".join(f"{_call(node, numbers.__getitem__)} {_type(node)}" for node in nodes)


def _policy(value: Any) -> Any:
    """Return what tells a policy of what is recomputed from others: Dynamo makes a new ``partial`` of each."""
    return (id(value.func), value.args, value.keywords) if isinstance(value, functools.partial) else id(value)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _type(node: fx.Node) -> str:
    """Return what decides how a compiled function treats a value: a tensor's type, or which size it is."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        layout = (value.dtype, tuple(value.shape), value.stride(), value.device, value.requires_grad, type(value))
        return f"{layout} {isinstance(value, torch.nn.Parameter)} {sorted(map(str, node.meta.get('tensor_dict', {})))}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)


# ---- whether it may be cut -------------------------------------------------------------------------------------------


def _is_plain(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether parts of a graph mean the same as the whole."""
    nodes = module.graph.nodes
    values = tree_leaves([*inputs, *(node.meta.get("example_value") for node in nodes)])
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any(t.layout is not torch.strided or private.is_wrapper_subclass(t) for t in tensors):
        return False
    if len(inputs) != len([node for node in nodes if node.op == "placeholder"]):
        return False
    if shared(inputs) and any(map(_may_write, nodes)):
        return False
    return not any(
        callable(node.target) and any(word in _path(node.target).split(".") for word in _NEEDS_WHOLE) for node in nodes
    )


def _path(target: Any) -> str:
    return f"{getattr(target, 'namespace', None) or getattr(target, '__module__', None) or ''}"


def _keeps_state(piece: Sequence[fx.Node]) -> bool:
    """Return whether autocast and the modes of autograd are after some nodes what they were before."""
    entered: list[fx.Node] = []
    grad = None
    for node in piece:
        name = _name(node.target)
        if name.startswith("_enter_"):
            entered.append(node)
        elif name.startswith("_exit_"):
            if not entered or node.args[0] is not entered.pop():
                return False
        elif name == "_set_grad_enabled":
            grad = node.args[0]
    return not entered and grad in (None, torch.is_grad_enabled())


def _writes_across(pieces: Sequence[Sequence[fx.Node]]) -> bool:
    """Return whether a piece writes to what it did not make and another one has, whose type may be that after the write."""
    touched = [_storages([*outside(piece), *piece]) for piece in pieces]
    for k, piece in enumerate(pieces):
        targets = [node.all_input_nodes[0] for node in piece if _may_write(node) and node.all_input_nodes]
        written = _storages(targets) & _storages(outside(piece))
        if any(written & other for n, other in enumerate(touched) if n != k):
            return True
    return False


def _storages(nodes: Sequence[fx.Node]) -> set[int]:
    """Return the storages of tensors, of Dynamo's fake mode."""
    values = [value for node in nodes for value in tree_leaves(node.meta.get("example_value"))]
    return {private.storage_address(value) for value in values if isinstance(value, torch.Tensor)}


_IN_PLACE = {
    "setitem", "__setitem__", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
    "ilshift", "irshift",
}  # fmt: skip


def _may_write(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if private.is_overload(node.target):
        return private.schema(node.target).is_mutable
    name = _name(node.target)
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return is_in_place or bool({"out", "inplace"} & {*node.kwargs})
