"""This module splits a joint graph of AOTAutograd into a forward and a backward: torch's partitioner with other saved tensors.

Conjugates. The derivatives of complex products are products with conjugates, which are views in eager mode. A graph's results
have no such views, so a forward that returned them would have to compute them: it saves the tensors themselves.

Positions. A forward saves where the maxima of pooling are in the narrowest type that holds them, which takes a quarter of the
bytes, or half.

Random numbers. A backward that recomputes a random operator draws from the state that torch's generator had in the forward.
torch's partitioner saves that state and wraps both calls in higher-order operators, but not for untagged operators, nor for
those that a memory budget recomputes. Here every graph calls the operators themselves::

    state = random_state()                  before = random_state()
    mask = aten.rand_like(x)                random_set_state(state)
    return ..., state                       mask = aten.rand_like(x)
                                            random_set_state(before)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.constructors import move_constructors

aten = torch.ops.aten
_ITEM = aten._local_scalar_dense.default
_CONJUGATE = aten._conj.default
_POOLINGS = {aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3}
_UNTAGGED = ("aten.random", "aten._sample_dirichlet")  # random operators without torch's tag for them


def partition(joint: fx.GraphModule, inputs: Sequence[Any], **rest: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and backward of a joint graph: those of AOTAutograd's min-cut partitioner with other saved tensors."""
    move_constructors(joint)
    _narrow_positions(joint.graph)
    forward, backward = private.min_cut_partition(joint, inputs, **rest)
    share_random_states(forward, backward, rest["num_fwd_outputs"])
    _save_floats_as_tensors(forward, backward, rest["num_fwd_outputs"])
    _save_unconjugated(forward, backward, rest["num_fwd_outputs"])
    _save_before_writes(forward, rest["num_fwd_outputs"])
    return forward, backward


def _save_before_writes(forward: fx.GraphModule, results: int) -> None:
    """Save copies of inputs that the forward writes to in the end: the backward computes with what they were before."""
    writes = forward.graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {node.args[0] for node in writes}
    returned = list(private.output_of(forward.graph))
    for number, node in enumerate(returned[results:], results):
        if _is_tensor(node) and _viewed(node) in written:
            with forward.graph.inserting_before(writes[0]):
                returned[number] = forward.graph.call_function(aten.clone.default, (node,))
            returned[number].meta = dict(node.meta)
    output = forward.graph.output_node()
    output.args = (tuple(returned), *output.args[1:])


def _viewed(node: fx.Node) -> fx.Node:
    """Return the node of whose memory a node is a view, or itself."""
    while getattr(node.target, "is_view", False):
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node


def _narrow_positions(graph: fx.Graph) -> None:
    """Convert positions of maxima to a narrow type and back: the partitioner saves what is smaller, and recomputes the rest."""
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        rank = _POOLINGS.get(node.args[0].target)
        if rank is None or node.args[1] != 1:
            continue
        count = math.prod(node.args[0].args[0].meta["val"].shape[-rank:])
        if not isinstance(count, int) or count >= 1 << 31:
            continue
        with graph.inserting_after(node):
            narrow = _converted(graph, node, torch.int16 if count <= 1 << 15 else torch.int32)
        with graph.inserting_after(narrow):
            wide = _converted(graph, narrow, torch.int64)
        node.replace_all_uses_with(wide, delete_user_cb=lambda user, narrow=narrow: user is not narrow)


def _converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    new = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    new.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return new


