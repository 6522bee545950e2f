"""Removes ``opkit.checkpoint_name`` from Dynamo's graphs where no policy asks for names: the graph cache refuses it."""

from __future__ import annotations

from torch import fx

_NAME = "opkit.checkpoint_name.default"


def remove_names(module: fx.GraphModule) -> None:
    """Replace named values by the values themselves, but in regions whose policy keeps named ones."""
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    if any("_checkpoint_context_fn" in part.meta for part in parts):
        parts = [module]  # a region may hold others
    for part in parts:
        named = [node for node in part.graph.nodes if str(node.target) == _NAME]
        for node in named:
            node.replace_all_uses_with(node.args[0])  # pyright: ignore[reportArgumentType]
            part.graph.erase_node(node)
        if named:
            part.recompile()
