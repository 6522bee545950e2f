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


def _report(x: torch.Tensor, name: str) -> torch.Tensor:
    for mode in naming.modes:
        mode.name(x, name)
    return x


_library = torch.library.Library("opkit", "FRAGMENT")
_library.define("checkpoint_name(Tensor(a) x, str name) -> Tensor(a)")
_library.impl("checkpoint_name", _report, "CompositeImplicitAutograd")
_captured = torch.ops.opkit.checkpoint_name.default
"""What Dynamo's graphs call. AOTAutograd's have the value itself, for transforms of torch.func and writes in place as well."""


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor that has a name, by which :func:`opkit.keep` keeps it for the backward.

    Where no policy knows the name, this does nothing. A name can be given to several values.

    Args:
        x: the value, of any shape and dtype: best what an operator returned, whose other results are kept with it.
        name: the name.

    Returns:
        ``x`` itself.

    This is JAX's ``checkpoint_name``.

    >>> import opkit
    >>> def layer(x, weight):
    ...     hidden = opkit.checkpoint_name(x @ weight, "hidden")
    ...     return hidden.sin().cos()
    >>> x, weight = torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)
    >>> opkit.checkpoint(layer, opkit.keep("hidden"))(x, weight).shape  # the backward computes sin again, and no product
    torch.Size([2, 3])
    """
    return (_captured if torch.compiler.is_compiling() else _report)(x, name)
