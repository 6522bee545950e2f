"""The structures of arguments and results as JSON: tuples, lists, named tuples and dictionaries of leaves.

An instance of another class, such as an output of ``transformers``, becomes a dictionary of its fields: its class need not exist
where a model is loaded.
"""

from __future__ import annotations

from typing import Any

from opkit.errors import CompileError
from opkit.runtime.structure import Structure
from opkit.ship import torch_private as private


def of_spec(spec: Any) -> Structure:
    """Return the structure of a pytree.

    Raises:
        CompileError: it has a container that no file can describe.
    """
    if private.is_leaf(spec):
        return None
    children = [of_spec(each) for each in private.children(spec)]
    kind, context = spec.type, spec.context
    if kind in (tuple, list):
        return [kind.__name__, None, children]
    if isinstance(context, type) and hasattr(context, "_fields"):
        return ["namedtuple", [context.__name__, *context._fields], children]
    keys = private.keys(spec)
    if keys is None or len(keys) != len(children) or not all(isinstance(key, str | int) for key in keys):
        raise CompileError(
            f"opkit.export: a {kind.__name__} is among the arguments or results, which no file describes."
        )
    return ["dict", keys, children]
