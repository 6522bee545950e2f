"""What a forward keeps for its backward: of a conjugate the tensor itself, of random numbers the generator's state.

The derivatives of complex products are products with conjugates, which are views in eager mode. A graph's results have no
such views, so a forward that returned them would have to compute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.randomness import share_random_states

_CONJUGATE = torch.ops.aten._conj.default


def partition(joint: fx.GraphModule, inputs: Sequence[Any], **rest: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's forward and backward of a joint graph, as its min-cut partitioner makes them but for these."""
    forward, backward = private.min_cut_partition(joint, inputs, **rest)
    share_random_states(forward, backward, rest["num_fwd_outputs"])
    _keep_unconjugated(forward, backward, rest["num_fwd_outputs"])
    return forward, backward


def _keep_unconjugated(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Lets the backward compute the conjugates that are among what comes after the forward's results."""
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    given = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    returned = list(output.args[0])
    for k, node in enumerate(returned[results:], results):
        if isinstance(node, fx.Node) and node.target is _CONJUGATE and node.name in given:
            returned[k] = node.args[0]
            _conjugate(backward.graph, given[node.name], returned[k], [*given.values()][-1])
    output.args = (type(output.args[0])(returned), *output.args[1:])
    for module in (forward, backward):
        module.graph.eliminate_dead_code()
        module.recompile()


def _conjugate(graph: fx.Graph, given: fx.Node, of: fx.Node, last: fx.Node) -> None:
    """Has a graph take another tensor for an input, and compute its conjugate after the ``last`` of the inputs."""
    with graph.inserting_after(last):
        again = graph.call_function(_CONJUGATE, (given,))
    again.meta = dict(given.meta)
    given.meta = {**given.meta, "val": of.meta["val"]}
    given.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
