"""The patterns that models write by hand, each with the function that replaces it in Dynamo's graph.

A pattern has an anchor, an operation that starts the search, and a function that is called with each node of this operation. It
replaces the pattern around the node and returns True, returns False if the pattern is not there, or raises ``Kept`` with the
reason why the graph keeps it. To add a pattern, write such a function in a file of this folder and add a row to ``PATTERNS``.

Norms, gates and rotary embeddings need no pattern: each becomes one kernel by fusion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import fx

from opkit.compiler.capture.attention_masks import Constants, remove_unused, unused
from opkit.compiler.capture.patterns import attention, cross_entropy
from opkit.compiler.capture.patterns.nodes import Kept, operation


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern.

    Attributes:
        name: what it is.
        anchor: the operation that the search starts from, a row of ``nodes.OPERATIONS``.
        replace: the function that is called with each node of this operation.
    """

    name: str
    anchor: str
    replace: Callable[[fx.Node, Constants], bool]


PATTERNS = (
    # torch's function: its kernels do not store the scores
    Pattern("attention", "softmax", attention.replace),
    # with the linear layer before it, chunks of rows: not all logits are in memory
    Pattern("cross-entropy", "cross-entropy", cross_entropy.replace),
)


def replace_patterns(module: fx.GraphModule) -> list[str]:
    """Replace the patterns in Dynamo's graph, and return a line for each that was replaced or kept."""
    constants, notes, before = Constants(module), [], unused(module)
    for node in list(module.graph.nodes):
        notes += [note for p in PATTERNS if operation(node) == p.anchor and (note := _note(p, node, constants))]
    if notes:
        remove_unused(module, before)
    return notes


def _note(pattern: Pattern, node: fx.Node, constants: Constants) -> str:
    try:
        return f"replaced {pattern.name} at {node.name}" if pattern.replace(node, constants) else ""
    except Kept as why:
        return f"kept {pattern.name} at {node.name}: {why}"
