"""``opkit.checkpoint_name``: names for values, by which policies keep them."""

from __future__ import annotations

import threading
from typing import Any

import torch


class _Naming(threading.local):
    """The modes of a thread that get the names of values, from the outermost to the innermost."""

    def __init__(self) -> None:
        self.modes: list[Any] = []


naming = _Naming()


@torch.library.custom_op("opkit::checkpoint_name", mutates_args=())
def _name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Give a value a name in a captured graph."""
    return x.clone()


_name.register_fake(lambda x, name: torch.empty_like(x))
_name.register_autograd(lambda context, gradient: (gradient, None))
_name.register_vmap(lambda info, dims, x, name: (_name(x, name), dims[0]))
NAME = torch.ops.opkit.checkpoint_name.default
"""In graphs outside of regions that are recomputed, a copy, which ``backend="opkit"`` leaves out; else the value itself."""


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor that has a name, by which :func:`opkit.keep` keeps it for the backward.

    Where no policy knows the name, this does nothing. A name can be given to several values.

    Args:
        x: the value, of any shape and dtype: best what an operator returned, whose other results are kept with it.
        name: the name.

    Returns:
        ``x`` itself in eager mode.

    This is JAX's ``checkpoint_name``.

    >>> import opkit
    >>> def layer(x, weight):
    ...     hidden = opkit.checkpoint_name(x @ weight, "hidden")
    ...     return hidden.sin().cos()
    >>> x, weight = torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)
    >>> opkit.checkpoint(layer, opkit.keep("hidden"))(x, weight).shape  # the backward computes sin again, and no product
    torch.Size([2, 3])
    """
    if torch.compiler.is_compiling():
        return NAME(x, name)
    for mode in naming.modes:
        mode.name(x, name)
    return x
