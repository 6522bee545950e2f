"""``opkit.checkpoint``: a function whose backward keeps what a policy says, and computes the rest again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from opkit.layers.offloading import moving
from opkit.layers.policies import Policy, policy_of
from opkit.layers.recomputation import contexts


def checkpoint(function: Callable[..., Any], policy: str | Policy = "recompute_all") -> Callable[..., Any]:
    """Return a function that computes the same, and keeps for its backward what a policy says.

    The other values are computed again in the backward, from the arguments: with the same random numbers (but those of a
    ``torch.Generator`` that is passed to operators), and, under ``torch.compile``, only those that it needs. In eager mode the
    function is called a second time, and operators whose results were kept do not run; it must do the same then. A module's
    buffers change once, but the second call reads what the first one left there. Where values are recomputed, torch does not
    notice that the function writes to what its backward needs: it must run with "save_all". Policies nest: the inner one decides.

    Args:
        function: a function or module of any arguments, whose results are tensors or tuples, lists and dicts of them.
        policy: "save_all", "recompute_all", "recompute_cheap" (keeps the results of products, convolutions, attention and
            operators that are not torch's), :func:`keep` or :func:`offload`.

    Raises:
        ArgumentError: there is no such policy.
        CheckpointError: in the backward: a value that was kept has been written to.

    This is ``jax.checkpoint``, on ``torch.utils.checkpoint``.

    >>> import torch
    >>> import opkit
    >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    >>> opkit.checkpoint(layer, "recompute_cheap")(torch.ones(2, 4)).shape  # the backward computes GELU again
    torch.Size([2, 4])
    """
    chosen = policy_of(policy)
    run = function
    if chosen.recomputed != "nothing":
        module = None if torch.compiler.is_compiling() else _with_buffers(function)
        options = {}
        if chosen != Policy("all", moved=chosen.moved) or module is not None:
            arguments = (
                (chosen.recomputed, chosen.names) if module is None else (chosen.recomputed, chosen.names, module)
            )
            options = {"context_fn": functools.partial(contexts, *arguments)}
        run = functools.partial(recompute, function, use_reentrant=False, **options)
    return moving(_framed(run)) if chosen.moved else run


def _with_buffers(function: Callable[..., Any]) -> nn.Module | None:
    """Return the module whose forward a function is, if it has buffers."""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__self__", function)
    return module if isinstance(module, nn.Module) and next(module.buffers(), None) is not None else None


def _framed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a frame of its own, which Dynamo captures where the caller's is not."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run