def _save_unconjugated(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Make the forward save tensors instead of their conjugates, and the backward compute the conjugates."""
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    saved_input = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    returned = list(output.args[0])
    for k, node in enumerate(returned[results:], results):
        if isinstance(node, fx.Node) and node.target is _CONJUGATE and node.name in saved_input:
            returned[k] = node.args[0]
            _conjugate(backward.graph, saved_input[node.name], returned[k], [*saved_input.values()][-1])
    output.args = (type(output.args[0])(returned), *output.args[1:])
    for module in (forward, backward):
        module.graph.eliminate_dead_code()
        module.recompile()


def _conjugate(graph: fx.Graph, saved_input: fx.Node, of: fx.Node, last: fx.Node) -> None:
    """Make an input of a graph the tensor ``of``, and compute its conjugate after the ``last`` of the inputs."""
    with graph.inserting_after(last):
        recomputed = graph.call_function(_CONJUGATE, (saved_input,))
    recomputed.meta = dict(saved_input.meta)
    saved_input.meta = {**saved_input.meta, "val": of.meta["val"]}
    saved_input.replace_all_uses_with(recomputed, delete_user_cb=lambda user: user is not recomputed)


def _save_floats_as_tensors(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Make the forward save tensors instead of Python floats that may change, and the backward read these."""
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    floats = [each for each in private.output_of(forward.graph)[results:] if _is_float(each)]
    for node in floats:
        tensor = _tensor_of_float(forward.graph, node)
        if tensor.name not in inputs:
            inputs[tensor.name] = _saved(forward.graph, backward.graph, tensor, results)
        with backward.graph.inserting_after([*backward.graph.find_nodes(op="placeholder")][-1]):
            read = backward.graph.call_function(_ITEM, (inputs[tensor.name],))
        read.meta = {"val": node.meta["val"]}
        inputs[node.name].replace_all_uses_with(read)
        backward.graph.erase_node(inputs[node.name])
    output = forward.graph.output_node()
    returned = tuple(each for each in private.output_of(forward.graph) if each not in floats)
    output.args = (returned, *output.args[1:])


def _tensor_of_float(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return the input that holds a float, or a new tensor on the CPU."""
    read = node.args[0] if node.target is _ITEM else None
    if isinstance(read, fx.Node) and read.op == "placeholder":
        return read
    with graph.inserting_after(node):
        tensor = graph.call_function(aten.scalar_tensor.default, (node,), {"dtype": torch.float64})
    with private.fake_mode():
        tensor.meta["val"] = torch.empty((), dtype=torch.float64, device="cpu")
    return tensor


def _is_float(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.SymFloat)


# ---- random numbers ---------------------------------------------------------------------------------------------------


def random_state() -> torch.Tensor:
    """Return the state of torch's default generator."""
    return torch.get_rng_state()


@private.has_side_effect
def random_set_state(state: torch.Tensor) -> None:
    """Set the state of torch's default generator."""
    torch.set_rng_state(state)


def share_random_states(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Make a backward draw the same random numbers as its forward.

    Args:
        forward, backward: the graphs, which are changed.
        results: the number of the forward's results that are not saved for the backward.
    """
    recomputed = {node.name: node for node in backward.graph.nodes if _is_random(node)}
    for node in [node for node in forward.graph.nodes if node.name in recomputed and _is_random(node)]:
        state = _state(forward.graph, node)
        saved_input = _saved(forward.graph, backward.graph, state, results)
        other = recomputed[node.name]
        _draw_again(backward.graph, other, saved_input, other.target, other.args, other.kwargs)
    for node in _calls_of(forward, private.run_and_save_rng_state):
        if _is_on_cpu(node):
            _unwrap_saving(forward.graph, node)
    for node in _calls_of(backward, private.run_with_rng_state):
        state, target, *args = node.args
        if _is_on_cpu(node):
            _draw_again(backward.graph, node, state, target, tuple(args), node.kwargs)


def _calls_of(module: fx.GraphModule, target: Any) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="call_function", target=target))


def _is_random(node: fx.Node) -> bool:
    """Return whether a node draws from the CPU's generator."""
    if not private.is_overload(node.target) or not _is_on_cpu(node):
        return False
    return torch.Tag.nondeterministic_seeded in private.tags(node.target) or _draws_untagged(node)


def has_effect(node: fx.Node) -> bool:
    """Return whether a call has a side effect: it draws from a generator, checks, or prints."""
    return node.is_impure() or _draws_untagged(node)


def _draws_untagged(node: fx.Node) -> bool:
    return str(node.target).rsplit(".", 1)[0] in _UNTAGGED


def _is_on_cpu(node: fx.Node) -> bool:
    """Return whether all tensors of a node are on the CPU."""
    near = [node, *node.all_input_nodes, *node.users]
    found = [each for other in near for each in _flat(other.meta.get("val")) if isinstance(each, torch.Tensor)]
    return all(each.device.type == "cpu" for each in found)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _state(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return a new node, before another one, for the generator's state."""
    with graph.inserting_before(node):
        state = graph.call_function(random_state)
    state.meta["val"] = _fake_state()
    return state


def _fake_state() -> torch.Tensor:
    with private.fake_mode():
        return torch.empty(torch.get_rng_state().shape, dtype=torch.uint8, device="cpu")


def _unwrap_saving(graph: fx.Graph, node: fx.Node) -> None:
    """Replace torch's call of an operator that returns the state and the result."""
    state = _state(graph, node)
    target, *args = node.args
    with graph.inserting_before(node):
        value = graph.call_function(target, tuple(args), node.kwargs)  # pyright: ignore[reportArgumentType]
    for user in list(node.users):
        assert user.target is operator.getitem
        if user.args[1] == 1:
            value.meta = dict(user.meta)
        user.replace_all_uses_with(value if user.args[1] == 1 else state)
        graph.erase_node(user)
    graph.erase_node(node)


def _saved(forward: fx.Graph, backward: fx.Graph, state: fx.Node, results: int) -> fx.Node:
    """Make a forward save one more tensor, after the others, and return the backward's new input for it."""
    output = forward.output_node()
    returned = list(private.output_of(forward))
    place = next((k for k, each in enumerate(returned[results:], results) if not _is_tensor(each)), len(returned))
    output.args = ((*returned[:place], state, *returned[place:]), *output.args[1:])
    inputs = backward.find_nodes(op="placeholder")
    first = next(k for k, each in enumerate(inputs) if _is_tensor(each) or each.name.startswith("tangents"))
    after = next(each for each in inputs[first:] if each.name.startswith("tangents") or not _is_tensor(each))
    with backward.inserting_before(after):
        saved_input = backward.placeholder(state.name)
    saved_input.meta["val"] = state.meta["val"]
    return saved_input


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _draw_again(graph: fx.Graph, node: fx.Node, state: Any, target: Any, args: Any, kwargs: Any) -> None:
    """Replace a node by a call of an operator from a state; afterwards the generator gets its previous state back."""
    state.meta["val"] = _fake_state()  # torch has made its size a symbol, which no input defines
    before = _state(graph, node)
    before.meta["val"] = state.meta["val"]
    with graph.inserting_before(node):
        graph.call_function(random_set_state, (state,))
        value = graph.call_function(target, args, kwargs)
        graph.call_function(random_set_state, (before,))
    value.meta = dict(node.meta)
    if "val" not in node.meta:
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        with private.fake_mode():
            value.meta = {"val": target(*fake_args, **fake_kwargs)}
    node.replace_all_uses_with(value)
    graph.erase_node(node)
