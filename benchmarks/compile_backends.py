"""The backends that benchmarks/compile.py compares, by the names it uses, and the two floors under all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.backends.registry import list_backends

EAGER, DYNAMO, FLOOR = "eager", "dynamo", "aot"
"""No compiler; Dynamo alone, which runs its graph; and Dynamo with AOTAutograd alone, which runs its graphs."""

_BUILT_IN = "opkit.compiler.backend"


def compiled(name: str, function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """``function`` compiled with a backend of this name, of torch's own, or of opkit's; "eager" leaves it as it is."""
    return function if name == EAGER else torch.compile(function, backend=backend(name), **how)


def backend(name: str) -> Any:
    """Return the argument of ``torch.compile(backend=)`` for a name.

    Raises:
        RuntimeError: there is no backend of this name.
    """
    if name == DYNAMO:
        return "eager"
    if name == FLOOR:
        return floor
    if name in list_backends(exclude_tags=()):
        return name
    try:
        return import_module(_BUILT_IN).opkit_backend
    except ImportError as error:
        raise RuntimeError(f"torch has no backend {name!r}, and opkit's cannot be imported: {error}") from error


def strict(name: str) -> Any:
    """The same, but for opkit's one that fails where it would otherwise run a graph eagerly."""
    return (
        functools.partial(import_module(_BUILT_IN).opkit_backend, options={"strict": True})
        if name == "opkit"
        else backend(name)
    )


def missing(name: str) -> str | None:
    """Why there is no backend of this name, or None where there is."""
    try:
        backend(name)
    except RuntimeError as error:
        return str(error)
    return None


def floor(module: Any, inputs: Any, **_: Any) -> Callable[..., Any]:
    """AOTAutograd with Inductor's decompositions and its partitioner, and a compiler that gives back the graph.

    torch's own ``aot_eager_decomp_partition`` does the same but imports all of Inductor, 1.6 s that are no part of AOTAutograd.
    """
    partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    with torch._functorch.config.patch(unlift_effect_tokens=True):
        return aot_autograd(
            fw_compiler=boxed_nop, bw_compiler=boxed_nop, decompositions=_decompositions, partition_fn=partition
        )(module, inputs)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's, without those of max pooling, which need the rest of Inductor."""
    table = import_module("torch._inductor.decomposition").select_decomp_table()
    return {operator: rule for operator, rule in table.items() if "max_pool" not in str(operator)}
